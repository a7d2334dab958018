"""Plans: what is to run, as plain frozen values.

A `GemmPlan` says how one product runs: algorithm, dataflow, slice count and the
names of the two mesh axes, but no sizes and no devices, so one plan serves every
layer and mesh that it fits, compares equal and hashes equal (nothing retraces),
pickles, and goes to JSON and back. A `LayerPlan` adds the two backward products
of a training step. Everything that interprets a plan (placements, checks,
kernels, schedules) reads the dataflow table; plans only choose.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping

from meshslice_jax.dataflow import Contraction, Dataflow

_CHOICES = {
    "reduce_dtype": ("float32", "output"),
    "reduce_scatter": ("native", "ring", "all_to_all"),
    "gather_order": ("free", "ordered", "tied", "serial"),
    "rhs_layout": ("natural", "permuted", "sliced"),
    "taper": ("none", "head", "ends", "graded"),
    "loop": ("auto", "unrolled", "rolled"),
    "ring": ("row", "col"),
    "ring_form": ("joined", "halves", "whole", "one_way"),
    "split": ("column", "row"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmPlan:
    """How one product `out[m, n] = lhs[m, k] @ rhs[k, n]` runs on a 2D mesh.

    Fields with the names of algorithms in brackets are options of those; where another
    algorithm is to run, `check` refuses any value but the default. A plan is a choice, not
    a promise: values that no algorithm of that name can run make one too (slice_count=4 with
    "collective"); `check` says so, and whatever runs the plan raises.

    Attributes:
      algorithm: a name in `ALGORITHMS`.
      dataflow: which matrix stays put: "os" (out), "ls" (lhs) or "rs" (rhs).
      slice_count: steps into which the product is cut. 1 is legal everywhere
        and means the algorithm's natural number of steps.
      block_size: consecutive indices of the streamed dimension that a slice
        takes at a time (MeshSlice); None is the largest legal size.
      taper: what nothing hides, the first gather and the last scatter, is made smaller: "head"
        makes the first slice half as large as the others, "ends" the last one too; "graded"
        makes the first two and the last 1/3, 2/3 and 1/3 as large (MeshSlice; unrolled). A
        slice count too small to hold a full-size slice leaves only those ends.
      rhs_layout: how the layer's weight is stored: "natural", or with slices in one piece,
        "permuted" or "sliced"; see `layout` (MeshSlice; for all three products of a layer).
      row_axis: mesh axis along which mesh-row coordinates vary.
      col_axis: mesh axis along which mesh-column coordinates vary. Exchanging
        the two names gives the twin dataflow.
      batch_axes: further mesh axes over which m is sharded too, major to the plan's axis
        (data parallelism). Each of their replicas runs the product on its part of m, and
        a gradient that sums over m is summed over them.
      reduce_dtype: what a reduce-scatter carries between chips: "float32" (the
        accumulation dtype; rounded once) or "output" (the output's dtype, half
        the bytes for bfloat16, rounded per hop).
      reduce_scatter: form of the reduce-scatter (MeshSlice): "native" is the collective,
        "ring" fuses chains of sends into the products, "all_to_all" exchanges
        and sums; see `algorithms.scatter`.
      scatter_group: with reduce_scatter="ring" (MeshSlice), or ring_form "whole" or "one_way"
        (Wang, 1D), chips of the scattered axis that all-to-all among themselves while the ring
        runs over the groups; 1 is a ring of all chips.
      gather_order: "ordered" lets the gather of a slice start only when that of the slice
        before has arrived; "free" leaves it to the compiler (MeshSlice). "tied" puts all
        collectives in one line of data dependences, for compilers that drop what orders
        otherwise (XLA:CPU does), and "serial" makes gathers wait for products too: nothing
        runs beside anything, a control for measurements; see `algorithms.in_line`.
      loop: how slices are run: "unrolled", "rolled" (one loop body), or "auto":
        unrolled for TPUs, rolled elsewhere (MeshSlice).
      ring: the axis whose collective becomes a ring of neighbour sends (Wang).
      ring_form: what goes round that ring (Wang, 1D): "joined" sends one half of each shard
        either way and multiplies both that arrive in one product, "halves" in two, "whole"
        sends whole shards half way round on either side, "one_way" all the way round.
      split: "column" gathers lhs over m, "row" reduce-scatters out over m (1D
        tensor parallelism).
      packets: pieces into which a panel is cut so that its broadcast is
        pipelined along the ring (SUMMA).
    """

    algorithm: str = "meshslice"
    dataflow: Dataflow = Dataflow.OS
    slice_count: int = 1
    block_size: int | None = None
    taper: str = "none"
    rhs_layout: str = "natural"
    row_axis: str = "row"
    col_axis: str = "col"
    batch_axes: tuple[str, ...] = ()
    reduce_dtype: str = "float32"
    reduce_scatter: str = "native"
    scatter_group: int = 1
    gather_order: str = "free"
    loop: str = "auto"
    ring: str = "col"
    ring_form: str = "joined"
    split: str = "column"
    packets: int = 1

    def __post_init__(self):
        object.__setattr__(self, "dataflow", _dataflow(self.dataflow))
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(
                    f"GemmPlan: {field}={getattr(self, field)!r} is not one of {', '.join(choices)}"
                )
        for field in ("algorithm", "row_axis", "col_axis"):
            if not isinstance(getattr(self, field), str):
                raise TypeError(f"GemmPlan: {field} must be a string, got {getattr(self, field)!r}")
        if self.row_axis == self.col_axis:
            raise ValueError(f"GemmPlan: row_axis and col_axis are both {self.row_axis!r}")
        object.__setattr__(self, "batch_axes", _axes("batch_axes", self.batch_axes))
        if twice := {self.row_axis, self.col_axis} & set(self.batch_axes):
            raise ValueError(f"GemmPlan: batch_axes holds {twice.pop()!r}, an axis of the product")
        _positive("slice_count", self.slice_count)
        _positive("packets", self.packets)
        _positive("scatter_group", self.scatter_group)
        if self.block_size is not None:
            _positive("block_size", self.block_size)

    @property
    def contraction(self) -> Contraction:
        """The product under this plan's dataflow, in natural form."""
        return _natural(self.dataflow)

    def gradient(self, wrt: str) -> "GemmPlan":
        """The plan of the backward product for `wrt`: only the dataflow changes."""
        dataflow = self.contraction.gradient(wrt).contraction.dataflow
        return dataclasses.replace(self, dataflow=dataflow)


