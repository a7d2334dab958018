"""A product with one collective cut into a ring of neighbour sends.

Of the two moving matrices one is *ringed*, the other *blocked* (one collective).
A ring of P chips has P natural steps; each chip multiplies while its neighbours'
data is on the way. `plan.ring_form` says what goes round:

    joined    both ring directions: a shard is cut into two parts, the first goes one way,
              the second the other, and each step multiplies what just came from both sides
              in ONE product of full size
    halves    the same in two products, one a part: nothing has to be joined
    whole     whole shards, half way round on either side; P products
    one_way   whole shards, all the way round; P products, one direction of the links

    ringed input    in step t chip i holds part 0 of shard i-t and part 1 of i+t
    ringed output   in step t chip i adds to part 0 for chip i-1-t and part 1 for i+1+t

With S > 1 the P steps of the joined form are merged into S (S divides P): u = P/S chunks
arrive, or are sent, per product. Wang's algorithm uses this on a 2D mesh; the 1D
algorithms on a mesh flattened into one ring, where the blocked matrix does not move at all.
A ringed output in whole chunks is the ring of `scatter`, with one slice.
(Wang et al., ASPLOS 2023; MeshSlice, ISCA 2025, section 2.3.)
"""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
from jax import lax

from meshslice_jax import collectives, compat
from meshslice_jax.algorithms import scatter
from meshslice_jax.algorithms.base import (
    Job,
    collective,
    local_product,
    memory,
    shard_bytes,
    transfers,
)
from meshslice_jax.dataflow import Mover
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule, Step, Transfer, sequence


def kernel(lhs: jax.Array, rhs: jax.Array, job: Job, ring_axis: str) -> jax.Array:
    """One chip's part, with the mover along `ring_axis` ringed."""
    operands = {"lhs": lhs, "rhs": rhs}
    ringed, blocked = _ringed(job.contraction.movers, ring_axis)
    if blocked.is_input:
        operands[blocked.role] = job.gather(operands[blocked.role], blocked)
    if not ringed.is_input:
        return _REDUCE[job.plan.ring_form](operands, job, ringed, blocked)
    if blocked.is_input:
        return _ring_gather_sum(operands, job, ringed, blocked)
    return job.scatter(_ring_gather_place(operands, job, ringed, blocked), blocked)


def _ringed(movers: tuple[Mover, Mover], ring_axis: str) -> tuple[Mover, Mover]:
    first, second = movers
    return (first, second) if first.axis == ring_axis else (second, first)


def _merged(job: Job, ring: int) -> tuple[int, int]:
    """(steps, chunks per step) of a ring."""
    steps = ring if job.plan.slice_count == 1 else job.plan.slice_count
    return steps, ring // steps


def _cut(x: jax.Array, dim: int) -> list[jax.Array]:
    """The parts of a shard that go each way round the ring."""
    starts = [0]
    for size in collectives.halves(x.shape[dim]):
        starts.append(starts[-1] + size)
    return [lax.slice_in_dim(x, a, b, axis=dim) for a, b in itertools.pairwise(starts)]


def _join(parts: list[jax.Array], dim: int) -> jax.Array:
    return lax.concatenate(parts, dim) if len(parts) > 1 else parts[0]


def _arrivals(x: jax.Array, job: Job, ringed: Mover):
    """Yields, product by product, the list of (part, first global index) that is at hand."""
    axis, form = job.axis(ringed.axis), job.plan.ring_form
    if axis.size == 1 and form != "joined":
        yield [(x, 0)]
    elif form in ("joined", "halves"):
        steps, merged = _merged(job, axis.size)
        found = _halves(x, job, ringed)
        if form == "joined":
            for _ in range(steps):
                yield list(itertools.chain(*itertools.islice(found, merged)))
        else:
            yield from ([part] for parts in found for part in parts)
    else:
        yield from ([part] for part in _wholes(x, job, ringed))


def _halves(x: jax.Array, job: Job, ringed: Mover):
    """Yields, step by step, (part, first global index) of both directions."""
    axis = job.axis(ringed.axis)
    parts, width, me = _cut(x, ringed.dim), x.shape[ringed.dim], axis.index()
    for t in range(axis.size):
        found, offset = [], 0
        for part, by in zip(parts, (1, -1), strict=False):
            found.append((part, (me - by * t) % axis.size * width + offset))
            offset += part.shape[ringed.dim]
        if t + 1 < axis.size:
            with jax.named_scope("shift"):
                parts = [
                    collectives.shift(part, axis, by)
                    for part, by in zip(parts, (1, -1), strict=False)
                ]
        yield found


