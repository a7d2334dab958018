"""What opening the borders between a block's products gains, and what memory it costs.

`python -m meshslice_jax.block_study` prints the tables of docs/simulator.md. Each row
adds one option of `BlockSchedule` to the ones above it. Hidden borders make short
slices less useful, so every row is shown twice: with the slice counts that suit the
plain order, and with counts picked again for the row. All numbers are simulated.
"""

import dataclasses
import functools
from collections.abc import Iterator

from meshslice_jax import algorithms, cost
from meshslice_jax.block import BlockSchedule
from meshslice_jax.hardware import HardwareSpec, hardware_spec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.models import model_layers
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.simulate import simulate_block
from meshslice_jax.timeline import Timeline

#: Options in the order in which they are added, with what the tables call them.
LADDER = (
    ("plain order", {}),
    ("dX before dW", {"grad_lhs_first": True}),
    ("+ weights gathered ahead", {"prefetch_weight": True}),
    ("+ dW's operand gathered ahead", {"prefetch_saved": True}),
    ("+ dW's reduce-scatter behind the next product", {"overlap_grad_rhs": True}),
    ("+ gathered dY shared", {"share_cotangent": True}),
    ("+ buffer depth 3", {"buffer_depth": 3}),
)
#: Block size of the paper's slices on TPU (MeshSlice, ISCA 2025, section 3.1).
_BLOCK_SIZE = 8
_MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A block to study.

    Attributes:
      model: name of the model.
      chips: number of chips; the batch is half of it (the paper's weak scaling).
      mesh_shape: (rows, cols).
      hardware: name of the profile.
    """

    model: str
    chips: int = 256
    mesh_shape: tuple[int, int] = (32, 8)
    hardware: str = "tpu_v4_paper"

    @property
    def spec(self) -> HardwareSpec:
        return hardware_spec(self.hardware)

    @functools.cached_property
    def problems(self) -> dict[str, GemmProblem]:
        """The block's forward products."""
        return model_layers(self.model, batch=self.chips // 2, seq_len=2048, dtype="bfloat16")

    @property
    def flops(self) -> int:
        """FLOPs of forward and both gradients, on all chips."""
        return sum(3 * problem.flops for problem in self.problems.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table.

    Attributes:
      label: what was added.
      block: the options.
      slice_counts: of the layers in order.
      total_s: seconds of the block's products.
      utilisation: of the profile's peak.
      gain: plain time / total_s - 1, with the same rule for slice counts.
      peak_temporary_bytes: see Timeline.
    """

    label: str
    block: BlockSchedule
    slice_counts: tuple[int, ...]
    total_s: float
    utilisation: float
    gain: float
    peak_temporary_bytes: int


def layer_plan(problem: GemmProblem, slice_count: int) -> LayerPlan:
    """The paper's plan of an FC layer: the larger of output and input stays put."""
    dataflow = "os" if problem.n > problem.k else "ls"
    forward = GemmPlan(
        dataflow=dataflow,
        slice_count=slice_count,
        block_size=_BLOCK_SIZE,
        reduce_dtype="output",
    )
    return LayerPlan(forward=forward)


def legal_counts(study: Study, layer: str) -> tuple[int, ...]:
    """Slice counts with which a layer's three products run."""
    problem = study.problems[layer]
    plan = layer_plan(problem, 1).forward
    return algorithms.legal_slice_counts(
        plan, problem.m, problem.n, problem.k, MeshShape(*study.mesh_shape)
    )


def closed_form_counts(study: Study) -> tuple[int, ...]:
    """Per layer, the slice count that is best for its three products one by one."""

    def layer_s(problem: GemmProblem, count: int) -> float:
        plan, shape = layer_plan(problem, count), MeshShape(*study.mesh_shape)
        return sum(
            cost.seconds(
                algorithms.schedule(part, getattr(plan, kind), shape), part, study.spec
            ).total_s
            for kind, part in algorithms.layer_problems(problem, plan.forward).items()
        )

    return tuple(
        min(legal_counts(study, name), key=lambda count: layer_s(problem, count))
        for name, problem in study.problems.items()
    )


def simulate_counts(study: Study, block: BlockSchedule, counts: tuple[int, ...]) -> Timeline:
    """The block with given slice counts."""
    layers = {
        name: (problem, layer_plan(problem, count))
        for (name, problem), count in zip(study.problems.items(), counts, strict=True)
    }
    return simulate_block(layers, study.mesh_shape, study.spec, block=block)


def pick_counts(study: Study, block: BlockSchedule, start: tuple[int, ...]) -> tuple[int, ...]:
    """Slice counts for one set of options: coarser scalings of `start`, then one layer at a time.

    Args:
      study: the block.
      block: the options.
      start: slice counts of the plain order.
    """
    legal = [legal_counts(study, name) for name in study.problems]

    def at_most(factor: float) -> tuple[int, ...]:
        wanted = [max(1.0, count * factor) for count in start]
        return tuple(
            max(c for c in counts if c <= want) for counts, want in zip(legal, wanted, strict=True)
        )

    @functools.cache
    def seconds(counts: tuple[int, ...]) -> float:
        return simulate_counts(study, block, counts).total_s

    best = min({at_most(factor) for factor in (1.0, 0.7, 0.5, 0.35)}, key=seconds)
    for layer, counts in enumerate(legal):
        place = counts.index(best[layer])
        near = counts[max(place - 1, 0) : place + 2]
        best = min((best[:layer] + (c,) + best[layer + 1 :] for c in near), key=seconds)
    return best


def rows(study: Study, *, pick: bool) -> Iterator[Row]:
    """The rows of one table.

    Args:
      study: the block.
      pick: whether slice counts are picked again for every row.
    """
    start, plain_s, fields = closed_form_counts(study), None, {}
    peak = study.spec.flops_per_s("bfloat16")
    for label, option in LADDER:
        fields |= option
        block = BlockSchedule(**fields)
        counts = pick_counts(study, block, start) if pick else start
        found = simulate_counts(study, block, counts)
        plain_s = plain_s or found.total_s
        yield Row(
            label=label,
            block=block,
            slice_counts=counts,
            total_s=found.total_s,
            utilisation=found.utilisation(study.flops, peak),
            gain=round(plain_s / found.total_s - 1, 6) + 0.0,  # no "-0.0" from rounding
            peak_temporary_bytes=found.peak_temporary_bytes,
        )


def table(study: Study) -> str:
    """A Markdown table of a study."""
    lines = [
        f"{study.model}, {study.chips} chips as {'x'.join(map(str, study.mesh_shape))}, "
        f"profile `{study.hardware}`:",
        "",
        "| options | same S: ms | gain | MiB | S picked again | ms | utilisation | gain | MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for same, picked in zip(rows(study, pick=False), rows(study, pick=True), strict=True):
        lines.append(
            f"| {same.label} | {same.total_s * 1e3:.2f} | {same.gain:+.1%} | "
            f"{same.peak_temporary_bytes / _MIB:.0f} | "
            f"{', '.join(map(str, picked.slice_counts))} | {picked.total_s * 1e3:.2f} | "
            f"{picked.utilisation:.1%} | {picked.gain:+.1%} | "
            f"{picked.peak_temporary_bytes / _MIB:.0f} |"
        )
    return "\n".join(lines) + "\n"


STUDIES = tuple(
    Study(model=model, hardware=profile)
    for profile in ("tpu_v4_paper", "tpu_v4_lowlat", "tpu_v4")
    for model in ("gpt3-175b", "megatron-530b")
)


def main() -> None:
    """Prints the tables of docs/simulator.md."""
    print("\n".join(table(study) for study in STUDIES))


if __name__ == "__main__":
    main()
