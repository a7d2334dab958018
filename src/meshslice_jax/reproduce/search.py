"""The paper's two-phase search, for MeshSlice and for its peers.

Phase 1 fixes the dataflow of each layer: the largest of its three matrices stays put.
Phase 2 tries every mesh shape, and for MeshSlice every slice count S of each layer, one
S for its three products, where slices are whole tiles of 8. Peers that merge their
steps take MeshSlice's S of the same layer and shape. The time of a block is the sum
of its products, forward and backward; nothing overlaps between products.

1D peers flatten the mesh into one ring and merge it into 8 steps. 1D tensor
parallelism moves the smaller of a layer's two activations.
(MeshSlice, ISCA 2025, sections 3.5 and 4.)
"""

import dataclasses
import functools
import math
from collections.abc import Iterable

from meshslice_jax.algorithms import layer_problems
from meshslice_jax.cost import CostBreakdown, seconds
from meshslice_jax.dataflow import TABLE, Dataflow
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape, factorisations
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import ROLES, GemmProblem
from meshslice_jax.reproduce.peers import (
    DEFAULT_WANG,
    WangForm,
    plan_of,
    runtime_schedule,
    summa_schedule,
    wang_schedule,
)

ALGORITHMS_2D = ("meshslice", "wang", "collective", "summa", "cannon")
ALGORITHMS_1D = ("tp1d", "fsdp")
#: A slice is made of whole register tiles of 8 (section 3.1).
_TILE = 8
_MOST_SLICES = 64
_MERGED_1D = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """Products and their time.

    Attributes:
      flops: floating-point operations over all chips.
      costs: one breakdown per product.
      mesh_shape: the mesh on which they run.
      slice_counts: one per layer.
    """

    flops: int
    costs: tuple[CostBreakdown, ...]
    mesh_shape: MeshShape
    slice_counts: tuple[int, ...]

    @functools.cached_property
    def total_s(self) -> float:
        """Seconds of all products in turn."""
        return sum(cost.total_s for cost in self.costs)

    def utilisation(self, hardware: HardwareSpec) -> float:
        """Percent of the peak FLOP/s of all chips."""
        peak = hardware.flops_per_s("bfloat16") * self.mesh_shape.num_chips
        return 100 * self.flops / (peak * self.total_s)

    def sum(self, field: str) -> float:
        """The sum over products of one field of CostBreakdown."""
        return sum(getattr(cost, field) for cost in self.costs)


def largest_stationary(problem: GemmProblem) -> Dataflow:
    """The dataflow in which the largest matrix stays put; out, then lhs, on a tie."""
    sizes = {role: problem.bytes(role) for role in ROLES}
    return max(Dataflow, key=lambda dataflow: sizes[TABLE[dataflow].stationary])


def mesh_shapes(num_chips: int) -> tuple[MeshShape, ...]:
    """All true 2D meshes of `num_chips`."""
    return tuple(shape for shape in factorisations(num_chips) if min(shape) > 1)


def block(
    layers: Iterable[GemmProblem],
    num_chips: int,
    algorithm: str,
    hardware: HardwareSpec,
    *,
    dataflow: Dataflow | None = None,
    shapes: Iterable[MeshShape] | None = None,
    slice_count: int | None = None,
    wang: WangForm = DEFAULT_WANG,
) -> Timed:
    """The fastest mesh shape for the layers of a block, forward and backward.

    Args:
      layers: the forward product of each layer.
      num_chips: chips of the mesh.
      algorithm: a name in ALGORITHMS.
      hardware: the machine.
      dataflow: one for all layers; None lets the largest matrix of each stay put.
      shapes: mesh shapes to try; None is all of them.
      slice_count: one for all layers; None is the best of each.
      wang: the form of Wang's algorithm.

    Raises:
      ValueError: no 2D mesh of so many chips suits the algorithm.
    """
    if algorithm in ALGORITHMS_1D:
        return _block_1d(tuple(layers), num_chips, algorithm, hardware)
    found = []
    for shape in _suitable(num_chips, algorithm, shapes):
        timed = [
            layer(
                problem,
                dataflow or largest_stationary(problem),
                shape,
                algorithm,
                hardware,
                slice_count,
                wang,
            )
            for problem in layers
        ]
        found.append(
            Timed(
                flops=sum(t.flops for t in timed),
                costs=sum((t.costs for t in timed), ()),
                mesh_shape=shape,
                slice_counts=sum((t.slice_counts for t in timed), ()),
            )
        )
    return min(found, key=lambda timed: timed.total_s)


def layer(
    problem: GemmProblem,
    dataflow: Dataflow,
    shape: MeshShape,
    algorithm: str,
    hardware: HardwareSpec,
    slice_count: int | None = None,
    wang: WangForm = DEFAULT_WANG,
) -> Timed:
    """The three products of a layer with the best common slice count."""
    return _with_best_slices(
        _passes(problem, dataflow), shape, algorithm, hardware, slice_count, wang
    )