def _wholes(x: jax.Array, job: Job, ringed: Mover):
    """Yields (shard, first global index), nearest first, from both sides or one."""
    axis = job.axis(ringed.axis)
    width, me = x.shape[ringed.dim], axis.index()
    yield x, me * width
    lengths = _lengths(job, axis.size)
    sent = {1: x, -1: x}
    for t in range(1, max(lengths) + 1):
        for by, length in zip((1, -1), lengths, strict=True):
            if t <= length:
                with jax.named_scope("shift"):
                    sent[by] = collectives.shift(sent[by], axis, by)
                yield sent[by], (me - by * t) % axis.size * width


def _lengths(job: Job, ring: int) -> tuple[int, int]:
    """How far whole shards go up and down the ring."""
    return (ring - 1, 0) if job.plan.ring_form == "one_way" else scatter.balanced(ring)


def _ring_gather_sum(operands, job: Job, ringed: Mover, blocked: Mover) -> jax.Array:
    """Both inputs move: each step sums over the streamed indices that have arrived."""
    total, whole = None, operands[blocked.role]
    for found in _arrivals(operands[ringed.role], job, ringed):
        matching = [
            lax.dynamic_slice_in_dim(whole, start, part.shape[ringed.dim], blocked.dim)
            for part, start in found
        ]
        operands[ringed.role] = _join([part for part, _ in found], ringed.dim)
        operands[blocked.role] = _join(matching, blocked.dim)
        partial = job.dot(**operands)
        total = partial if total is None else total + partial
    return total.astype(job.out_dtype)


def _ring_gather_place(operands, job: Job, ringed: Mover, blocked: Mover) -> jax.Array:
    """The output is blocked: each step fills the streamed indices that have arrived."""
    whole, ring = None, job.axis(ringed.axis).size
    extent = operands[ringed.role].shape[ringed.dim] * ring
    for found in _arrivals(operands[ringed.role], job, ringed):
        operands[ringed.role] = _join([part for part, _ in found], ringed.dim)
        partial, place = job.dot(**operands), 0
        if whole is None:
            shape = list(partial.shape)
            shape[blocked.dim] = extent  # every index of it is written
            whole = lax.empty(tuple(shape), job.wire_dtype)
            whole = lax.pcast(whole, tuple(compat.varying_axes(partial)), to="varying")
        partial = partial.astype(job.wire_dtype)
        for part, start in found:
            size = part.shape[ringed.dim]
            piece = lax.slice_in_dim(partial, place, place + size, axis=blocked.dim)
            whole = lax.dynamic_update_slice_in_dim(whole, piece, start, blocked.dim)
            place += size
    return whole


def _ring_reduce(operands, job: Job, ringed: Mover, blocked: Mover) -> jax.Array:
    """The output is ringed: partial sums travel, each chip adds its product."""
    axis, whole = job.axis(ringed.axis), operands[blocked.role]
    steps, merged = _merged(job, axis.size)
    width, me = whole.shape[blocked.dim] // axis.size, axis.index()
    sizes, sums = collectives.halves(width), None
    for step in range(steps):
        turns = range(step * merged, (step + 1) * merged)
        chunks = []
        for t in turns:
            offset = 0
            for size, by in zip(sizes, (1, -1), strict=False):
                start = (me - by * (1 + t)) % axis.size * width + offset
                chunks.append(lax.dynamic_slice_in_dim(whole, start, size, blocked.dim))
                offset += size
        operands[blocked.role] = _join(chunks, blocked.dim)
        pieces = jnp.split(job.dot(**operands), _offsets(sizes * merged), ringed.dim)
        for t in turns:
            own, pieces = pieces[: len(sizes)], pieces[len(sizes) :]
            if sums is not None:
                own = [mine + sent.astype(mine.dtype) for mine, sent in zip(own, sums, strict=True)]
            sums = own
            if t + 1 < axis.size:
                with jax.named_scope("shift"):
                    sums = [
                        collectives.shift(x.astype(job.wire_dtype), axis, by)
                        for x, by in zip(own, (1, -1), strict=False)
                    ]
    return _join([x.astype(job.out_dtype) for x in sums], ringed.dim)


def _reduce_halves(operands, job: Job, ringed: Mover, blocked: Mover) -> jax.Array:
    """Two chains of half chunks, one each way, their products one after the other.

    Tied like the chains of `scatter`: each product waits for what it adds, and for the
    product before it, so that the two chains advance in turn.
    """
    axis, whole = job.axis(ringed.axis), operands[blocked.role]
    width, me = whole.shape[blocked.dim] // axis.size, axis.index()
    sums, before = [None, None], ()
    for t in range(1, axis.size + 1):
        offset = 0
        for place, (size, by) in enumerate(zip(collectives.halves(width), (1, -1), strict=False)):
            arrived = ()
            if sums[place] is not None:
                with jax.named_scope("shift"):
                    arrived = (collectives.shift(sums[place], axis, by),)
            start = (me - by * t) % axis.size * width + offset
            if before or arrived:
                start, *_ = lax.optimization_barrier((start, *before, *arrived))
            chunk = lax.dynamic_slice_in_dim(whole, start, size, blocked.dim)
            total = job.dot(**(operands | {blocked.role: chunk}))
            for other in arrived:
                total = total + other.astype(total.dtype)
            dtype = job.wire_dtype if t < axis.size else job.out_dtype
            sums[place] = total.astype(dtype)
            before, offset = (sums[place],), offset + size
    return _join([x for x in sums if x is not None], ringed.dim)


