"""The registry of algorithms, and the check that every plan passes first."""

import dataclasses
import types

from meshslice_jax.algorithms.base import Algorithm, divisibility_faults
from meshslice_jax.algorithms.cannon import CANNON
from meshslice_jax.algorithms.collective import COLLECTIVE
from meshslice_jax.algorithms.fsdp import FSDP
from meshslice_jax.algorithms.meshslice import MESHSLICE
from meshslice_jax.algorithms.summa import SUMMA
from meshslice_jax.algorithms.tp1d import TP1D
from meshslice_jax.algorithms.wang import WANG
from meshslice_jax.mesh import MeshShape, checked_shape, divisors, factorisations
from meshslice_jax.plan import GemmPlan, LayerPlan, as_layer_plan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule

#: Name -> algorithm. A new algorithm is one file and one entry here.
ALGORITHMS = types.MappingProxyType(
    {a.name: a for a in (MESHSLICE, COLLECTIVE, SUMMA, CANNON, WANG, TP1D, FSDP)}
)


def algorithm_of(plan: GemmPlan) -> Algorithm:
    """The algorithm that a plan names.

    Raises:
      ValueError: there is none of that name.
    """
    try:
        return ALGORITHMS[plan.algorithm]
    except KeyError:
        raise ValueError(
            f"unknown algorithm {plan.algorithm!r}; there are {', '.join(ALGORITHMS)}"
        ) from None


def axis_names(plan: GemmPlan) -> dict[str, tuple[str, ...]]:
    """Mesh axis names of "row" and "col" as the plan's algorithm sees the mesh."""
    return algorithm_of(plan).axis_names(plan)


def find_faults(problem: GemmProblem, plan: GemmPlan, mesh_shape: MeshShape) -> list[str]:
    """All that keeps one product (forward or backward) from running as planned."""
    algorithm, shape = algorithm_of(plan), MeshShape(*mesh_shape)
    found = divisibility_faults(
        problem, plan, algorithm.view(plan, shape), algorithm.axis_names(plan)
    )
    return found + algorithm.faults(problem, plan, shape)


def schedule(problem: GemmProblem, plan: GemmPlan, mesh_shape: tuple[int, int]) -> Schedule:
    """What one chip sends, computes and holds for one product.

    Args:
      problem: global extents and dtypes of the product.
      plan: how it runs.
      mesh_shape: sizes of plan.row_axis and plan.col_axis.

    Raises:
      ValueError: the product cannot run as planned.
    """
    shape = checked_shape(mesh_shape)
    if found := find_faults(problem, plan, shape):
        raise ValueError(_message(problem, plan, shape, found))
    return algorithm_of(plan).schedule(problem, plan, shape)


def layer_problems(problem: GemmProblem, plan: GemmPlan) -> dict[str, GemmProblem]:
    """The problems of the passes "forward", "grad_lhs" and "grad_rhs" of a layer."""
    contraction = plan.contraction
    return {
        "forward": problem,
        "grad_lhs": contraction.gradient("lhs").problem(problem),
        "grad_rhs": contraction.gradient("rhs").problem(problem),
    }


def check(plan: GemmPlan | LayerPlan, m: int, n: int, k: int, mesh_shape: tuple[int, int]) -> None:
    """Returns if `out[m, n] = lhs[m, k] @ rhs[k, n]` and its gradients run as planned.

    Args:
      plan: the plan of the product, or of a layer.
      m: global extent of lhs and out.
      n: global extent of rhs and out.
      k: global extent of lhs and rhs.
      mesh_shape: (rows, cols), the sizes of plan.row_axis and plan.col_axis.

    Raises:
      ValueError: it does not; the message names every matrix, dimension, size and
        mesh axis at fault, and slice counts, mesh shapes and algorithms that fit.
    """
    check_problem(as_layer_plan(plan), GemmProblem(m=m, n=n, k=k), checked_shape(mesh_shape))