@functools.cache
def _natural(dataflow: Dataflow) -> Contraction:
    """One contraction a dataflow: the tuner asks for it a hundred thousand times."""
    return Contraction(dataflow=dataflow)


def _dataflow(value) -> Dataflow:
    try:
        return Dataflow(value)
    except ValueError:
        names = ", ".join(d.value for d in Dataflow)
        raise ValueError(f"GemmPlan: dataflow={value!r} is not one of {names}") from None


def _axes(field: str, value) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(axis, str) for axis in value):
        raise TypeError(f"GemmPlan: {field} must be a tuple of axis names, got {value!r}")
    if len(set(value)) < len(value):
        raise ValueError(f"GemmPlan: {field} names an axis twice: {tuple(value)}")
    return tuple(value)


def _positive(field: str, value) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"GemmPlan: {field} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"GemmPlan: {field} must be at least 1, got {value}")


#: What the three products of a layer must agree on, ...
_SHARED = ("dataflow", "row_axis", "col_axis", "batch_axes", "rhs_layout")
#: ... and what else they must, where the weight is stored in slices.
_STORED = ("algorithm", "slice_count", "block_size", "taper")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The three products of a layer's training step.

    Attributes:
      forward: `out = lhs @ rhs`.
      grad_lhs: the gradient with respect to lhs; None derives it from `forward`.
      grad_rhs: the gradient with respect to rhs; None derives it from `forward`.

    The dataflows of the gradients are those of the table, and all three share
    their axes: that is what lets a step run without moving an operand.

    Raises:
      ValueError: a backward plan whose dataflow or axes are not the table's.
    """

    forward: GemmPlan
    grad_lhs: GemmPlan | None = None
    grad_rhs: GemmPlan | None = None

    def __post_init__(self):
        if not isinstance(self.forward, GemmPlan):
            raise TypeError(f"LayerPlan: forward must be a GemmPlan, got {self.forward!r}")
        for wrt in ("lhs", "rhs"):
            derived = self.forward.gradient(wrt)
            given = getattr(self, f"grad_{wrt}")
            if given is None:
                object.__setattr__(self, f"grad_{wrt}", derived)
                continue
            for field in _SHARED if self.forward.rhs_layout == "natural" else _SHARED + _STORED:
                if getattr(given, field) != getattr(derived, field):
                    raise ValueError(
                        f"LayerPlan: grad_{wrt}.{field} is {getattr(given, field)!s}, but the "
                        f"gradient of a forward product with dataflow "
                        f"{self.forward.dataflow.value!r} and rhs_layout "
                        f"{self.forward.rhs_layout!r} needs {getattr(derived, field)!s}"
                    )

    def gradient(self, wrt: str) -> GemmPlan:
        """The plan of the backward product for `wrt`."""
        return self.grad_lhs if wrt == "lhs" else self.grad_rhs


def as_layer_plan(plan: GemmPlan | LayerPlan) -> LayerPlan:
    """A LayerPlan as it is, a GemmPlan with its derived backward plans.

    Raises:
      TypeError: anything else; for a path or the plan of a whole model, with the way out.
    """
    if isinstance(plan, LayerPlan):
        return plan
    if isinstance(plan, GemmPlan):
        return LayerPlan(forward=plan)
    way_out = ""
    if isinstance(plan, str | os.PathLike):
        way_out = "; ms.load_plan reads the plan of a model from its file"
    elif isinstance(layers := getattr(plan, "layers", None), Mapping):
        way_out = f"; take that of one layer, plan.layers[...] of {', '.join(map(repr, layers))}"
    kind = type(plan).__name__
    raise TypeError(f"plan must be a GemmPlan or a LayerPlan, got {kind}{way_out}")
