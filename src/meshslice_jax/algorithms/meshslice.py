"""MeshSlice: sliced collectives that hide behind partial products.

The streamed dimension is cut into S slices of strided blocks. While slice s is
multiplied, slice s+1 of each moving input is gathered and the partial output of
slice s-1 is reduce-scattered, along both mesh axes at once:

    ahead = gather(slice 0)
    for s in 0..S-1:
        current, ahead = ahead, gather(slice s+1)      # does not wait for the product
        partial = product(current)
        out += partial      or      out[slice s] = scatter(partial)

With S = 1 it is the Collective algorithm. (MeshSlice, ISCA 2025, sections 3.1-3.4.)

A tapered plan cuts finer, into *units*, and makes slices of two or three units but for the
first and the last ones: nothing hides the first gather and the last scatter.
"""

import itertools
import math

import jax
from jax import lax

from meshslice_jax import collectives
from meshslice_jax.algorithms import in_line, scatter
from meshslice_jax.algorithms.base import (
    Algorithm,
    Job,
    collective,
    local_product,
    memory,
    split_movers,
    streamed_extent,
    transfers,
)
from meshslice_jax.dataflow import Mover
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule, Slice, pipelined

#: Taper -> widths, in units, of the first slices, of those after them, and of the last.
_TAPERS = {
    "none": ((), 1, ()),
    "head": ((1,), 2, ()),
    "ends": ((1,), 2, (1,)),
    "graded": ((1, 2), 3, (1,)),
}


def kernel(lhs: jax.Array, rhs: jax.Array, job: Job) -> jax.Array:
    """One chip's part, from its shards; see the module's text."""
    operands = {"lhs": lhs, "rhs": rhs}
    out, (starts, widths) = job.output(), units(job.plan)
    count, total_units = len(widths), sum(widths)
    block = _block(operands, job)

    def piece_of(mover: Mover, index) -> jax.Array:
        start, width = (starts[index], widths[index]) if isinstance(index, int) else (index, 1)
        shard, long = operands[mover.role], block
        if mover.role == job.kept and job.plan.rhs_layout == "sliced":
            return shard[index]
        if mover.role == job.kept:  # its slices lie one after the other: blocks of a whole unit
            (shard,) = shard
            long = shard.shape[mover.dim] // total_units
        return collectives.take_slice(shard, mover.dim, total_units, long, start, width)

    def gathered(index, before=None) -> dict[str, jax.Array]:
        """The moving inputs of a slice; `before` is that of the slice before it."""
        moved = {}
        with jax.named_scope(_label(index)):
            for mover in job.inputs():
                piece = piece_of(mover, index)
                if before is not None and job.plan.gather_order == "ordered":
                    piece, _ = lax.optimization_barrier((piece, before[mover.role]))
                moved[mover.role] = job.gather(piece, mover)
        return moved

    def multiply(moved: dict[str, jax.Array], index) -> jax.Array:
        with jax.named_scope(_label(index)):
            if out is None:
                return job.dot(**(operands | moved))
            (moving,) = moved
            turn = index if isinstance(index, int) else 0
            return scatter.product(operands | moved, moving, job, turn)

    if job.plan.gather_order in in_line.ORDERS:
        slices = [{mover.role: piece_of(mover, i) for mover in job.inputs()} for i in range(count)]
        results = in_line.products(slices, operands, job)
    elif job.rolled and count > 2 and can_roll(job.plan):
        return _rolled(gathered, multiply, job, block)
    else:
        results, ahead = [], gathered(0)
        for index in range(count):
            current = ahead
            ahead = gathered(index + 1, current) if index + 1 < count else None
            results.append(multiply(current, index))
    if out is not None and job.kept == "out":
        if job.plan.rhs_layout == "sliced":
            return tuple(results)
        long = results[0].shape[out.dim] // widths[0]
        return (collectives.put_slices(results, out.dim, long, widths),)
    if out is not None and job.turned_after and count > 1:  # XLA cancels the turns
        turned = [part.T for part in results]
        return collectives.put_slices(turned, 1 - out.dim, block, widths).T
    if out is not None:
        return collectives.put_slices(results, out.dim, block, widths)
    total = results[0]
    for partial in results[1:]:
        total = total + partial
    return total.astype(job.out_dtype)


