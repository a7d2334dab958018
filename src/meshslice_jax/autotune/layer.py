"""The ways in which one layer may run on one mesh.

A layer's choice has two parts. What its three products must share: the dataflow (which
fixes those of the gradients), whether it is the twin with rows and columns exchanged, and
whether it uses the mesh in two dimensions or flattened into one ring. And what each
product settles for itself: the algorithm, its options and the slice count (`product`).
A `Way` is the first part; an `Option` is a way with its three products priced.
"""

import dataclasses
import functools
from collections.abc import Iterator

from meshslice_jax import algorithms
from meshslice_jax.algorithms import ALGORITHMS
from meshslice_jax.autotune import memory
from meshslice_jax.autotune.product import TWO_D, Candidate, Pins, Pricer, faster, sliced
from meshslice_jax.autotune.relayout import Placement, placement
from meshslice_jax.dataflow import Contraction, Dataflow
from meshslice_jax.mesh import MeshShape
from meshslice_jax.model_plan import PASSES
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.problem import GemmProblem

_SPLITS = ("column", "row")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpace:
    """What may be tuned in one layer.

    Attributes:
      pins: what is fixed in each pass, in the order of PASSES.
      dataflows: forward dataflows to try.
      twins: whether to try the layer as it is (False) and as its twin (True).
      one_slice_count: whether the three products share one slice count, as in the paper.
    """

    pins: tuple[Pins, Pins, Pins]
    dataflows: tuple[Dataflow, ...] = tuple(Dataflow)
    twins: tuple[bool, ...] = (False, True)
    one_slice_count: bool = False

    def ways(self) -> Iterator["Way"]:
        """Every way, those with both mesh axes first."""
        flat = [name for name in self.pins[0].algorithms if name not in TWO_D]
        if any(name in TWO_D for name in self.pins[0].algorithms):
            pins = tuple(_only(pins, TWO_D) for pins in self.pins)
            for dataflow in self.dataflows:
                for twin in self.twins:
                    yield Way(dataflow=dataflow, twin=twin, pins=pins)
        for name in flat:
            yield from self._flat_ways(name)

    def _flat_ways(self, name: str) -> Iterator["Way"]:
        """The ways of a 1D algorithm: all products on the same ring; no twin gains anything."""
        algorithm = ALGORITHMS[name]
        fixed = dict(self.pins[0].fields)
        splits = (fixed["split"],) if "split" in fixed else _SPLITS
        for dataflow in self.dataflows:
            if dataflow not in algorithm.forward_dataflows:
                continue
            for split in splits if "split" in algorithm.options else (None,):
                own = () if split is None or "split" in fixed else (("split", split),)
                pins = tuple(
                    Pins((name,) if name in one.algorithms else one.algorithms, one.fields + own)
                    for one in self.pins
                )
                yield Way(dataflow=dataflow, twin=self.twins[0], pins=pins, flat=True)


