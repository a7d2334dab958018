"""Is communication hidden, measured over real links? The same as `meshslice bench --wire auto`.

    python benchmarks/bench_wire.py --json wire.json --plot wire.png
    python benchmarks/bench_wire.py --wire 430 --dataflows os --slices 4,8 --passes fwd

Needs root (network namespaces, traffic shaping); without it, it says so and exits with 2.
"""

import sys

from common import run
from meshslice_jax.cli.bench import bench

if __name__ == "__main__":
    if not any(word.startswith("--wire") for word in sys.argv[1:]):
        sys.argv[1:1] = ["--wire", "auto"]
    run(bench)