def check_problem(plan: LayerPlan, problem: GemmProblem, shape: MeshShape) -> None:
    """`check` for a problem; all three products of the layer."""
    forward = plan.forward
    algorithm = algorithm_of(forward)
    if forward.dataflow not in algorithm.forward_dataflows:
        legal = ", ".join(repr(d.value) for d in algorithm.forward_dataflows)
        raise ValueError(
            f"{algorithm.name} ({algorithm.summary}) has no forward product with dataflow "
            f"{forward.dataflow.value!r}; it has {legal}"
        )
    check_layout(forward)
    for name, part in layer_problems(problem, forward).items():
        part_plan = getattr(plan, name)
        if axis_names(part_plan) != axis_names(forward):
            raise ValueError(
                f"{name} runs {part_plan.algorithm!r}, which places matrices otherwise than "
                f"the forward product's {forward.algorithm!r}; 1D and 2D algorithms do not mix"
            )
        if found := find_faults(part, part_plan, shape):
            raise ValueError(_message(part, part_plan, shape, found, name))


def check_layout(plan: GemmPlan) -> None:
    """Returns if a forward plan's weight can be stored as its `rhs_layout` says.

    Raises:
      ValueError: the algorithm knows no layouts, or the weight does not move.
    """
    if plan.rhs_layout == "natural":
        return
    if "rhs_layout" not in algorithm_of(plan).options:
        raise ValueError(
            f"{plan.algorithm} knows no rhs_layout {plan.rhs_layout!r}: it is for "
            f"{', '.join(n for n, a in ALGORITHMS.items() if 'rhs_layout' in a.options)}; use "
            "'natural'"
        )
    if plan.contraction.stationary == "rhs":
        raise ValueError(
            f"rhs_layout {plan.rhs_layout!r} is for a rhs that moves; with dataflow "
            f"{plan.dataflow.value!r} it stays put: use 'natural'"
        )


def fits(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> bool:
    """Whether one product runs as planned."""
    return not find_faults(problem, plan, shape)


def legal_slice_counts(
    plan: GemmPlan, m: int, n: int, k: int, mesh_shape: tuple[int, int]
) -> tuple[int, ...]:
    """All slice counts with which `plan` runs on this product, ascending.

    Args: as for `check`; the plan's own slice_count is ignored.
    """
    problem, shape = GemmProblem(m=m, n=n, k=k), checked_shape(mesh_shape)
    return _legal_slice_counts(problem, plan, shape)


def _legal_slice_counts(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> tuple[int, ...]:
    # Slices cut a local streamed extent, a ring or the panels of a mesh.
    streamed = problem.extent(plan.contraction.streamed)
    candidates = {*divisors(streamed), *divisors(shape.num_chips)}
    return tuple(
        count
        for count in sorted(candidates)
        if fits(problem, dataclasses.replace(plan, slice_count=count), shape)
    )


def _message(problem, plan, shape, found, name="forward") -> str:
    sizes = f"m={problem.m}, n={problem.n}, k={problem.k}"
    lines = [
        f"{plan.algorithm} {plan.dataflow.value} ({name}: {sizes}) cannot run on a {shape} mesh "
        f"({plan.row_axis!r} x {plan.col_axis!r}):"
    ]
    lines += [f"  - {fault}" for fault in found]
    ways = []
    if counts := _legal_slice_counts(problem, plan, shape):
        ways.append(f"slice_count in {_some(counts)}")
    if shapes := [s for s in factorisations(shape.num_chips) if fits(problem, plan, s)]:
        ways.append(f"mesh shapes {_some(shapes)}")
    others = [
        other
        for other in ALGORITHMS
        if other != plan.algorithm
        and plan.dataflow in ALGORITHMS[other].forward_dataflows
        and fits(problem, dataclasses.replace(plan, algorithm=other, slice_count=1), shape)
    ]
    if others:
        ways.append(f"algorithms {_some(others)}")
    lines.append(
        "  what fits: " + "; ".join(ways)
        if ways
        else "  nothing of the same extents fits this many chips; pad them or change the mesh"
    )
    return "\n".join(lines)


def _some(values, limit: int = 12) -> str:
    values = list(values)
    shown = ", ".join(str(value) for value in values[:limit])
    return shown + (", ..." if len(values) > limit else "")