def _reduce_wholes(operands, job: Job, ringed: Mover, blocked: Mover) -> jax.Array:
    """Chains of whole chunks that end in each chip's own."""
    ring = job.axis(ringed.axis).size // job.plan.scatter_group
    return scatter.ring(operands, blocked.role, job, _lengths(job, ring))


#: How a ringed output is reduced, by `ring_form`.
_REDUCE = types.MappingProxyType(
    {
        "joined": _ring_reduce,
        "halves": _reduce_halves,
        "whole": _reduce_wholes,
        "one_way": _reduce_wholes,
    }
)


def _offsets(sizes: tuple[int, ...]) -> list[int]:
    found = [sizes[0]]
    for size in sizes[1:-1]:
        found.append(found[-1] + size)
    return found if len(sizes) > 1 else []


def faults(problem: GemmProblem, plan: GemmPlan, view: MeshShape, ring_axis: str) -> list[str]:
    """A slice count that does not divide the ring, or a form that does not do what is asked."""
    ring, label, form = view.size(ring_axis), plan.contraction.streamed, plan.ring_form
    ringed, _ = _ringed(plan.contraction.movers, ring_axis)
    found = scatter.faults(plan, "ring_form", _WHOLE, None if ringed.is_input else ring)
    if ring % plan.slice_count:
        found.append(f"slice_count {plan.slice_count} does not divide the ring of {ring} chips")
    elif plan.slice_count > 1 and form != "joined":
        found.append(
            f"slice_count {plan.slice_count} merges ring steps, which only ring_form='joined' "
            f"does, the plan has {form!r}"
        )
    if form == "halves" and ring > 1 and problem.extent(label) % (2 * ring):
        found.append(
            f"ring_form='halves' cuts {label} = {problem.extent(label)} into {2 * ring} parts, "
            "which do not divide it"
        )
    return found


#: Forms that send whole shards or chunks.
_WHOLE = ("whole", "one_way")


def schedule(problem: GemmProblem, plan: GemmPlan, view: MeshShape, ring_axis: str) -> Schedule:
    """The blocked collective, then (or before) the ring of sends with its products."""
    ringed, blocked = _ringed(plan.contraction.movers, ring_axis)
    in_groups = plan.ring_form in _WHOLE and not ringed.is_input
    group = plan.scatter_group if in_groups else 1
    ring = view.size(ring_axis) // group
    steps = ring if plan.slice_count == 1 else plan.slice_count
    merged = ring // steps
    block = transfers(collective(problem, plan, blocked, view))
    product = local_product(problem, plan, view, steps)
    shard = shard_bytes(problem, plan, ringed.role, view)
    streamed = plan.contraction.streamed
    parts = len(collectives.halves(problem.extent(streamed) // view.size(ring_axis)))
    if plan.ring_form == "halves" and ring > 1:
        half = getattr(product, streamed) // parts
        product = dataclasses.replace(product, count=parts, **{streamed: half})
    both = plan.ring_form in ("joined", "halves")
    send = Transfer(
        kind="permute",
        role=ringed.role,
        axis=ring_axis,
        ring=ring,
        bytes=group * shard,
        hops=1,
        ops=parts if both else 1,
        # Whole shards go either way in turn: on average both directions carry half of each.
        directions=1 if plan.ring_form == "one_way" else 2,
        count=1,
    )
    sends = (dataclasses.replace(send, count=merged),) if ring > 1 else ()
    rest = (Step(transfers=(send,)), merged - 1)
    first, last = (rest, None) if ringed.is_input else (None, rest)
    before, after = (block, scatter.exchange(ringed, group, shard))
    if not blocked.is_input:
        before, after = (), block
    held = {blocked.role: view.size(blocked.axis)} if blocked.is_input else {}
    if ringed.is_input:
        held[ringed.role] = min(2, steps) * merged if ring > 1 else 0
    return Schedule(
        steps=sequence(
            (Step(transfers=before), 1),
            first or (Step(), 0),
            *(
                ((Step(transfers=sends, product=product), steps - 1), (Step(product=product), 1))
                if ringed.is_input
                else (
                    (Step(product=product), 1),
                    (Step(transfers=sends, product=product), steps - 1),
                )
            ),
            last or (Step(), 0),
            (Step(transfers=after), 1),
        ),
        **memory(
            problem,
            plan,
            view,
            gathered=held,
            partial=product,
            buffers=2 if blocked.is_input else steps + 1,
        ),
    )
