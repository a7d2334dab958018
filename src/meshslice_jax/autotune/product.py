"""The best plan of one product: algorithm, its options and slice count.

The tuner sees an algorithm only through its faults and its schedule. For one product under
one dataflow on one mesh, every candidate is priced in a fixed order, and the first of the
fastest wins, so the plain collective comes before its equals and results never depend on
anything but the arguments.

Two facts keep it short, and neither loses a better plan:

    cutting finer never makes the transfers cheaper    slice counts are tried upwards until
                                                       the busiest axis alone takes longer
                                                       than the best plan so far
    no algorithm sends less than the collective        so its products, and its bytes at the
                                                       full link rate, are a floor under all

`tests/test_autotune.py` compares the results with plain enumeration.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from meshslice_jax import algorithms
from meshslice_jax.algorithms import ALGORITHMS
from meshslice_jax.algorithms.base import Algorithm
from meshslice_jax.cost import CostBreakdown, seconds
from meshslice_jax.dataflow import Dataflow
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape, divisors
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule

#: Algorithms on both mesh axes, in the order in which ties are decided.
TWO_D = ("collective", "meshslice", "wang", "summa", "cannon")
#: Values that are tried for the fields that an algorithm reads. A chain of up to 64 chips
#: is about as long as its best number of packets.
OPTION_VALUES = {"ring": ("col", "row"), "packets": (1, 2, 4, 8, 16, 32, 64)}
#: In how many packets a panel travels changes nothing that is held.
_PACKETS_ALIKE = {"packets": (1,)}
#: And where the hardware runs its own reduce-scatter beside nothing.
SCATTER_FORMS = ("native", "ring", "all_to_all")
#: Slices are made of blocks of at least this many indices: a TPU register holds 8 x 128, and
#: cutting through it costs what the model does not price (MeshSlice, ISCA 2025, section 3.2).
SMALLEST_BLOCK = 8
#: Slices of MeshSlice that the tuner goes up to. The model gains little beyond (a hop is
#: all that a finer slice costs in it), while each slice is unrolled in a TPU program.
MOST_SLICES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A priced product.

    Attributes:
      plan: with the mesh's axes in the order "row", "col".
      schedule: what a chip sends, computes and holds.
      cost: its seconds.
    """

    plan: GemmPlan
    schedule: Schedule
    cost: CostBreakdown


@dataclasses.dataclass(frozen=True)
class Pins:
    """What is given for a product and must not be tuned.

    Attributes:
      algorithms: the algorithms that may be used, in order of preference.
      fields: (field, value) of GemmPlan that are fixed.
    """

    algorithms: tuple[str, ...] = TWO_D
    fields: tuple[tuple[str, object], ...] = ()

    def plan(self, algorithm: str, dataflow: Dataflow) -> GemmPlan:
        """The plan with one slice that holds all that is fixed."""
        common = {"slice_count": 1, "algorithm": algorithm, "dataflow": dataflow}
        return GemmPlan(**(dict(self.fields) | common))

    def choices(
        self, algorithm: Algorithm, tried: Mapping[str, tuple] = OPTION_VALUES
    ) -> Iterator[dict[str, object]]:
        """Every setting of the options that the algorithm reads and nobody fixed."""
        fixed = dict(self.fields)
        free = [f for f in algorithm.options if f in tried and f not in fixed]
        for values in itertools.product(*(tried[field] for field in free)):
            yield dict(zip(free, values, strict=True))


def faster(seconds: float, than: float) -> bool:
    """Whether the first is the shorter time by more than rounding.

    Sums of the same numbers in another order differ in the last bits; such ties go to
    whatever was tried first.
    """
    return seconds < than * (1 - 1e-9)


def rounded(seconds: float) -> float:
    """A time without the digits that `faster` ignores, to sort by."""
    return float(f"{seconds:.9e}")


def sliced(
    problem: GemmProblem, plan: GemmPlan, shape: MeshShape, pinned: int | None = None
) -> Iterator[GemmPlan]:
    """The plan with every slice count worth trying, ascending, or with the pinned one.

    Args:
      problem: the product.
      plan: a plan with one slice that divides.
      shape: sizes of its row and col axis.
      pinned: the one slice count to try.
    """
    algorithm = ALGORITHMS[plan.algorithm]
    streamed = problem.extent(plan.contraction.streamed)
    counts = sorted({*divisors(streamed), *divisors(shape.num_chips)})
    blocked = "block_size" in algorithm.options and plan.block_size is None and pinned is None
    for count in counts if pinned is None else [pinned]:
        tried = plan if count == 1 else dataclasses.replace(plan, slice_count=count)
        if algorithm.faults(problem, tried, shape):
            continue
        if blocked and count > MOST_SLICES:
            return
        if blocked and count > 1:
            coarse = dataclasses.replace(tried, block_size=SMALLEST_BLOCK)
            if algorithm.faults(problem, coarse, shape):
                continue
        yield tried