def _only(pins: Pins, names: tuple[str, ...]) -> Pins:
    return Pins(tuple(name for name in pins.algorithms if name in names), pins.fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """What the three products of a layer share.

    Attributes:
      dataflow: of the forward product.
      twin: whether rows and columns are exchanged.
      pins: what is fixed in each pass.
      flat: whether the mesh is flattened into one ring.
    """

    dataflow: Dataflow
    twin: bool
    pins: tuple[Pins, Pins, Pins]
    flat: bool = False

    def view(self, shape: MeshShape) -> MeshShape:
        """The mesh as the layer's plans see it; flattened meshes of equal size are alike."""
        if self.flat:
            return MeshShape(1, shape.num_chips)
        return MeshShape(shape.cols, shape.rows) if self.twin else shape


@functools.cache
def passes(problem: GemmProblem, dataflow: Dataflow) -> tuple[tuple[GemmProblem, Dataflow], ...]:
    """Product and dataflow of the three passes, in the order of PASSES."""
    contraction = Contraction(dataflow=dataflow)
    gradients = [contraction.gradient(wrt) for wrt in ("lhs", "rhs")]
    return (
        (problem, dataflow),
        *((one.problem(problem), one.contraction.dataflow) for one in gradients),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """A layer that runs in one way, priced.

    Attributes:
      way: what its products share.
      products: the chosen candidate of each pass, in the order of PASSES.
      lhs: where its input lies.
      out: where its output lies.
    """

    way: Way
    products: tuple[Candidate, Candidate, Candidate]
    lhs: Placement
    out: Placement

    @property
    def total_s(self) -> float:
        """Seconds of the three products."""
        return sum(product.cost.total_s for product in self.products)

    def plan(self) -> LayerPlan:
        """The layer's plan, in the names of the mesh's axes."""
        plans = {
            name: _named(product.plan, self.way)
            for name, product in zip(PASSES, self.products, strict=True)
        }
        return LayerPlan(**plans)


def _named(plan: GemmPlan, way: Way) -> GemmPlan:
    if not way.twin:
        return plan
    return dataclasses.replace(plan, row_axis="col", col_axis="row")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """The bytes that one chip may hold, and what it holds anyway.

    Attributes:
      limit_bytes: the limit.
      resident_bytes: what is there whatever product runs.
    """

    limit_bytes: int
    resident_bytes: int

    @property
    def over_bytes(self) -> int:
        """By how much what is there anyway is over the limit; negative where it is not."""
        return self.resident_bytes - self.limit_bytes

    def temporary_bytes(self, name: str, problem: GemmProblem, num_chips: int) -> int:
        """What is left for the temporaries of a layer's pass; may be negative."""
        shards = memory.shard_extra_bytes(name, problem, num_chips)
        return self.limit_bytes - self.resident_bytes - shards


def floor_s(way: Way, problem: GemmProblem, shape: MeshShape, pricer: Pricer) -> float | None:
    """Seconds below which the layer does not get in this way, or None if it cannot run."""
    total, view = 0.0, way.view(shape)
    for (product, dataflow), pins in zip(passes(problem, way.dataflow), way.pins, strict=True):
        if way.flat:
            found = pricer.best(product, dataflow, view, pins)
            floor = found and found.cost.total_s
        else:
            floor = pricer.floor_s(product, dataflow, view)
        if floor is None:
            return None
        total += floor
    return total


def price(
    way: Way,
    space: LayerSpace,
    problem: GemmProblem,
    shape: MeshShape,
    pricer: Pricer,
    limit: Limit,
) -> Option | None:
    """The fastest products of a layer in one way, or None if none fits."""
    view = way.view(shape)
    jobs = [
        (product, dataflow, view, pins, limit.temporary_bytes(name, problem, shape.num_chips))
        for name, (product, dataflow), pins in zip(
            PASSES, passes(problem, way.dataflow), way.pins, strict=True
        )
    ]
    if space.one_slice_count:
        products = _alike(jobs, pricer)
    else:
        products = tuple(pricer.best(*job) for job in jobs)
    if products is None or None in products:
        return None
    forward = _named(products[0].plan, way)
    return Option(
        way=way,
        products=products,
        lhs=placement(forward, "lhs", shape),
        out=placement(forward, "out", shape),
    )


def _alike(jobs: list[tuple], pricer: Pricer) -> tuple[Candidate, ...] | None:
    """The fastest three products that share one slice count."""
    best, best_s = None, float("inf")
    for count in _shared_counts(jobs[0], pricer):
        products = []
        for product, dataflow, view, pins, held in jobs:
            fixed = Pins(pins.algorithms, (*pins.fields, ("slice_count", count)))
            products.append(pricer.best(product, dataflow, view, fixed, held))
        if None in products:
            continue
        total = sum(one.cost.total_s for one in products)
        if sum(max(one.cost.comm_row_s, one.cost.comm_col_s) for one in products) >= best_s:
            break
        if faster(total, best_s):
            best, best_s = tuple(products), total
    return best


def _shared_counts(job: tuple, pricer: Pricer) -> list[int]:
    """Slice counts of the forward product; the gradients stream the same index."""
    product, dataflow, view, pins, _ = job
    if "slice_count" in dict(pins.fields):
        return [dict(pins.fields)["slice_count"]]
    counts = set()
    for plan in pricer.bases(product, dataflow, view, pins):
        counts.update(tried.slice_count for tried in sliced(product, plan, view))
    return sorted(counts)


def why_not(space: LayerSpace, problem: GemmProblem, shape: MeshShape, pricer: Pricer) -> str:
    """Why a layer has no way to run on a mesh: the first product that no algorithm runs."""
    for way in space.ways():
        for name, (product, dataflow), pins in zip(
            PASSES, passes(problem, way.dataflow), way.pins, strict=True
        ):
            faults = []
            for algorithm in pins.algorithms:
                fixed = dict(pricer.common + pins.fields)
                plan = GemmPlan(**(fixed | {"algorithm": algorithm, "dataflow": dataflow}))
                faults.append(
                    algorithms.find_faults(product, _named(plan, way), _sizes(way, shape))
                )
            if all(faults):
                different = dict.fromkeys(fault for found in faults for fault in found)
                shared = [one for one in different if all(one in found for found in faults)]
                return f"{name} {dataflow.value}: {'; '.join(shared or different)}"
    names = ", ".join(dict.fromkeys(n for pins in space.pins for n in pins.algorithms))
    flows = ", ".join(dataflow.value for dataflow in space.dataflows)
    return f"no forward product with dataflow {flows} by {names}"


def _sizes(way: Way, shape: MeshShape) -> MeshShape:
    return MeshShape(shape.cols, shape.rows) if way.twin else shape


def leanest_bytes(
    space: LayerSpace, problem: GemmProblem, shape: MeshShape, pricer: Pricer, limit: Limit
) -> tuple[int, str] | None:
    """The bytes by which a layer misses a limit at the least, and the pass that misses it.

    Per way the worst pass decides; the way that misses by the least is reported. None if
    the layer does not run whatever the limit.
    """
    best = None
    for way in space.ways():
        view, products = way.view(shape), passes(problem, way.dataflow)
        shared = [()]
        if space.one_slice_count:
            counts = _shared_counts((*products[0], view, way.pins[0], None), pricer)
            shared = [(("slice_count", count),) for count in counts]
        for fixed in shared:
            worst = None
            for name, product, pins in zip(PASSES, products, way.pins, strict=True):
                found = pricer.leanest(*product, view, Pins(pins.algorithms, pins.fields + fixed))
                if found is None:
                    break
                left = limit.temporary_bytes(name, problem, shape.num_chips)
                missed = found.schedule.temporary_bytes - left, name
                worst = missed if worst is None else max(worst, missed)
                if best is not None and worst >= best:
                    break
            else:
                best = worst
    return best