def units(plan: GemmPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First units of the slices, and their widths in units."""
    first, others, last = _TAPERS[plan.taper]
    count = plan.slice_count
    widths = (*first, *[others] * count)[: count - len(last)] + last
    starts = itertools.accumulate(widths[:-1], initial=0)
    return tuple(starts), tuple(widths)


def can_roll(plan: GemmPlan) -> bool:
    """Whether slices are alike: equally wide, and not in buffers of their own."""
    return plan.taper == "none" and plan.rhs_layout != "sliced"


def _label(index) -> str:
    return f"slice{index}" if isinstance(index, int) else "loop"


def _rolled(gathered, multiply, job: Job, block: int) -> jax.Array:
    """The same with one loop body; the first and the last slice stand outside it."""
    count, out = job.plan.slice_count, job.output()
    first, kept = multiply(gathered(0), 0), job.kept == "out"
    if kept:
        block = first.shape[out.dim]  # a slice lies in one piece

    def place(total, partial, index):
        if out is None:
            return total + partial
        shape = partial.shape
        blocks = shape[out.dim] // block
        split = shape[: out.dim] + (blocks, 1, block) + shape[out.dim + 1 :]
        return lax.dynamic_update_slice_in_dim(total, partial.reshape(split), index, out.dim + 1)

    def body(index, carry):
        total, current = carry
        ahead = gathered(index + 1, current)
        return place(total, multiply(current, index), index), ahead

    # Seeded with the first slice in every slot: right values, right varying axes.
    total = first if out is None else _every_slot(first, out.dim, block, count)
    total, last = lax.fori_loop(1, count - 1, body, (total, gathered(1)))
    total = place(total, multiply(last, count - 1), count - 1)
    if out is None:
        return total.astype(job.out_dtype)
    whole = first.shape[: out.dim] + (first.shape[out.dim] * count,) + first.shape[out.dim + 1 :]
    total = total.reshape(whole)
    return (total,) if kept else total


def _every_slot(first: jax.Array, dim: int, block: int, count: int) -> jax.Array:
    shape = first.shape
    split = shape[:dim] + (shape[dim] // block, 1, block) + shape[dim + 1 :]
    slots = split[: dim + 1] + (count,) + split[dim + 2 :]
    return lax.broadcast_in_dim(first.reshape(split), slots, tuple(range(len(slots))))


def _block(operands: dict[str, jax.Array], job: Job) -> int:
    """Consecutive indices of a unit, from the local streamed extent of an input."""
    mover = job.inputs()[0]
    shards = jax.tree.leaves(operands[mover.role])
    local = sum(shard.shape[mover.dim] for shard in shards)
    return block_of(job.plan, local * job.axis(mover.axis).size, job.row.size, job.col.size)


def block_of(plan: GemmPlan, extent: int, rows: int, cols: int) -> int:
    """Consecutive indices of a unit: the plan's block_size, or the largest legal one.

    Args:
      plan: the plan.
      extent: global extent of the streamed index.
      rows: chips along the plan's row axis.
      cols: chips along its col axis.
    """
    largest = math.gcd(extent // rows, extent // cols) // sum(units(plan)[1])
    return plan.block_size or max(1, largest)  # 1 where there is nothing to cut


def faults(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> list[str]:
    """Slices that do not cut the local streamed extents of both moving matrices."""
    extent, label = streamed_extent(problem, plan, shape), plan.contraction.streamed
    block, (_, out) = plan.block_size or 1, split_movers(plan)
    chips = out and shape.size(out.axis)
    found = scatter.faults(plan, "reduce_scatter", ("ring",), chips) + in_line.faults(plan)
    if plan.loop == "rolled" and not can_roll(plan):
        found.append(
            f"loop='rolled' runs slices that are alike: taper={plan.taper!r}, "
            f"rhs_layout={plan.rhs_layout!r} do not"
        )
    if any(problem.extent(label) % size for size in shape):
        return found  # no local extents to cut; the divisibility fault says so
    pieces = sum(units(plan)[1])
    if extent % (pieces * block) == 0:
        return found
    movers = ", ".join(
        f"{problem.extent(label) // shape.size(mover.axis)} in {mover.role}"
        for mover in plan.contraction.movers
    )
    cut = f"slice_count {plan.slice_count}"
    if plan.taper != "none":
        cut += f" with taper={plan.taper!r} ({pieces} units)"
    return [
        *found,
        f"{cut} x block_size {block} does not divide the local extents "
        f"of the streamed dimension {label} = {problem.extent(label)} ({movers})",
    ]


def schedule(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> Schedule:
    """Gathers run one slice ahead of products, reduce-scatters one behind."""
    _, widths = units(plan)
    pieces, count = sum(widths), len(widths)
    inputs, output = split_movers(plan)

    ahead = transfers(*(collective(problem, plan, mover, shape, pieces) for mover in inputs))
    behind = scatter.transfers_of(problem, plan, output, shape, pieces)
    product = scatter.chunked(local_product(problem, plan, shape, pieces), plan, output, shape)
    unit = Slice(ahead=ahead, behind=behind, product=product)
    made = {width: unit.widened(width, plan.contraction.streamed) for width in set(widths)}
    held, widest = min(count, 2), max(widths)
    return Schedule(
        steps=pipelined([made[width] for width in widths]),
        **memory(
            problem,
            plan,
            shape,
            gathered={
                mover.role: held * shape.size(mover.axis) * widest / pieces for mover in inputs
            },
            partial=made[widest].product,
            buffers=held,
        ),
    )


MESHSLICE = Algorithm(
    name="meshslice",
    summary="sliced collectives on both axes, hidden behind partial products",
    kernel=kernel,
    faults=faults,
    schedule=schedule,
    options=(
        "block_size",
        "loop",
        "taper",
        "rhs_layout",
        "reduce_scatter",
        "scatter_group",
        "gather_order",
    ),
)
