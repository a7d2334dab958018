"""One table of cases, generated from the registry, over which the suites range.

algorithm x dataflow x mesh x slice count x block size (x ring, split, packets and loop
where an algorithm reads them); only what `check` accepts is in the table.
"""

import dataclasses
import functools
import itertools
import math
import random

import meshslice_jax as ms
from meshslice_jax.algorithms import ALGORITHMS
from meshslice_jax.algorithms.meshslice import units
from meshslice_jax.dataflow import TABLE, Contraction

MESHES = (
    (1, 1), (1, 4), (4, 1), (2, 2), (2, 4), (4, 2), (2, 3), (3, 2), (1, 5), (4, 4), (1, 16),
    (16, 1),
)  # fmt: skip
DAILY_MESHES = ((2, 2), (2, 3), (1, 4))
SLICE_COUNTS = (1, 2, 3, 4, 8)
BLOCK_SIZES = (1, 8, None)

#: Values of the plan fields that only some algorithms read: all of them, ...
OPTIONS = {
    "block_size": BLOCK_SIZES,
    "ring": ("row", "col"),
    "split": ("column", "row"),
}
#: ... or one after the other, from case to case.
IN_TURN = {
    "loop": ("rolled", "unrolled"),
    "packets": (2, 1),
}
#: Where the forms below are tried.
FORM_MESHES = ((2, 2), (2, 3), (3, 2), (1, 4), (4, 2), (4, 4))
#: What goes round a ring, beside the joined halves.
RING_FORMS = (
    {"ring_form": "halves"},
    {"ring_form": "whole"},
    {"ring_form": "one_way"},
    {"ring_form": "whole", "scatter_group": 2},
)
#: Forms of a moving output's reduce-scatter, beside the native one.
SCATTER_FORMS = (
    {"reduce_scatter": "ring", "gather_order": "ordered"},
    {"reduce_scatter": "ring", "scatter_group": 2},
    {"reduce_scatter": "all_to_all", "taper": "ends"},
    {"taper": "head"},
    {"reduce_scatter": "all_to_all", "taper": "graded"},
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan, a mesh shape, and extents that the plan cuts evenly."""

    plan: ms.GemmPlan
    mesh: tuple[int, int]
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        plan = self.plan
        options = "-".join(
            f"{field}={getattr(plan, field)}"
            for field in ALGORITHMS[plan.algorithm].options
            if field in (*OPTIONS, *IN_TURN)
            or getattr(plan, field) != getattr(ms.GemmPlan(), field)
        )
        rows, cols = self.mesh
        return (
            f"{plan.algorithm}-{plan.dataflow.value}-{rows}x{cols}-S{plan.slice_count}-{options}"
            f"-{self.m}.{self.n}.{self.k}"
        )


def extents(plan: ms.GemmPlan, mesh: tuple[int, int]) -> dict[str, int]:
    """Small extents that fit: odd multiples, so that nothing divides by accident."""
    view = ALGORITHMS[plan.algorithm].view(plan, ms.MeshShape(*mesh))
    row = TABLE[plan.dataflow]
    local = 3
    if plan.algorithm == "meshslice":
        local = sum(units(plan)[1]) * (plan.block_size or 3) * (2 if plan.block_size == 1 else 1)
    if plan.ring_form == "halves":
        local = 4
    home = 4 if plan.packets > 1 else 1  # packets cut both halves of a home extent
    streamed = Contraction(dataflow=plan.dataflow).streamed
    return {
        row.row: 3 * home * view.rows,
        row.col: 5 * home * view.cols,
        streamed: local * math.lcm(view.rows, view.cols),
    }


def plans(algorithm: str, mesh: tuple[int, int]):
    """All plans of one algorithm in the table."""
    read = ALGORITHMS[algorithm].options
    fields = [field for field in read if field in OPTIONS]
    turns = {field: itertools.cycle(IN_TURN[field]) for field in read if field in IN_TURN}
    for dataflow, slices in itertools.product(ms.Dataflow, SLICE_COUNTS):
        for values in itertools.product(*(OPTIONS[field] for field in fields)):
            options = dict(zip(fields, values, strict=True))
            options |= {field: next(turn) for field, turn in turns.items()}
            yield ms.GemmPlan(algorithm=algorithm, dataflow=dataflow, slice_count=slices, **options)
    if mesh in FORM_MESHES:
        yield from forms(algorithm, fields)


def forms(algorithm: str, fields: list[str]):
    """Plans with other forms of rings and reduce-scatters."""
    if "ring_form" in ALGORITHMS[algorithm].options:
        dataflows = ALGORITHMS[algorithm].forward_dataflows[:2]
        rings = [{"ring": "row"}, {"ring": "col"}] if "ring" in fields else [{}]
        for dataflow, form, ring in itertools.product(dataflows, RING_FORMS, rings):
            yield ms.GemmPlan(algorithm=algorithm, dataflow=dataflow, **ring, **form)
    if "reduce_scatter" in ALGORITHMS[algorithm].options:
        for slices, form in itertools.product((1, 3, 4), SCATTER_FORMS):
            rolled = slices == 3 and "taper" not in form
            yield ms.GemmPlan(  # its gradients are ls and rs products
                algorithm=algorithm,
                dataflow="os",
                slice_count=slices,
                loop="rolled" if rolled else "unrolled",
                **form,
            )


@functools.cache
def table(meshes: tuple[tuple[int, int], ...] = MESHES) -> tuple[Case, ...]:
    """All cases that `check` accepts on these meshes."""
    found = []
    for algorithm, mesh in itertools.product(ALGORITHMS, meshes):
        for plan in plans(algorithm, mesh):
            case = Case(plan, mesh, **extents(plan, mesh))
            try:
                ms.check(plan, case.m, case.n, case.k, mesh)
            except ValueError:
                continue
            found.append(case)
    return tuple(found)


def is_form(plan: ms.GemmPlan) -> bool:
    """Whether it is one of `forms`."""
    plain = ms.GemmPlan()
    fields = ("ring_form", "reduce_scatter", "taper")
    return any(getattr(plan, field) != getattr(plain, field) for field in fields)


def daily(fraction: float = 0.02) -> tuple[Case, ...]:
    """All cases of the daily meshes, and a seeded sample of the others."""
    choose = random.Random(2025)
    found = []
    for case in table():
        whole = case.mesh in DAILY_MESHES[1:2] or not is_form(case.plan)
        kept = (case.mesh in DAILY_MESHES and whole) or choose.random() < fraction
        # Long rings unroll into large programs; the full table has them.
        if kept and not (max(case.mesh) == 16 and case.plan.algorithm == "summa"):
            found.append(case)
    return tuple(found)
