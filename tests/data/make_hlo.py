"""Writes the HLO texts beside it; needs libtpu.

    python tests/data/make_hlo.py

They are what the TPU compiler made of small products of this package, without the parts
that no test reads (source locations, most of each backend_config).
"""

import re
from pathlib import Path

from meshslice_jax.compiled.compiler import Compiler
from meshslice_jax.compiled.jobs import ProductJob
from meshslice_jax.compiled.options import compiler_options
from meshslice_jax.compiled.topology import parse_topology
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem

#: Name -> topology, plan, and whether the options are `compiler_options`.
SAMPLES = {
    "v4_collective_os": ("v4:4x4", GemmPlan(algorithm="collective"), False),
    "v4_meshslice_os": ("v4:4x4", GemmPlan(slice_count=2), True),
    "v4_meshslice_ls": ("v4:4x4", GemmPlan(dataflow="ls", slice_count=2), True),
    "v4_rolled_os": ("v4:4x4", GemmPlan(slice_count=6, loop="rolled"), True),
    "v4_wang_os": ("v4:2x2", GemmPlan(algorithm="wang"), True),
    "v5e_meshslice_os": ("v5e:4x4", GemmPlan(slice_count=2), True),
}
PROBLEM = GemmProblem.uniform(6144, 6144, 6144, "bfloat16")


def trim(text: str) -> str:
    """The computations of a module, with op names and cycle estimates only."""
    text = text[: text.index("\n")] + text[text.index("\n%") :]
    text = re.sub(r", entry_computation_layout=.*?(?=\n)", "", text)
    text = re.sub(r'metadata=\{op_name="([^"]*)"[^}]*\}', r'metadata={op_name="\1"}', text)
    text = re.sub(r", metadata=\{(?!op_name)[^}]*\}", "", text)

    def estimate(found: re.Match) -> str:
        cycles = re.search(r'"estimated_cycles":"\d+"', found[0])
        return f", backend_config={{{cycles[0]}}}" if cycles else ""

    return re.sub(r", backend_config=\{.*\}(?=\n)", estimate, text)


def main() -> None:
    for name, (topology, plan, tuned) in SAMPLES.items():
        target = parse_topology(topology)
        job = ProductJob(
            topology=str(target),
            mesh_shape=target.dims[:2],
            problem=PROBLEM,
            plan=plan,
            forward=plan.dataflow,
            options=compiler_options(target.hardware, plan) if tuned else {},
        )
        with Compiler(target) as compiler:
            answer = compiler.compile(job)
        if answer.error is not None:
            raise RuntimeError(f"{name}: {answer.error}")
        Path(__file__).with_name(f"{name}.hlo").write_text(trim(answer.hlo))


if __name__ == "__main__":
    main()
