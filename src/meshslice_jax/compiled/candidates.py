"""What is tried for one product: algorithms x their forms x slice counts x options.

Every algorithm gets all that it has, and the same compiler: a peer's collectives may be
asynchronous too. "gspmd" is XLA's partitioner, with its windowed einsums on, off, and
with the collective-matmul modes.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from meshslice_jax import algorithms
from meshslice_jax.compiled.jobs import Options
from meshslice_jax.compiled.options import GSPMD_MODES, compiler_options
from meshslice_jax.dataflow import Contraction, Dataflow
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem

#: Slice counts that are tried where none are asked for; a taper adds a half slice at either end.
SLICE_COUNTS = (4, 6, 8)
#: How MeshSlice's weights may be stored; see `layout`.
LAYOUTS = ("natural", "sliced")
#: The longest axis along which an all-to-all is tried: it loads links with n^2/8 shards.
LONGEST_ALL_TO_ALL = 8
#: The algorithms of a comparison on two axes, MeshSlice first.
COMPARED = ("meshslice", "wang", "gspmd", "collective")
#: Options: "default" is the compiler's own, "tuned" is `compiler_options`.
OPTION_SETS = ("tuned", "default")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compile a product.

    Attributes:
      algorithm: name of the algorithm, or "gspmd".
      plan: the pass's plan; under GSPMD its placements.
      form: what else distinguishes it: which ring, which GSPMD mode, which reduce-scatter.
      option_set: "tuned", "default" or "given".
      options: compiler options.
    """

    algorithm: str
    plan: GemmPlan
    form: str
    option_set: str
    options: Options

    @property
    def setting(self) -> tuple:
        """What a run without tuning for each product would hold fixed."""
        return (self.algorithm, self.plan.slice_count, self.form, self.option_set)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """What may be tried.

    Attributes:
      mesh_shape: (rows, cols) of the mesh.
      hardware: the profile; it decides the tuned options.
      algorithms: names in ALGORITHMS, and "gspmd".
      slice_counts: of MeshSlice.
      layouts: how MeshSlice's weights may be stored.
      option_sets: of OPTION_SETS; ignored where `given` is set.
      given: options to use instead of sets.

    Raises:
      ValueError: an unknown algorithm or option set, or nothing to try.
    """

    mesh_shape: MeshShape
    hardware: HardwareSpec
    algorithms: Sequence[str] = COMPARED
    slice_counts: Sequence[int] = SLICE_COUNTS
    layouts: Sequence[str] = LAYOUTS
    option_sets: Sequence[str] = OPTION_SETS
    given: Mapping[str, bool | int | float | str] | None = None

    def __post_init__(self):
        for name in self.algorithms:
            algorithms.check_name(name, (*algorithms.ALGORITHMS, "gspmd"))
        if unknown := [name for name in self.option_sets if name not in OPTION_SETS]:
            raise ValueError(
                f"unknown option set {', '.join(map(repr, unknown))}; there are "
                f"{', '.join(OPTION_SETS)}, or give KEY=VALUE"
            )
        if not (self.algorithms and self.option_sets and self.slice_counts):
            raise ValueError("nothing to try: algorithms, options and slice counts are needed")

    def view(self, plan: GemmPlan) -> MeshShape:
        """The mesh as a plan sees it; its axes are the mesh's "row" and "col" or exchanged."""
        return algorithms.view(plan, self.mesh_shape)

    def options(self, plan: GemmPlan, extra: Mapping = GSPMD_MODES["windowed"]):
        """(name, options) of every option set for a plan; equal ones once."""
        if self.given is not None:
            yield "given", dict(self.given) | dict(extra)
            return
        seen = []
        for name in self.option_sets:
            found = compiler_options(self.hardware, plan) if name == "tuned" else {}
            found = found | dict(extra)
            if found not in seen:
                seen.append(found)
                yield name, found


def candidates(
    space: Space, problem: GemmProblem, base: GemmPlan, forward: Dataflow
) -> list[Candidate]:
    """Everything that fits a product.

    Args:
      space: what may be tried.
      problem: the pass's own product.
      base: a plan with its dataflow, axes and dtypes; the rest is what is tried.
      forward: dataflow of the layer's forward product, which some algorithms lack.
    """
    found = []
    for name in space.algorithms:
        if name == "gspmd":
            plan = algorithms.with_algorithm(base, "collective")
            if algorithms.fits(problem, plan, space.view(plan)):
                for mode, extra in GSPMD_MODES.items():
                    found += _with_options(space, "gspmd", plan, mode, extra)
            continue
        if forward not in algorithms.ALGORITHMS[name].forward_dataflows:
            continue
        moves = Contraction(dataflow=forward).stationary != "rhs"
        for plan in _plans(space, name, base, moves):
            if algorithms.fits(problem, plan, space.view(plan)):
                found += _with_options(space, name, plan, form_of(plan))
    return found


