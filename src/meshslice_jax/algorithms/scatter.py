"""Products whose output is reduce-scattered: the forms that `plan.reduce_scatter` names.

A moving output ends in a reduce-scatter, and the TPU compiler runs its own one
synchronously, whatever it is told. What it does run beside products are permutes and
all-to-alls, so there are forms made of those. P chips lie along the output's axis; the
operand that moves along the other axis is cut into P chunks of its streamed index, chunk
d being what chip d needs of the output.

    native       one product of all chunks, then the collective
    all_to_all   one product, an all-to-all, and a tree of sums; loads a ring of P links with
                 P^2/8 shards, so it is for short axes
    ring         P products, one a chunk. Two chains of partial sums run towards each chip,
                 one from either side: a chip multiplies the chunk of the farthest chip,
                 sends that one hop, multiplies the next chunk and adds what has arrived,
                 and so on; its own chunk comes last and adds both arrivals. The links
                 carry as little as in a ring reduce-scatter.

With `plan.scatter_group` = g the ring has two levels, for long axes: the P chips are P/g
groups of g neighbours; chains run between chips of the same place in their groups (P/g
products, each of g chunks), and an all-to-all inside the group does the rest.

Two details decide what XLA makes of a chain. Each product is tied to the arrival of what
it adds, through the scalar index of its chunk, so that the sum runs in the epilogue of that
product and not as a pass over memory; and chunks lie along the major dimension, where
taking one moves nothing. (A Wang-style ring on the scattered axis; with S = 1 it is that.)
"""

import jax
from jax import lax

from meshslice_jax import collectives
from meshslice_jax.algorithms.base import Job
from meshslice_jax.dataflow import Mover
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem


def product(operands: dict[str, jax.Array], moving: str, job: Job, turn: int = 0) -> jax.Array:
    """The product of local operands, reduce-scattered along the output's axis.

    Args:
      operands: "lhs" and "rhs", the moving one gathered.
      moving: the role whose leading dimension is the streamed index, in the order of the
        chips along the output's axis.
      job: what runs; its output moves, its streamed index is the output's leading one.
      turn: which product of a sequence it is. The two chains differ in length by one if P
        is even; odd turns exchange them, so that both link directions carry the same.

    Returns:
      This chip's part of the output, in `job.out_dtype`.
    """
    out = job.output()
    axis = job.axis(out.axis)
    if axis.size == 1 or job.plan.reduce_scatter == "native":
        return job.scatter(job.dot(**operands), out)
    if job.plan.reduce_scatter == "all_to_all":
        partial = job.dot(**operands).astype(job.wire_dtype)
        return _exchanged(partial, out, job, axis.size).astype(job.out_dtype)
    group = job.plan.scatter_group
    partial = _ring(operands, moving, job, axis.size // group, turn)
    if group == 1:
        return partial.astype(job.out_dtype)
    return _exchanged(partial.astype(job.wire_dtype), out, job, group).astype(job.out_dtype)


def _ring(operands, moving: str, job: Job, chunks: int, turn: int) -> jax.Array:
    """The sum over a ring of `chunks` chips of each one's product for this chip's chunk."""
    group, axis = job.plan.scatter_group, job.axis(job.output().axis)
    whole = operands[moving]
    split = whole.reshape(chunks, whole.shape[0] // chunks, *whole.shape[1:])
    me = axis.index() // group

    def partial(offset: int, arrived: tuple[jax.Array, ...]) -> jax.Array:
        """The product for the chip `offset` further on, plus what has arrived for it."""
        index = (me + offset) % chunks
        if arrived:
            index, *_ = lax.optimization_barrier((index, *arrived))
        chunk = lax.dynamic_index_in_dim(split, index, 0, keepdims=False)
        total = job.dot(**(operands | {moving: chunk}))
        for other in arrived:
            total = total + other.astype(total.dtype)
        return total

    arrivals = []
    for direction, length in _chains(chunks, turn):
        arrived = ()
        for distance in range(length, 0, -1):
            sent = partial(direction * distance, arrived).astype(job.wire_dtype)
            with jax.named_scope("shift"):
                arrived = (collectives.shift(sent, axis, direction, group),)
        arrivals += arrived
    return partial(0, tuple(arrivals))


def _chains(chunks: int, turn: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(direction, length) of the two chains that end in a chip."""
    longer, shorter = chunks // 2, chunks - 1 - chunks // 2
    return ((1, longer), (-1, shorter)) if turn % 2 == 0 else ((1, shorter), (-1, longer))


def _exchanged(partial: jax.Array, out: Mover, job: Job, group: int) -> jax.Array:
    """All-to-all among `group` neighbours along the output's axis, and the sum of what came.

    Summed by an explicit tree, in the accumulation dtype: cheaper on TPUs than a reduction
    over a new leading dimension.
    """
    with jax.named_scope("scatter"):
        received = collectives.all_to_all(partial, job.axis(out.axis), out.dim, group)
        parts = [
            part.astype(job.accum_dtype)
            for part in lax.split(received, [received.shape[out.dim] // group] * group, out.dim)
        ]
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(parts) // 2 * 2 :]
    return parts[0]
