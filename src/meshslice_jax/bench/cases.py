"""What is measured: options, the passes of each layer, and the row of a result."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import msgspec

from meshslice_jax import algorithms
from meshslice_jax.dataflow import Contraction, Dataflow
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan, LayerPlan, as_layer_plan
from meshslice_jax.problem import GemmProblem, accumulation_dtype

#: Passes of a layer by the names of the command line, and what each differentiates.
PASSES = {"fwd": None, "dlhs": "lhs", "drhs": "rhs"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the results; m, n, k and dataflow are those of the pass's own product.

    `check` is "pass" or "FAILED", `status` "ok", "skipped" or "failed"; what does not
    apply is null. Bytes are what one chip sends along a mesh axis by the schedule (a 1D
    algorithm's are along its flattened ring), `peak_bytes` what it holds by the schedule.
    `projected_ms` is modelled: what the closed form gives on `projected_hardware`.
    """

    layer: str
    pass_: str = msgspec.field(name="pass")
    m: int
    n: int
    k: int
    dtype: str
    mesh: str
    algorithm: str
    dataflow: str | None = None
    slice_count: int | None = None
    block_size: int | None = None
    bytes_row: int | None = None
    bytes_col: int | None = None
    peak_bytes: int | None = None
    compile_s: float | None = None
    median_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    repeats: int | None = None
    ratio_to_gspmd: float | None = None
    ratio_to_dense: float | None = None
    check: str | None = None
    status: str = "ok"
    reason: str | None = None
    projected_ms: float | None = None
    projected_hardware: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured.

    Attributes:
      layers: name -> forward product; all of one dtype.
      mesh_shape: rows x cols.
      names: algorithms.
      dataflows: forward dataflows; None takes one for each layer (`sensible_dataflow`).
      slices: slice counts; None takes one for each pass (`sensible_slices`).
      block_size: of MeshSlice's slices; None is the largest legal.
      passes: of "fwd", "dlhs", "drhs".
      repeats: rounds of timing.
      plans: a plan for each layer, which is run as it is; names, dataflows, slices and
        block_size then mean nothing.
      hardware: the profile on which times are projected, or None.
      dense_reason: why the dense product is skipped, or None.
    """

    layers: dict[str, GemmProblem]
    mesh_shape: MeshShape
    names: tuple[str, ...] = tuple(algorithms.ALGORITHMS)
    dataflows: tuple[Dataflow, ...] | None = None
    slices: tuple[int, ...] | None = None
    block_size: int | None = None
    passes: tuple[str, ...] = tuple(PASSES)
    repeats: int = 7
    plans: Mapping[str, LayerPlan] | None = None
    hardware: HardwareSpec | None = None
    dense_reason: str | None = None

    def __post_init__(self):
        for name in self.names:
            algorithms.check_name(name)
        if unknown := [name for name in self.passes if name not in PASSES]:
            raise ValueError(f"unknown pass {', '.join(unknown)}; there are {', '.join(PASSES)}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        for name, problem in self.layers.items():
            integer = jnp.issubdtype(problem.lhs_dtype, jnp.integer)
            if integer and self.passes != ("fwd",):
                raise ValueError(f"{problem.lhs_dtype} has no gradients: passes must be fwd alone")
            if min(problem.m, problem.n, problem.k) < 1:
                raise ValueError(f"layer {name}: m, n and k must be at least 1, got {problem}")


def product(m: int, n: int, k: int, dtype: str) -> GemmProblem:
    """A product whose operands have `dtype`; int8 is summed into an int32 output."""
    whole = jnp.issubdtype(dtype, jnp.integer)
    out_dtype = accumulation_dtype(dtype) if whole else dtype
    return GemmProblem(m=m, n=n, k=k, lhs_dtype=dtype, rhs_dtype=dtype, out_dtype=out_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a layer as a product of its own.

    Attributes:
      layer: name of the layer.
      name: "fwd", "dlhs" or "drhs".
      forward: the layer's forward product.
    """

    layer: str
    name: str
    forward: GemmProblem

    @property
    def wrt(self) -> str | None:
        """What is differentiated: "lhs", "rhs", or None in the forward pass."""
        return PASSES[self.name]

    @property
    def result(self) -> str:
        """The forward product's matrix that has the shape of this pass's result."""
        return self.wrt or "out"

    def contraction(self, plan: GemmPlan) -> Contraction:
        """The pass's product under a forward plan."""
        forward = plan.contraction
        return forward.gradient(self.wrt).contraction if self.wrt else forward

    def operands(self, plan: GemmPlan) -> tuple[str, str]:
        """The forward product's matrices that are this product's lhs and rhs."""
        if self.wrt is None:
            return "lhs", "rhs"
        found = plan.contraction.gradient(self.wrt).operands
        first, second = ("out" if name == "ct" else name for name in found)
        return first, second

    def problem(self, plan: GemmPlan) -> GemmProblem:
        """Extents and dtypes of the pass's product."""
        if self.wrt is None:
            return self.forward
        return plan.contraction.gradient(self.wrt).problem(self.forward)

    def plan(self, plan: GemmPlan | LayerPlan) -> GemmPlan:
        """The plan of the pass, given the layer's or its forward plan."""
        layer = as_layer_plan(plan)
        return layer.gradient(self.wrt) if self.wrt else layer.forward


def cases(options: Options) -> Iterator[Pass]:
    """The passes of all layers, in order."""
    for layer, forward in options.layers.items():
        for name in options.passes:
            yield Pass(layer=layer, name=name, forward=forward)