class Pricer:
    """Prices products on one hardware profile, each once."""

    def __init__(self, hardware: HardwareSpec, dtype_plan: Mapping[str, object]):
        """Remembers nothing yet.

        Args:
          hardware: the profile.
          dtype_plan: fields of GemmPlan that all candidates share.
        """
        self.hardware = hardware
        self.common = tuple(dtype_plan.items())
        self.options = OPTION_VALUES
        if "reduce_scatter" in hardware.synchronous:
            self.options = OPTION_VALUES | {"reduce_scatter": SCATTER_FORMS}
        self._best = {}
        self._leanest = {}
        self._priced = {}
        self._faults = {}

    def faults(self, problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> list[str]:
        """What keeps a product from running, found once."""
        key = problem, plan, shape
        if key not in self._faults:
            self._faults[key] = algorithms.find_faults(*key)
        return self._faults[key]

    def price(self, problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> Candidate:
        """One legal plan with its schedule and seconds."""
        key = problem, plan, shape
        if key not in self._priced:
            found = ALGORITHMS[plan.algorithm].schedule(problem, plan, shape)
            cost = seconds(found, problem, self.hardware)
            self._priced[key] = Candidate(plan=plan, schedule=found, cost=cost)
        return self._priced[key]

    def best(
        self,
        problem: GemmProblem,
        dataflow: Dataflow,
        shape: MeshShape,
        pins: Pins,
        temporary_bytes: int | None = None,
    ) -> Candidate | None:
        """The fastest candidate whose temporaries fit, or None.

        Args:
          problem: the product.
          dataflow: its dataflow.
          shape: sizes of the plan's row and col axis.
          pins: what is fixed.
          temporary_bytes: the most that temporaries may take; None is no limit.
        """
        key = problem, dataflow, shape, pins, temporary_bytes
        if key not in self._best:
            if temporary_bytes is None:
                self._best[key] = self._search(*key)
            else:
                free = self.best(problem, dataflow, shape, pins)
                fits = free is None or free.schedule.temporary_bytes <= temporary_bytes
                self._best[key] = free if fits else self._search(*key)
        return self._best[key]

    def _search(self, problem, dataflow, shape, pins, temporary_bytes) -> Candidate | None:
        best = None
        pinned = dict(pins.fields).get("slice_count")
        for plan in self.bases(problem, dataflow, shape, pins):
            for tried in sliced(problem, plan, shape, pinned):
                found = self.price(problem, tried, shape)
                cost, held = found.cost, found.schedule.temporary_bytes
                if best and max(cost.comm_row_s, cost.comm_col_s) >= best.cost.total_s:
                    break
                if temporary_bytes is not None and held > temporary_bytes:
                    continue
                if best is None or faster(cost.total_s, best.cost.total_s):
                    best = found
        return best

    def bases(self, problem, dataflow, shape, pins, options=None) -> Iterator[GemmPlan]:
        """Plans with one slice that divide, one per algorithm and choice of options."""
        for name in pins.algorithms:
            algorithm = ALGORITHMS[name]
            base = Pins(pins.algorithms, self.common + pins.fields).plan(name, dataflow)
            for choice in pins.choices(algorithm, options or self.options):
                plan = dataclasses.replace(base, **choice)
                if not self.faults(problem, plan, shape):
                    yield plan

    def leanest(self, problem, dataflow, shape, pins) -> Candidate | None:
        """The candidate with the fewest temporary bytes, or None."""
        key = problem, dataflow, shape, pins
        if key not in self._leanest:
            pinned = dict(pins.fields).get("slice_count")
            found = (
                self.price(problem, tried, shape)
                for plan in self.bases(*key, self.options | _PACKETS_ALIKE)
                for tried in sliced(problem, plan, shape, pinned)
            )
            self._leanest[key] = min(
                found, key=lambda one: one.schedule.temporary_bytes, default=None
            )
        return self._leanest[key]

    def floor_s(self, problem: GemmProblem, dataflow: Dataflow, shape: MeshShape) -> float | None:
        """Seconds below which no 2D algorithm gets, or None if the product cannot run."""
        plan = Pins(fields=self.common).plan("collective", dataflow)
        if self.faults(problem, plan, shape):
            return None
        found = self.price(problem, plan, shape)
        axes = (
            found.schedule.bytes_along(axis) / self._fastest(shape.size(axis))
            for axis in ("row", "col")
        )
        return max(found.cost.math_s, *axes)

    def _fastest(self, length: int) -> float:
        rate = self.hardware.axis_bytes_per_s
        return max(rate(length, overlapped=True), rate(length, overlapped=False))