def single(
    problem: GemmProblem,
    num_chips: int,
    algorithm: str,
    hardware: HardwareSpec,
    wang: WangForm = DEFAULT_WANG,
    shapes: Iterable[MeshShape] | None = None,
    slice_count: int | None = None,
) -> Timed:
    """One product by itself on its fastest mesh shape, the largest matrix stationary."""
    products = ((problem, largest_stationary(problem)),)
    found = (
        _with_best_slices(products, shape, algorithm, hardware, slice_count, wang)
        for shape in _suitable(num_chips, algorithm, shapes)
    )
    return min(found, key=lambda timed: timed.total_s)


def _suitable(
    num_chips: int, algorithm: str, shapes: Iterable[MeshShape] | None
) -> list[MeshShape]:
    """The shapes given, or all 2D ones, on which the algorithm runs."""
    shapes = tuple(shapes or mesh_shapes(num_chips))
    found = [shape for shape in shapes if algorithm != "cannon" or shape.rows == shape.cols]
    if found:
        return found
    tried = ", ".join(map(str, shapes)) or "none"
    raise ValueError(
        f"{algorithm} has no 2D mesh of {num_chips} chips (tried: {tried}); "
        "cannon needs a square one, the others a number that is not a prime"
    )


def _with_best_slices(products, shape, algorithm, hardware, slice_count, wang) -> Timed:
    def timed(name: str, count: int) -> Timed:
        costs = (product(*p, shape, name, count, hardware, wang) for p in products)
        return Timed(
            flops=sum(problem.flops for problem, _ in products),
            costs=tuple(costs),
            mesh_shape=shape,
            slice_counts=(count,),
        )

    if algorithm in ("collective", "cannon"):
        return timed(algorithm, 1)
    if slice_count is None:
        candidates = (timed("meshslice", count) for count in _slice_counts(*products[0], shape))
        best = min(candidates, key=lambda found: found.total_s)
        if algorithm == "meshslice":
            return best
        (slice_count,) = best.slice_counts
    return timed(algorithm, slice_count)


def product(
    problem: GemmProblem,
    dataflow: Dataflow,
    shape: MeshShape,
    algorithm: str,
    slice_count: int,
    hardware: HardwareSpec,
    wang: WangForm = DEFAULT_WANG,
) -> CostBreakdown:
    """The cost of one product of a 2D algorithm."""
    if algorithm == "wang":
        rings = {
            "best": ("row", "col"),
            "prototype": ("col",) if dataflow is Dataflow.RS else ("row",),
        }.get(wang.ring, (wang.ring,))
        schedules = [
            wang_schedule(problem, dataflow, shape, slice_count, ring, wang) for ring in rings
        ]
    elif algorithm == "summa":
        schedules = [summa_schedule(problem, dataflow, shape, slice_count, hardware)]
    else:
        count = slice_count if algorithm == "meshslice" else 1
        schedules = [runtime_schedule(problem, plan_of(algorithm, dataflow, count), shape)]
    costs = [seconds(schedule, problem, hardware) for schedule in schedules]
    return min(costs, key=lambda cost: cost.total_s)


@functools.lru_cache(maxsize=1 << 12)
def _passes(problem: GemmProblem, dataflow: Dataflow) -> tuple[tuple[GemmProblem, Dataflow], ...]:
    """The products of a layer's training step and their dataflows."""
    return tuple(
        (p, plan.dataflow) for p, plan in _planned(problem, plan_of("collective", dataflow))
    )


def _planned(problem: GemmProblem, plan: GemmPlan) -> list[tuple[GemmProblem, GemmPlan]]:
    plans = {
        "forward": plan,
        "grad_lhs": plan.gradient("lhs"),
        "grad_rhs": plan.gradient("rhs"),
    }
    return [(p, plans[name]) for name, p in layer_problems(problem, plan).items()]


@functools.lru_cache(maxsize=1 << 12)
def _slice_counts(problem: GemmProblem, dataflow: Dataflow, shape: MeshShape) -> tuple[int, ...]:
    """Slice counts whose slices are whole tiles on both axes; at least 1."""
    streamed = problem.extent(plan_of("meshslice", dataflow).contraction.streamed)
    tiles = streamed // (math.lcm(*shape) * _TILE)
    counts = [s for s in range(1, min(tiles, _MOST_SLICES) + 1) if tiles % s == 0]
    return tuple(counts) or (1,)


def _block_1d(
    layers: tuple[GemmProblem, ...], num_chips: int, algorithm: str, hardware: HardwareSpec
) -> Timed:
    shape, costs, flops = MeshShape(num_chips, 1), [], 0
    for problem in layers:
        if algorithm == "fsdp":
            plan = plan_of("fsdp", Dataflow.OS, _MERGED_1D)
        else:
            split = "column" if problem.k <= problem.n else "row"
            plan = plan_of("tp1d", Dataflow.RS, _MERGED_1D, split=split)
        for part, part_plan in _planned(problem, plan):
            costs.append(seconds(runtime_schedule(part, part_plan, shape), part, hardware))
            flops += part.flops
    return Timed(
        flops=flops, costs=tuple(costs), mesh_shape=shape, slice_counts=(_MERGED_1D,) * len(layers)
    )
