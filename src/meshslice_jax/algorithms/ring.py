"""A product with one collective cut into a ring of neighbour sends.

Of the two moving matrices one is *ringed*, the other *blocked* (one collective).
A ring of P chips has P natural steps; each chip multiplies while its neighbours'
data is on the way. Both ring directions are used: a shard is cut into two parts,
the first goes one way, the second the other, and each step multiplies what just
came from both sides in ONE product of full size.

    ringed input    in step t chip i holds part 0 of shard i-t and part 1 of i+t
    ringed output   in step t chip i adds to part 0 for chip i-1-t and part 1 for i+1+t

With S > 1 the P steps are merged into S (S divides P): u = P/S chunks arrive, or are
sent, per product. Wang's algorithm uses this on a 2D mesh; the 1D algorithms on a
mesh flattened into one ring, where the blocked matrix does not move at all.
(Wang et al., ASPLOS 2023; MeshSlice, ISCA 2025, section 2.3.)
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from meshslice_jax import collectives
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
        return _ring_reduce(operands, job, ringed, blocked)
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
    """Yields, step by step, the list of (part, first global index) that is at hand."""
    axis = job.axis(ringed.axis)
    steps, merged = _merged(job, axis.size)
    parts, width, me = _cut(x, ringed.dim), x.shape[ringed.dim], axis.index()
    for step in range(steps):
        found = []
        for t in range(step * merged, (step + 1) * merged):
            offset = 0
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
    whole = None
    for found in _arrivals(operands[ringed.role], job, ringed):
        operands[ringed.role] = _join([part for part, _ in found], ringed.dim)
        partial, place = job.dot(**operands), 0
        if whole is None:
            steps, _ = _merged(job, job.axis(ringed.axis).size)
            whole = _join([partial] * steps, blocked.dim)  # every slot is overwritten
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


def _offsets(sizes: tuple[int, ...]) -> list[int]:
    found = [sizes[0]]
    for size in sizes[1:-1]:
        found.append(found[-1] + size)
    return found if len(sizes) > 1 else []


def faults(problem: GemmProblem, plan: GemmPlan, ring: int) -> list[str]:
    """A slice count that does not divide the ring."""
    if ring % plan.slice_count == 0:
        return []
    return [f"slice_count {plan.slice_count} does not divide the ring of {ring} chips"]


def schedule(problem: GemmProblem, plan: GemmPlan, view: MeshShape, ring_axis: str) -> Schedule:
    """The blocked collective, then (or before) the ring of sends with its products."""
    ringed, blocked = _ringed(plan.contraction.movers, ring_axis)
    ring = view.size(ring_axis)
    steps = ring if plan.slice_count == 1 else plan.slice_count
    merged = ring // steps
    block = transfers(collective(problem, plan, blocked, view))
    product = local_product(problem, plan, view, steps)
    width = problem.extent(plan.contraction.streamed) // ring
    send = Transfer(
        kind="permute",
        role=ringed.role,
        axis=ring_axis,
        ring=ring,
        bytes=shard_bytes(problem, plan, ringed.role, view),
        hops=1,
        ops=len(collectives.halves(width)),
        count=1,
    )
    sends = (dataclasses.replace(send, count=merged),) if ring > 1 else ()
    rest = (Step(transfers=(send,)), merged - 1)
    first, last = (rest, None) if ringed.is_input else (None, rest)
    before, after = (block, ()) if blocked.is_input else ((), block)
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
