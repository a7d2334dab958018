"""What an algorithm is, and what all of them share.

An algorithm is one frozen value: a kernel (what a chip does with its shards), the
faults that it finds in a plan, and its schedule (what the chip sends, computes
and holds). All three read the same table (`dataflow`), so that none of them
branches on a dataflow: they ask which matrices move, along which axis, over
which dimension.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
from jax import lax

from meshslice_jax import collectives
from meshslice_jax.collectives import Axis
from meshslice_jax.dataflow import Contraction, Dataflow, Mover
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import ROLES, GemmProblem, itemsize
from meshslice_jax.schedule import Product, Schedule, Transfer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """All that a kernel knows besides its two shards; everything is static.

    Attributes:
      contraction: dataflow and storage order of the three matrices.
      plan: the plan, checked.
      row: the mesh direction "row" as the algorithm sees it.
      col: the mesh direction "col" as the algorithm sees it.
      accum_dtype: dtype of local products and sums.
      wire_dtype: dtype in which partial sums travel between chips.
      out_dtype: dtype of the result.
      precision: `lax.dot_general`'s precision for local products.
      widened: whether 16-bit operands are widened for the local product.
      rolled: whether slices run in a loop rather than unrolled.
      exchanged: whether a native reduce-scatter runs as an all-to-all and a sum; see
        `collectives.exchanges`.
      kept: the role that comes and goes in the plan's `rhs_layout`, as a tuple of arrays.
      turned_after: whether the result will be turned; a kernel may turn it back before, so that
        both turns cancel.
    """

    contraction: Contraction
    plan: GemmPlan
    row: Axis
    col: Axis
    accum_dtype: str
    wire_dtype: str
    out_dtype: str
    precision: object = None
    widened: bool = False
    rolled: bool = False
    exchanged: bool = False
    kept: str | None = None
    turned_after: bool = False

    def axis(self, name: str) -> Axis:
        """The mesh direction "row" or "col"."""
        return self.row if name == "row" else self.col

    def inputs(self) -> tuple[Mover, ...]:
        """The operands that move."""
        return tuple(mover for mover in self.contraction.movers if mover.is_input)

    def output(self) -> Mover | None:
        """The output's mover, or None where the output stays put."""
        return next((mover for mover in self.contraction.movers if not mover.is_input), None)

    def dot(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """The local product, in the accumulation dtype and `out`'s storage order."""
        first, second, numbers = self.contraction.dimension_numbers()
        operands, precision = {"lhs": lhs, "rhs": rhs}, self.precision
        if self.widened:
            operands = {role: _widened(x, self.accum_dtype) for role, x in operands.items()}
        if first == "rhs" and isinstance(precision, tuple):
            precision = precision[::-1]
        with jax.named_scope("product"):
            return lax.dot_general(
                operands[first],
                operands[second],
                numbers,
                precision=precision,
                preferred_element_type=self.accum_dtype,
            )

    def gather(self, x: jax.Array, mover: Mover) -> jax.Array:
        """Gathers an operand (or a slice of it) along its axis."""
        with jax.named_scope("gather"):
            return collectives.gather(x, self.axis(mover.axis), mover.dim)

    def scatter(self, partial: jax.Array, mover: Mover) -> jax.Array:
        """Reduce-scatters a partial output along its axis; result in `out_dtype`."""
        axis = self.axis(mover.axis)
        if self.exchanged:
            return self.exchange(partial, mover, axis.size)
        with jax.named_scope("scatter"):
            wire = partial.astype(self.wire_dtype)
            return collectives.reduce_scatter(wire, axis, mover.dim).astype(self.out_dtype)

    def exchange(self, partial: jax.Array, mover: Mover, group: int) -> jax.Array:
        """The same among every `group` neighbours, by an all-to-all and a sum."""
        with jax.named_scope("scatter"):
            wire, axis = partial.astype(self.wire_dtype), self.axis(mover.axis)
            summed = collectives.exchange_sum(wire, axis, mover.dim, group, self.accum_dtype)
            return summed.astype(self.out_dtype)


def _widened(x: jax.Array, dtype: str) -> jax.Array:
    """A 16-bit float operand in the accumulation dtype, which holds it exactly."""
    return x.astype(dtype) if x.dtype.name in ("bfloat16", "float16") else x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One way to move the two moving matrices.

    Attributes:
      name: its name in plans and in `ALGORITHMS`.
      summary: one line for tables and messages.
      kernel: (lhs shard, rhs shard, job) -> out shard, inside a shard_map.
      faults: (problem, plan, mesh shape) -> what is wrong beyond divisibility.
      schedule: (problem, plan, mesh shape) -> Schedule of one chip.
      flatten: plan -> the axis ("row" or "col") into which a 1D algorithm
        flattens the whole mesh, or None.
      forward_dataflows: dataflows that make sense as a forward product.
      options: fields of a plan, beyond the common ones, that it reads.
      cuts: whether it cuts what moves into pieces, which wants the streamed index first.
    """

    name: str
    summary: str
    kernel: Callable[[jax.Array, jax.Array, Job], jax.Array]
    faults: Callable[[GemmProblem, GemmPlan, MeshShape], list[str]]
    schedule: Callable[[GemmProblem, GemmPlan, MeshShape], Schedule]
    flatten: Callable[[GemmPlan], str | None] = lambda plan: None
    forward_dataflows: tuple[Dataflow, ...] = tuple(Dataflow)
    options: tuple[str, ...] = ()
    cuts: bool = True

    def axis_names(self, plan: GemmPlan) -> dict[str, tuple[str, ...]]:
        """Mesh axis names of "row" and "col" as this algorithm sees the mesh."""
        both = (plan.row_axis, plan.col_axis)
        flat = self.flatten(plan)
        if flat is None:
            return {"row": (plan.row_axis,), "col": (plan.col_axis,)}
        return {"row": both if flat == "row" else (), "col": both if flat == "col" else ()}

    def view(self, plan: GemmPlan, shape: MeshShape) -> MeshShape:
        """The mesh shape as this algorithm sees it."""
        flat = self.flatten(plan)
        if flat is None:
            return shape
        return MeshShape(shape.num_chips, 1) if flat == "row" else MeshShape(1, shape.num_chips)


def wire_dtype(problem: GemmProblem, plan: GemmPlan) -> str:
    """The dtype in which partial sums travel between chips."""
    return problem.out_dtype if plan.reduce_dtype == "output" else problem.accum_dtype


def shard_bytes(problem: GemmProblem, plan: GemmPlan, role: str, view: MeshShape) -> int:
    """Bytes of one chip's shard of `role` as it travels."""
    dtype = wire_dtype(problem, plan) if role == "out" else problem.dtype(role)
    elements = problem.bytes(role) // itemsize(problem.dtype(role)) // view.num_chips
    return elements * itemsize(dtype)


def collective(
    problem: GemmProblem, plan: GemmPlan, mover: Mover, view: MeshShape, slices: int = 1
) -> Transfer | None:
    """The gather or reduce-scatter of one of `slices` slices; None on an axis of 1."""
    ring = view.size(mover.axis)
    if ring == 1:
        return None
    return Transfer(
        kind="all_gather" if mover.is_input else "reduce_scatter",
        role=mover.role,
        axis=mover.axis,
        ring=ring,
        bytes=(ring - 1) * shard_bytes(problem, plan, mover.role, view) // slices,
        hops=ring - 1,
    )


def transfers(*found: Transfer | None) -> tuple[Transfer, ...]:
    """Those transfers that take place."""
    return tuple(transfer for transfer in found if transfer is not None)


def split_movers(plan: GemmPlan) -> tuple[tuple[Mover, ...], Mover | None]:
    """The moving inputs and the moving output (or None) of a plan."""
    movers = plan.contraction.movers
    inputs = tuple(mover for mover in movers if mover.is_input)
    return inputs, next((mover for mover in movers if not mover.is_input), None)


def local_product(
    problem: GemmProblem, plan: GemmPlan, view: MeshShape, slices: int = 1
) -> Product:
    """One chip's product over one of `slices` slices of the streamed index."""
    extents = plan.contraction.local_extents(problem, *view)
    extents[plan.contraction.streamed] //= slices
    return Product(**extents, accumulates=slices > 1 and plan.contraction.stationary == "out")


def memory(
    problem: GemmProblem,
    plan: GemmPlan,
    view: MeshShape,
    *,
    gathered: dict[str, float],
    partial: Product,
    buffers: int,
) -> dict[str, int]:
    """The three memory figures of a schedule.

    Args:
      problem: the product.
      plan: its plan.
      view: the mesh as the algorithm sees it.
      gathered: for each moving input, how many of its shards are held gathered.
      partial: a local product; its result is held in the accumulation dtype.
      buffers: how many such results are alive at once.
    """
    shards = {role: problem.bytes(role) // view.num_chips for role in ROLES}
    accum = partial.m * partial.n * itemsize(problem.accum_dtype)
    held = sum(shards[role] * count for role, count in gathered.items())
    return {
        "argument_bytes": shards["lhs"] + shards["rhs"],
        "output_bytes": shards["out"],
        "temporary_bytes": int(held) + buffers * accum,
    }


def divisibility_faults(
    problem: GemmProblem, plan: GemmPlan, view: MeshShape, names: dict[str, tuple[str, ...]]
) -> list[str]:
    """Every dimension of every matrix that its mesh axis does not divide."""
    found = []
    for role in ROLES:
        for label in plan.contraction.indices(role):
            axis = plan.contraction.axis(role, label)
            if problem.extent(label) % view.size(axis):
                name = "*".join(names[axis])
                found.append(
                    f"{role} dimension {label} = {problem.extent(label)} is not divisible by "
                    f"mesh axis {name!r} of size {view.size(axis)}"
                )
    return found


def streamed_extent(problem: GemmProblem, plan: GemmPlan, view: MeshShape) -> int:
    """What S * block_size must divide: the gcd of the local streamed extents."""
    extent = problem.extent(plan.contraction.streamed)
    return math.gcd(extent // view.rows, extent // view.cols)


def only_one_slice(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> list[str]:
    """The fault of a slice count in an algorithm that has none."""
    if plan.slice_count == 1:
        return []
    return [f"{plan.algorithm} has no slices: slice_count must be 1, got {plan.slice_count}"]
