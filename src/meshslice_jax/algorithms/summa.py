"""SUMMA: panels broadcast and reduced along rings.

The streamed dimension is cut into L = lcm(rows, cols) panels, so that each panel
of a moving matrix has one owner on its ring. For each panel, the owners of moving
inputs broadcast theirs along their rings, one product follows, and a moving
output is reduced to its owner. A broadcast is a chain of neighbour sends, one half
of the panel in each ring direction, in `packets` pieces that follow each other.
With slice_count S > 1 the L panels are merged into S steps (S divides L).

(van de Geijn and Watts 1997; MeshSlice, ISCA 2025, section 2.3.)
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from meshslice_jax import collectives
from meshslice_jax.algorithms.base import (
    Algorithm,
    Job,
    local_product,
    memory,
    shard_bytes,
    split_movers,
    transfers,
)
from meshslice_jax.dataflow import Mover
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule, Slice, Transfer, pipelined


def kernel(lhs: jax.Array, rhs: jax.Array, job: Job) -> jax.Array:
    """One chip's part: broadcast panels, multiply, reduce panels."""
    operands = {"lhs": lhs, "rhs": rhs}
    panels = math.lcm(job.row.size, job.col.size)
    steps = panels if job.plan.slice_count == 1 else job.plan.slice_count
    merged, out = panels // steps, job.output()
    total, shard = None, None
    for step in range(steps):
        with jax.named_scope(f"step{step}"):
            mine = range(step * merged, (step + 1) * merged)
            moved = {}
            for mover in job.inputs():
                found = [_broadcast(operands[mover.role], p, panels, mover, job) for p in mine]
                moved[mover.role] = lax.concatenate(found, mover.dim) if merged > 1 else found[0]
            partial = job.dot(**(operands | moved))
            if out is None:
                total = partial if total is None else total + partial
                continue
            for p, piece in zip(mine, jnp.split(partial, merged, out.dim), strict=True):
                shard = _reduce(shard, piece, p, panels, out, job)
    return (total if out is None else shard).astype(job.out_dtype)


def _owner(panel: int, panels: int, ring: int) -> tuple[int, int]:
    """The chip that owns a panel, and the panel's place among those it owns."""
    return divmod(panel, panels // ring)


def _broadcast(x: jax.Array, panel: int, panels: int, mover: Mover, job: Job) -> jax.Array:
    axis = job.axis(mover.axis)
    root, place = _owner(panel, panels, axis.size)
    width = x.shape[mover.dim] * axis.size // panels
    mine = lax.slice_in_dim(x, place * width, (place + 1) * width, axis=mover.dim)
    with jax.named_scope("broadcast"):
        return collectives.broadcast(mine, axis, root, job.plan.packets, 1 - mover.dim)


def _reduce(shard, partial: jax.Array, panel: int, panels: int, mover: Mover, job: Job):
    """Reduces one panel to its owner, who keeps it in its place of `shard`."""
    axis = job.axis(mover.axis)
    root, place = _owner(panel, panels, axis.size)
    with jax.named_scope("reduce"):
        summed = collectives.reduce(
            partial, axis, root, job.plan.packets, 1 - mover.dim, job.wire_dtype
        )
    width = partial.shape[mover.dim]
    if shard is None:
        copies = [summed.astype(job.out_dtype)] * (panels // axis.size)
        return lax.concatenate(copies, mover.dim) if len(copies) > 1 else copies[0]
    old = lax.slice_in_dim(shard, place * width, (place + 1) * width, axis=mover.dim)
    new = jnp.where(axis.index() == root, summed.astype(job.out_dtype), old)
    return lax.dynamic_update_slice_in_dim(shard, new, place * width, mover.dim)


def faults(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> list[str]:
    """A slice count that does not divide the panels, packets that do not cut them."""
    panels, found = math.lcm(*shape), []
    if panels % plan.slice_count:
        found.append(
            f"slice_count {plan.slice_count} does not divide the {panels} panels "
            f"(lcm of the mesh {shape})"
        )
    for mover in plan.contraction.movers:
        extent = _uncut_extent(problem, plan, mover, shape)
        if shape.size(mover.axis) > 1 and any(
            half % plan.packets for half in collectives.halves(extent)
        ):
            found.append(
                f"packets {plan.packets} does not divide both halves of {mover.role}'s local "
                f"extent {extent}"
            )
    return found


def _uncut_extent(problem: GemmProblem, plan: GemmPlan, mover: Mover, shape: MeshShape) -> int:
    """The local extent of a moving matrix in the dimension that is not streamed."""
    contraction = plan.contraction
    label = contraction.indices(mover.role)[1 - mover.dim]
    return problem.extent(label) // shape.size(contraction.axis(mover.role, label))


def schedule(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> Schedule:
    """Broadcasts run one step ahead of products, reductions one behind."""
    panels = math.lcm(*shape)
    steps = panels if plan.slice_count == 1 else plan.slice_count
    merged = panels // steps
    inputs, output = split_movers(plan)

    def chain(mover: Mover) -> Transfer | None:
        ring = shape.size(mover.axis)
        if ring == 1:
            return None
        panel_bytes = shard_bytes(problem, plan, mover.role, shape) * ring // panels
        pieces = plan.packets * len(collectives.halves(_uncut_extent(problem, plan, mover, shape)))
        return Transfer(
            kind="broadcast" if mover.is_input else "reduce",
            role=mover.role,
            axis=mover.axis,
            ring=ring,
            bytes=panel_bytes * (ring - 1) / ring,
            hops=ring - 1,
            ops=(ring - 1) * pieces,
            packets=plan.packets,
            count=merged,
        )

    ahead = transfers(*(chain(mover) for mover in inputs))
    behind = transfers(output and chain(output))
    product = local_product(problem, plan, shape, steps)
    held = min(steps, 2)
    return Schedule(
        steps=pipelined([Slice(ahead=ahead, behind=behind, product=product)] * steps),
        **memory(
            problem,
            plan,
            shape,
            gathered={mover.role: held * shape.size(mover.axis) / steps for mover in inputs},
            partial=product,
            buffers=held,
        ),
    )


SUMMA = Algorithm(
    name="summa",
    summary="panels broadcast and reduced along rings",
    kernel=kernel,
    faults=faults,
    schedule=schedule,
    options=("packets",),
)
