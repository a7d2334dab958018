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

import dataclasses

import jax
from jax import lax

from meshslice_jax import collectives
from meshslice_jax.algorithms.base import Job, collective, shard_bytes, transfers
from meshslice_jax.dataflow import Mover
from meshslice_jax.mesh import MeshShape, divisors
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Product, Transfer


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
        return exchanged(operands, moving, job)
    return ring(operands, moving, job, balanced(axis.size // job.plan.scatter_group, turn))


def exchanged(operands: dict[str, jax.Array], moving: str, job: Job) -> jax.Array:
    """The sum over an axis of each chip's product for this chip's chunk, by an all-to-all.

    A result that is turned after the kernel is turned before the exchange instead, as it leaves
    the product, which XLA makes write it so, and turned back: two turns cancel. That saves a pass
    over the result; the product has to be one of chunks for it.
    """
    out = job.output()
    chunks = job.axis(out.axis).size
    if not job.turned_after:
        return job.exchange(job.dot(**operands), out, chunks)
    whole = operands[moving]
    split = whole.reshape(chunks, whole.shape[0] // chunks, *whole.shape[1:])
    parts = jax.vmap(lambda chunk: job.dot(**(operands | {moving: chunk})))(split)
    turned = parts.swapaxes(1, 2)
    return job.exchange(turned.reshape(-1, turned.shape[2]), out, chunks).T


def balanced(chunks: int, turn: int = 0) -> tuple[int, int]:
    """Lengths of the chains that move up and down the ring."""
    longer, shorter = chunks // 2, chunks - 1 - chunks // 2
    return (longer, shorter) if turn % 2 == 0 else (shorter, longer)


def ring(
    operands: dict[str, jax.Array], moving: str, job: Job, chains: tuple[int, int]
) -> jax.Array:
    """The sum over a ring of each chip's product for this chip's chunk; in the output's dtype.

    Args:
      operands: "lhs" and "rhs", the moving one gathered.
      moving: the role whose leading dimension holds the chunks.
      job: what runs.
      chains: lengths of the two chains, up and down the ring; with the chip's own chunk they
        make all chunks.
    """
    out = job.output()
    group, axis = job.plan.scatter_group, job.axis(out.axis)
    whole, chunks = operands[moving], sum(chains) + 1
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
    for direction, length in zip((1, -1), chains, strict=True):
        arrived = ()
        for distance in range(length, 0, -1):
            sent = partial(direction * distance, arrived).astype(job.wire_dtype)
            with jax.named_scope("shift"):
                arrived = (collectives.shift(sent, axis, direction, group),)
        arrivals += arrived
    own = partial(0, tuple(arrivals))
    return job.exchange(own, out, group) if group > 1 else own.astype(job.out_dtype)


def transfers_of(
    problem: GemmProblem, plan: GemmPlan, mover: Mover | None, view: MeshShape, slices: int
) -> tuple[Transfer, ...]:
    """How one of `slices` slices of the moving output leaves a chip."""
    if mover is None or view.size(mover.axis) == 1:
        return ()
    if plan.reduce_scatter == "native":
        return transfers(collective(problem, plan, mover, view, slices))
    length = view.size(mover.axis)
    shard = shard_bytes(problem, plan, mover.role, view) // slices
    group = length if plan.reduce_scatter == "all_to_all" else plan.scatter_group
    found = messages(mover, length // group, group * shard)
    return found + exchange(mover, group, shard)


def exchange(mover: Mover, group: int, shard: int) -> tuple[Transfer, ...]:
    """The all-to-all of a group, of which each chip keeps `shard` bytes; none of one chip."""
    if group == 1:
        return ()
    return (
        Transfer(
            kind="all_to_all",
            role=mover.role,
            axis=mover.axis,
            ring=group,
            bytes=(group - 1) * shard,
            hops=group // 2,
        ),
    )


def messages(mover: Mover, chunks: int, size: int) -> tuple[Transfer, ...]:
    """The sends of both chains: in pairs, one each way, and a single one if P is even.

    That one goes either way in turn, so that on average both directions carry half of it.
    """
    pair = Transfer(
        kind="permute",
        role=mover.role,
        axis=mover.axis,
        ring=chunks,
        bytes=2 * size,
        hops=1,
        ops=2,
        count=(chunks - 1) // 2,
    )
    single = dataclasses.replace(pair, bytes=size, ops=1, count=(chunks - 1) % 2)
    return tuple(one for one in (pair, single) if one.count)


def chunked(product: Product, plan: GemmPlan, mover: Mover | None, view: MeshShape) -> Product:
    """A slice's product as the form computes it: whole, or a chunk at a time."""
    if mover is None or plan.reduce_scatter != "ring":
        return product
    streamed, chunks = plan.contraction.streamed, view.size(mover.axis) // plan.scatter_group
    part = getattr(product, streamed) // chunks
    return dataclasses.replace(product, count=chunks, **{streamed: part})


def faults(plan: GemmPlan, field: str, ringed: tuple[str, ...], chips: int | None) -> list[str]:
    """Groups of a plan that runs no ring over them, or that do not divide the ring.

    Args:
      plan: the plan of a product.
      field: the field of its plan that decides whether a moving output is ringed.
      ringed: the values with which it is.
      chips: of the axis along which the output is ringed then; None where it is not, so that
        only another product of the layer has groups.
    """
    group = plan.scatter_group
    if group == 1:
        return []
    if getattr(plan, field) not in ringed:
        values = " or ".join(map(repr, ringed))
        return [
            f"scatter_group {group} needs {field} {values}, the plan has "
            f"{getattr(plan, field)!r}; use scatter_group=1"
        ]
    if chips is None or chips % group == 0:
        return []
    return [
        f"scatter_group {group} does not divide the {chips} chips of the axis along which out is "
        f"scattered; what fits: scatter_group={' or '.join(map(str, divisors(chips)))}"
    ]
