"""The block schedule: what the model and the simulator can do beyond the runtime.

The runtime runs the products of a block one after the other. With allow_modelled=True the
tuner also asks the simulator what opening the borders between them would bring
(`BlockSchedule`). It climbs a ladder that opens one border more at every rung, and, since
hidden prologues make long slices cheap, tries it with the slice counts as tuned, halved and
cut to a third. The fastest that fits the memory limit wins; the plain order is among them.
That is a heuristic on top of the exact plan, and its times are the simulator's.
"""

import dataclasses
from collections.abc import Iterator

from meshslice_jax.algorithms import ALGORITHMS, fits, layer_problems, view
from meshslice_jax.autotune.chain import Block
from meshslice_jax.autotune.layer import Limit
from meshslice_jax.autotune.memory import shard_extra_bytes
from meshslice_jax.autotune.product import SMALLEST_BLOCK, faster
from meshslice_jax.block import BlockSchedule
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.model_plan import PASSES
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.simulate import simulate_block

#: Options in the order in which they are opened: each helps only with those before it.
LADDER = (
    "grad_lhs_first",
    "prefetch_weight",
    "prefetch_saved",
    "overlap_grad_rhs",
    "share_cotangent",
)
#: Slice counts are tried divided by these.
_COARSER = (1, 2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlapped:
    """A block with a block schedule.

    Attributes:
      schedule: which borders are open.
      plans: the layers, perhaps with fewer slices than tuned for the plain order.
      products_s: simulated seconds of the products.
      memory_bytes: bytes of one chip.
    """

    schedule: BlockSchedule
    plans: dict[str, LayerPlan]
    products_s: float
    memory_bytes: int


def ladder() -> Iterator[BlockSchedule]:
    """Block schedules from the plain order to everything open, then with deeper buffers."""
    for rungs in range(len(LADDER) + 1):
        yield BlockSchedule(**dict.fromkeys(LADDER[:rungs], True))
    yield BlockSchedule(**dict.fromkeys(LADDER, True), buffer_depth=3)


def best_overlap(
    block: Block,
    plans: dict[str, LayerPlan],
    shape: MeshShape,
    hardware: HardwareSpec,
    limit: Limit,
) -> Overlapped | None:
    """The fastest block schedule that fits, or None where blocks cannot be simulated.

    Args:
      block: the block that was tuned.
      plans: its layers as tuned.
      shape: the mesh of one replica.
      hardware: the profile.
      limit: the memory limit.
    """
    flat = {ALGORITHMS[p.forward.algorithm].flatten(p.forward) is not None for p in plans.values()}
    if flat == {True, False}:
        return None  # layers that see different meshes
    best, tried = None, []
    for divisor in _COARSER:
        coarse = {
            name: _coarser(plan, block.problems[name], shape, divisor)
            for name, plan in plans.items()
        }
        if coarse in tried:
            continue
        tried.append(coarse)
        for schedule in ladder():
            found = _simulated(block, coarse, schedule, shape, hardware, limit)
            fitting = found.memory_bytes <= limit.limit_bytes
            if fitting and (best is None or faster(found.products_s, best.products_s)):
                best = found
    return best


def _simulated(block, plans, schedule, shape, hardware, limit) -> Overlapped:
    layers = {name: (block.problems[name], plans[name]) for name in block.problems}
    found = simulate_block(layers, shape, hardware, block=schedule)
    shards = max(
        shard_extra_bytes(part, problem, shape.num_chips)
        for problem in block.problems.values()
        for part in PASSES
    )
    return Overlapped(
        schedule=schedule,
        plans=plans,
        products_s=found.total_s,
        memory_bytes=limit.resident_bytes + shards + found.peak_temporary_bytes,
    )


def _coarser(plan: LayerPlan, problem: GemmProblem, shape: MeshShape, divisor: int) -> LayerPlan:
    """The layer with slice counts of at most a fraction of the tuned ones, as far as legal."""
    own = layer_problems(problem, plan.forward)
    return LayerPlan(
        **{part: _fewer(getattr(plan, part), own[part], shape, divisor) for part in PASSES}
    )


def _fewer(plan: GemmPlan, problem: GemmProblem, shape: MeshShape, divisor: int) -> GemmPlan:
    most = max(1, plan.slice_count // divisor)
    for count in range(most, 0, -1):
        tried = dataclasses.replace(plan, slice_count=count)
        if count == plan.slice_count:
            return plan
        if fits(problem, tried, view(plan, shape)) and _blocks_are_whole(tried, problem, shape):
            return tried
    return plan


def _blocks_are_whole(plan: GemmPlan, problem: GemmProblem, shape: MeshShape) -> bool:
    if "block_size" not in ALGORITHMS[plan.algorithm].options or plan.block_size is not None:
        return True
    coarse = dataclasses.replace(plan, block_size=SMALLEST_BLOCK)
    return plan.slice_count == 1 or fits(problem, coarse, view(plan, shape))
