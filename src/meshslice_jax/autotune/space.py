"""What may be tuned: the search, the pins and the overrides, as one `LayerSpace` per layer.

search="exact" leaves everything open. search="paper" follows the paper's tuner
(MeshSlice, ISCA 2025, section 3.3): phase 1 keeps the largest matrix of each layer where it
is, phase 2 tries every mesh shape and slice count, one slice count per layer. A pinned
algorithm and the overrides narrow either.
"""

import dataclasses
from collections.abc import Mapping

from meshslice_jax.algorithms import ALGORITHMS, check_name, check_plan, field_faults
from meshslice_jax.autotune.layer import LayerSpace
from meshslice_jax.autotune.product import TWO_D, Pins
from meshslice_jax.dataflow import Dataflow
from meshslice_jax.model_plan import PASSES
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.problem import GemmProblem

SEARCHES = ("exact", "paper")
_AXES = ("row_axis", "col_axis")


def largest_stationary(problem: GemmProblem) -> Dataflow:
    """The dataflow that keeps the largest matrix where it is.

    Equal sizes are decided as in the authors' code: lhs before out before rhs.
    """
    if problem.n > problem.k and problem.m >= problem.k:
        return Dataflow.OS
    if problem.k >= problem.n and problem.m >= problem.n:
        return Dataflow.LS
    return Dataflow.RS


def layer_spaces(
    problems: dict[str, GemmProblem],
    search: str,
    algorithm: str | None,
    overrides: Mapping[str, "LayerPlan | GemmPlan | Mapping[str, object]"] | None,
) -> dict[str, LayerSpace]:
    """What may be tuned in each layer.

    Args:
      problems: the products of a block, by layer.
      search: "exact" or "paper".
      algorithm: the one algorithm to use, or None.
      overrides: per layer a whole plan, or some fields of GemmPlan.

    Raises:
      ValueError: an unknown search, algorithm, layer or field.
    """
    if search not in SEARCHES:
        raise ValueError(f"tune: search={search!r} is not one of {', '.join(SEARCHES)}")
    if algorithm is not None:
        check_name(algorithm)
    overrides = dict(overrides or {})
    if unknown := sorted(set(overrides) - set(problems)):
        raise ValueError(
            f"tune: overrides for unknown layers {', '.join(unknown)}; there are "
            f"{', '.join(problems)}"
        )
    names = (algorithm,) if algorithm else _algorithms(search)
    spaces = {}
    for name, problem in problems.items():
        space = _paper(problem, names) if search == "paper" else _exact(problem, names)
        try:
            spaces[name] = _narrowed(space, overrides[name]) if name in overrides else space
        except (ValueError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"tune: the override of layer {name!r}: {error}") from None
    return spaces


def _algorithms(search: str) -> tuple[str, ...]:
    if search == "paper":
        return ("meshslice",)
    return TWO_D + tuple(name for name in ALGORITHMS if name not in TWO_D)


def _exact(problem: GemmProblem, names: tuple[str, ...]) -> LayerSpace:
    """Everything; equals are decided for the paper's dataflow."""
    first = largest_stationary(problem)
    rest = tuple(dataflow for dataflow in Dataflow if dataflow is not first)
    return LayerSpace(pins=(Pins(names),) * 3, dataflows=(first, *rest))


def _paper(problem: GemmProblem, names: tuple[str, ...]) -> LayerSpace:
    if flat := [name for name in names if name not in TWO_D]:
        raise ValueError(
            f"tune: the paper's search chooses 2D dataflows, and {flat[0]} is a 1D algorithm; "
            'use search="exact" with it'
        )
    dataflow = largest_stationary(problem)
    # Mesh shapes cover the twins of all layers together; a layer whose input and output
    # lie differently may need to be its own twin to match its neighbours.
    twins = (False, True) if dataflow is Dataflow.RS else (False,)
    pins = (Pins(names),) * 3
    return LayerSpace(pins=pins, dataflows=(dataflow,), twins=twins, one_slice_count=True)


def _narrowed(space: LayerSpace, given) -> LayerSpace:
    """A layer's space with an override applied."""
    if isinstance(given, GemmPlan):
        given = LayerPlan(forward=given)
    if isinstance(given, LayerPlan):
        _check_axes(given.forward)
        check_plan(given)
        return LayerSpace(
            pins=tuple(_pins(getattr(given, part)) for part in PASSES),
            dataflows=(given.forward.dataflow,),
            twins=(given.forward.row_axis == "col",),
        )
    if not isinstance(given, Mapping):
        raise TypeError(
            "it must be a LayerPlan, a GemmPlan or a mapping of GemmPlan fields, got "
            f"{type(given).__name__}"
        )
    return _narrowed_by_fields(space, dict(given))


def _narrowed_by_fields(space: LayerSpace, given: dict[str, object]) -> LayerSpace:
    known = [field.name for field in dataclasses.fields(GemmPlan)]
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"unknown fields {', '.join(unknown)}; GemmPlan has {', '.join(known)}")
    swapped = given.get("row_axis") == "col" or given.get("col_axis") == "row"
    axes = {"row_axis": "col", "col_axis": "row"} if swapped else {}
    checked = GemmPlan(**(axes | given))
    _check_axes(checked)
    names = (checked.algorithm,) if "algorithm" in given else space.pins[0].algorithms
    wrong = {one: field_faults(dataclasses.replace(checked, algorithm=one)) for one in names}
    names = tuple(one for one in names if not wrong[one])
    if not names:
        raise ValueError("; ".join(next(iter(wrong.values())).values()))
    rest = tuple(
        (field, getattr(checked, field))
        for field in given
        if field not in ("algorithm", "dataflow", *_AXES)
    )
    return dataclasses.replace(
        space,
        pins=(Pins(names, rest),) * 3,
        dataflows=(checked.dataflow,) if "dataflow" in given else space.dataflows,
        twins=(swapped,) if set(_AXES) & set(given) else space.twins,
    )


def _check_axes(plan: GemmPlan) -> None:
    if {plan.row_axis, plan.col_axis} != {"row", "col"} or plan.batch_axes:
        raise ValueError(
            f"it has the axes {plan.row_axis!r}, {plan.col_axis!r} and batch_axes "
            f"{plan.batch_axes}; the mesh of one replica has 'row' and 'col' and nothing else"
        )


def _pins(plan: GemmPlan) -> Pins:
    """Everything of a plan, fixed."""
    left_out = ("algorithm", "dataflow", *_AXES)
    names = [f.name for f in dataclasses.fields(plan) if f.name not in left_out]
    return Pins((plan.algorithm,), tuple((name, getattr(plan, name)) for name in names))
