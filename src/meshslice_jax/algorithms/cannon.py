"""Cannon: skew once, then shift both moving matrices by one chip per step.

On a P x P mesh the streamed index is cut into P chunks. Chip (i, j) works on chunk
t = i + j + s in step s = 0..P-1, so a chunk moves one chip back along its axis per
step. A moving input is first aligned: chip (i, j) must hold chunk i + j instead of
its own, one permute over both axes. A moving output starts as zero wherever its
chunk starts, collects a partial product at every chip that it passes, and goes
home at the end by the inverse alignment. No chip ever holds more than two shards
of a matrix. (Cannon 1969; MeshSlice, ISCA 2025, section 2.3.)
"""

import jax

from meshslice_jax import collectives
from meshslice_jax.algorithms.base import (
    Algorithm,
    Job,
    local_product,
    memory,
    only_one_slice,
    shard_bytes,
    split_movers,
    transfers,
)
from meshslice_jax.dataflow import Mover
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule, Step, Transfer, sequence


def kernel(lhs: jax.Array, rhs: jax.Array, job: Job) -> jax.Array:
    """One chip's part; see the module's text."""
    operands = {"lhs": lhs, "rhs": rhs}
    out, ring = job.output(), job.row.size
    for mover in job.inputs():
        axis, other = _axes(mover, job)
        with jax.named_scope("skew"):
            operands[mover.role] = collectives.skew(operands[mover.role], axis, other, by=-1)
    total = None
    for step in range(ring):
        with jax.named_scope(f"step{step}"):
            partial = job.dot(**operands)
            total = partial if total is None else _arrived(total, out, job) + partial
            if step + 1 < ring:
                for mover in job.inputs():
                    operands[mover.role] = _shift(operands[mover.role], mover, job)
                if out is not None:
                    total = _shift(total.astype(job.wire_dtype), out, job)
    if out is None:
        return total.astype(job.out_dtype)
    # Chunk t was finished at coordinate t - other + 1 of its axis: send it home.
    axis, other = _axes(out, job)
    with jax.named_scope("skew"):
        home = collectives.skew(total.astype(job.out_dtype), axis, other, by=1, offset=-1)
    return home


def _arrived(total: jax.Array, out: Mover | None, job: Job) -> jax.Array:
    return total if out is None else total.astype(job.accum_dtype)


def _axes(mover: Mover, job: Job):
    """The axis along which a matrix moves, and the other one."""
    return job.axis(mover.axis), job.axis("row" if mover.axis == "col" else "col")


def _shift(x: jax.Array, mover: Mover, job: Job) -> jax.Array:
    with jax.named_scope("shift"):
        return collectives.shift(x, job.axis(mover.axis), by=-1)


def faults(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> list[str]:
    """A mesh that is not square, or slices."""
    found = only_one_slice(problem, plan, shape)
    if shape.rows != shape.cols:
        found.append(
            f"cannon needs a square mesh: axis {plan.row_axis!r} has size {shape.rows}, "
            f"axis {plan.col_axis!r} has size {shape.cols}"
        )
    return found


def schedule(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> Schedule:
    """Skews, then P products with a shift of each moving matrix between them."""
    ring = shape.rows
    inputs, output = split_movers(plan)

    def send(mover: Mover, hops: int, home: bool = False) -> Transfer | None:
        if ring == 1:
            return None
        size = shard_bytes(problem, plan, mover.role, shape)
        if home:
            size = problem.bytes("out") // shape.num_chips
        return Transfer(
            kind="permute",
            role=mover.role,
            axis=mover.axis,
            ring=ring,
            bytes=size,
            hops=hops,
            directions=1,
        )

    far = ring // 2
    skews = transfers(*(send(mover, far) for mover in inputs))
    shifts = transfers(*(send(mover, 1) for mover in plan.contraction.movers))
    product = local_product(problem, plan, shape, ring)
    return Schedule(
        steps=sequence(
            (Step(transfers=skews), 1),
            (Step(transfers=shifts, product=product), ring - 1),
            (Step(product=product), 1),
            (Step(transfers=transfers(output and send(output, far, home=True))), 1),
        ),
        **memory(
            problem,
            plan,
            shape,
            gathered={mover.role: min(ring, 2) for mover in inputs} if ring > 1 else {},
            partial=product,
            buffers=min(ring, 2),
        ),
    )


CANNON = Algorithm(
    name="cannon",
    summary="skew once, then shift both moving matrices (square meshes)",
    kernel=kernel,
    faults=faults,
    schedule=schedule,
)
