"""How fast is each algorithm beside GSPMD and a dense product? The same as `meshslice bench`.

    python benchmarks/bench_gemm.py --mesh 4x4 --mkn 4096,4096,4096 --passes fwd \
        --algorithms meshslice --dataflows os,ls,rs --slices 4,8
"""

from common import run
from meshslice_jax.cli.bench import bench

if __name__ == "__main__":
    run(bench)
