"""The registry of algorithms, and the check that every plan passes first."""

import dataclasses
import difflib
import types
from collections.abc import Iterable

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
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(GemmPlan)}
#: What a plan says beside an algorithm's steps and forms.
_COMMON = ("dataflow", "row_axis", "col_axis", "batch_axes", "reduce_dtype", "split")
#: Algorithm -> the options of others, which it does not read, with their defaults.
_UNREAD = {
    name: {
        field: _DEFAULTS[field]
        for field in dict.fromkeys(field for a in ALGORITHMS.values() for field in a.options)
        if field not in algorithm.options
    }
    for name, algorithm in ALGORITHMS.items()
}


def check_name(name: str, known: Iterable[str] = tuple(ALGORITHMS)) -> None:
    """Returns if there is an algorithm of that name.

    Raises:
      ValueError: there is not; the message has those that are known, the closest first.
    """
    if name in known:
        return
    close = difflib.get_close_matches(str(name), known, 1)
    meant = f"did you mean {close[0]!r}? There" if close else "there"
    raise ValueError(f"unknown algorithm {name!r}; {meant} are {', '.join(known)}")


def algorithm_of(plan: GemmPlan) -> Algorithm:
    """The algorithm that a plan names.

    Raises:
      ValueError: there is none of that name.
    """
    check_name(plan.algorithm)
    return ALGORITHMS[plan.algorithm]


def with_algorithm(plan: GemmPlan, name: str) -> GemmPlan:
    """The plan for another algorithm, or the same: dataflow, axes, dtypes and split, no more."""
    check_name(name)
    kept = [field for field in _COMMON if field not in _UNREAD[name]]
    return GemmPlan(algorithm=name, **{field: getattr(plan, field) for field in kept})


def field_faults(plan: GemmPlan) -> dict[str, str]:
    """What is wrong with a plan whatever it multiplies: field -> the fault.

    An algorithm that is unknown, or options that it does not read.
    """
    try:
        check_name(plan.algorithm)
    except ValueError as error:
        return {"algorithm": str(error)}
    found = {}
    for field, default in _UNREAD[plan.algorithm].items():
        value = getattr(plan, field)
        if value != default:
            readers = [name for name, a in ALGORITHMS.items() if field in a.options]
            found[field] = (
                f"{plan.algorithm} does not read {field}={value!r}, only {', '.join(readers)} "
                f"can: leave it at {default!r}, or use another algorithm"
            )
    return found


def axis_names(plan: GemmPlan) -> dict[str, tuple[str, ...]]:
    """Mesh axis names of "row" and "col" as the plan's algorithm sees the mesh."""
    return algorithm_of(plan).axis_names(plan)


def view(plan: GemmPlan, mesh_shape: MeshShape) -> MeshShape:
    """The sizes of the plan's own row and col axis on a mesh with axes "row" and "col"."""
    return MeshShape(mesh_shape.size(plan.row_axis), mesh_shape.size(plan.col_axis))


def find_faults(problem: GemmProblem, plan: GemmPlan, mesh_shape: MeshShape) -> list[str]:
    """All that keeps one product (forward or backward) from running as planned."""
    algorithm, shape = algorithm_of(plan), MeshShape(*mesh_shape)
    found = divisibility_faults(
        problem, plan, algorithm.view(plan, shape), algorithm.axis_names(plan)
    )
    return [*field_faults(plan).values(), *found, *algorithm.faults(problem, plan, shape)]


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
    check_plan(plan)
    for name, part in layer_problems(problem, plan.forward).items():
        part_plan = getattr(plan, name)
        if found := find_faults(part, part_plan, shape):
            raise ValueError(_message(part, part_plan, shape, found, name))


def check_plan(plan: LayerPlan) -> None:
    """Returns if a layer's plan can run at all, on some extents and some mesh.

    Raises:
      ValueError: it cannot: an unknown algorithm, one without this forward product, options
        that it does not read, a layout of a weight that stays put, or backward products that
        place matrices otherwise.
    """
    forward = plan.forward
    algorithm = algorithm_of(forward)
    if forward.dataflow not in algorithm.forward_dataflows:
        legal = ", ".join(repr(d.value) for d in algorithm.forward_dataflows)
        raise ValueError(
            f"{algorithm.name} ({algorithm.summary}) has no forward product with dataflow "
            f"{forward.dataflow.value!r}; it has {legal}"
        )
    for name in ("forward", "grad_lhs", "grad_rhs"):
        part = getattr(plan, name)
        if wrong := field_faults(part):
            raise ValueError(f"{name}: " + "; ".join(wrong.values()))
        if axis_names(part) != axis_names(forward):
            raise ValueError(
                f"{name} runs {part.algorithm!r}, which places matrices otherwise than "
                f"the forward product's {forward.algorithm!r}; 1D and 2D algorithms do not mix, "
                "nor do the two splits"
            )
    if forward.rhs_layout != "natural" and forward.contraction.stationary == "rhs":
        raise ValueError(
            f"rhs_layout {forward.rhs_layout!r} is for a rhs that moves; with dataflow "
            f"{forward.dataflow.value!r} it stays put: use 'natural'"
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
    plan, ways = dataclasses.replace(plan, **_UNREAD[plan.algorithm]), []
    if counts := _legal_slice_counts(problem, plan, shape):
        ways.append(f"slice_count in {_some(counts)}")
    if shapes := [s for s in factorisations(shape.num_chips) if fits(problem, plan, s)]:
        ways.append(f"mesh shapes {_some(shapes)}")
    others = [
        other
        for other in ALGORITHMS
        if other != plan.algorithm
        and plan.dataflow in ALGORITHMS[other].forward_dataflows
        and fits(problem, with_algorithm(plan, other), shape)
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