def of_plan(space: Space, plan: GemmPlan) -> list[Candidate]:
    """A plan as it is, under every option set."""
    return _with_options(space, plan.algorithm, plan, form_of(plan))


def form_of(plan: GemmPlan) -> str:
    """What distinguishes plans of one algorithm and slice count."""
    read = algorithms.algorithm_of(plan).options
    if "ring_form" in read:
        words = [plan.ring_form] + ([f"ring along {plan.ring}"] if "ring" in read else [])
    else:
        words = [] if plan.dataflow is Dataflow.OS else [plan.reduce_scatter]
        words += [f"tapered {plan.taper}"] if plan.taper != "none" else []
    words += [f"weight {plan.rhs_layout}"] if plan.rhs_layout != "natural" else []
    words += [f"in groups of {plan.scatter_group}"] if plan.scatter_group > 1 else []
    return ", ".join(words) or "native"


def _with_options(space, name, plan, form, extra=GSPMD_MODES["windowed"]) -> list[Candidate]:
    return [
        Candidate(algorithm=name, plan=plan, form=form, option_set=label, options=options)
        for label, options in space.options(plan, extra)
    ]


def _plans(space: Space, name: str, base: GemmPlan, moves: bool) -> Iterator[GemmPlan]:
    """The plans of one algorithm, whether they fit or not; `moves` says if the weight does."""
    plan = algorithms.with_algorithm(base, name)
    options = algorithms.ALGORITHMS[name].options
    if "ring_form" in options:
        own = base.slice_count if base.algorithm == name else 1
        yield from _rings(space, plan, own)
    elif "block_size" in options:
        layouts = space.layouts if moves else ("natural",)
        for form, count, layout in itertools.product(
            _sliced_forms(space, plan), space.slice_counts, layouts
        ):
            more = 1 if "taper" in form else 0  # its first and last slices are smaller
            yield dataclasses.replace(plan, slice_count=count + more, rhs_layout=layout, **form)
    else:
        yield plan


def _rings(space: Space, plan: GemmPlan, own: int) -> Iterator[GemmPlan]:
    """Forms of a ring: which collective is ringed, what goes round, merged steps, two levels.

    `own` is the slice count that somebody chose for the algorithm, 1 if nobody did.
    """
    algorithm = algorithms.algorithm_of(plan)
    view, flat = algorithm.view(plan, space.view(plan)), algorithm.flatten(plan)
    for ring in ("row", "col") if flat is None else (flat,):
        length = view.size(ring)
        along = dataclasses.replace(plan, ring=ring) if flat is None else plan
        yield along
        merged = {length // steps for steps in (2, 4) if length > steps} | {own}
        for count in sorted(merged - {1}, reverse=True):
            yield dataclasses.replace(along, slice_count=count)
        for form in ("halves", "whole", "one_way"):
            yield dataclasses.replace(along, ring_form=form)
        if _scattered(plan) == ring and length > LONGEST_ALL_TO_ALL:
            yield dataclasses.replace(along, ring_form="whole", scatter_group=_group(length))


def _sliced_forms(space: Space, plan: GemmPlan) -> list[dict[str, object]]:
    """MeshSlice's forms: how a moving output is reduced, and tapers.

    Along a long axis a ring of all chips has too many small products (32 chips: 8.3 ms for ff1
    grad_rhs of GPT-3, over groups 5.5), and takes a minute to compile.
    A graded taper does nothing for an output that stays: nothing follows its last product, and
    the first gather has copies to hide behind.
    """
    scattered = _scattered(plan)
    if scattered is None:
        return [{}, {"taper": "ends"}]
    ring = {"reduce_scatter": "ring", "gather_order": "ordered"}
    length = space.view(plan).size(scattered)
    hidden = [ring, {"reduce_scatter": "all_to_all"}]
    if length > LONGEST_ALL_TO_ALL:
        hidden = [ring | {"scatter_group": _group(length)}]
    tapers = itertools.product(hidden, ("ends", "graded"))
    return [{}, *hidden, *(form | {"taper": taper} for form, taper in tapers)]


def _scattered(plan: GemmPlan) -> str | None:
    """The axis along which the output is reduce-scattered, if it is."""
    return next((m.axis for m in plan.contraction.movers if not m.is_input), None)


def _group(length: int) -> int:
    """Chips of the second level of a long axis: what leaves a ring of four."""
    return length // 4
