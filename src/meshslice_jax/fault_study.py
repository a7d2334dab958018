"""How much each algorithm loses to jitter, a slow chip and a slow link.

`python -m meshslice_jax.fault_study` prints the table of docs/simulator.md: the FC
products of GPT-3 175B's block on 256 chips, forward and backward, simulated without
faults and with one fault at a time. Losses are in percent of the undisturbed time.
"""

import dataclasses
import statistics

from meshslice_jax.faults import NO_FAULTS, Faults
from meshslice_jax.models import model_layers
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.simulate import simulate_block

#: What the table calls each fault; jitters are means over SEEDS.
FAULTS = {
    "1 % product jitter": Faults(product_jitter=0.01),
    "5 % product jitter": Faults(product_jitter=0.05),
    "5 % hop jitter": Faults(hop_jitter=0.05),
    "a chip 1.5x slower": Faults(slow_chips=((5, 0, 1.5),)),
    "a link 2x slower": Faults(slow_links=((5, 0, "row-", 2.0),)),
}
SEEDS = 3
#: One plan per algorithm, for a square mesh, which all of them can use.
PLANS = {
    "meshslice, S = 4": {"algorithm": "meshslice", "slice_count": 4},
    "collective": {"algorithm": "collective"},
    "wang, S = 4": {"algorithm": "wang", "slice_count": 4},
    "summa, 16 packets": {"algorithm": "summa", "packets": 16},
    "cannon": {"algorithm": "cannon"},
    "fsdp, S = 8": {"algorithm": "fsdp", "slice_count": 8},
}
MESH_SHAPE = (16, 16)


def block_s(plan: dict, faults: Faults, hardware: str = "tpu_v4_paper") -> float:
    """Seconds of the block under one plan (fields of GemmPlan) and one set of faults."""
    problems = model_layers("gpt3-175b", batch=128, seq_len=2048, dtype="bfloat16")
    forward = GemmPlan(dataflow="os", reduce_dtype="output", **plan)
    layers = {name: (problem, LayerPlan(forward=forward)) for name, problem in problems.items()}
    return simulate_block(layers, MESH_SHAPE, hardware, faults=faults).total_s


def loss(plan: dict, faults: Faults, healthy_s: float) -> float:
    """Mean time over the undisturbed one, minus 1."""
    drawn = faults.product_jitter or faults.hop_jitter
    seeds = range(SEEDS if drawn else 1)
    times = [block_s(plan, dataclasses.replace(faults, seed=seed)) for seed in seeds]
    return statistics.mean(times) / healthy_s - 1


def table() -> str:
    """The Markdown table."""
    lines = [
        "| algorithm | undisturbed ms | " + " | ".join(FAULTS) + " |",
        "|---|---|" + "---|" * len(FAULTS),
    ]
    for name, plan in PLANS.items():
        healthy_s = block_s(plan, NO_FAULTS)
        losses = [f"{loss(plan, faults, healthy_s):+.1%}" for faults in FAULTS.values()]
        lines.append(f"| {name} | {healthy_s * 1e3:.1f} | " + " | ".join(losses) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table())
