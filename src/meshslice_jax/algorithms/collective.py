"""Collective: one gather or reduce-scatter per moving matrix, one product.

Every moving input is gathered whole along its axis, one product follows, and a
moving output is reduce-scattered. Nothing overlaps inside the product; it is what
a partitioner writes without further help. (MeshSlice, ISCA 2025, section 2.3.)
"""

import jax

from meshslice_jax.algorithms.base import (
    Algorithm,
    Job,
    collective,
    local_product,
    memory,
    only_one_slice,
    split_movers,
    transfers,
)
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule, Slice, pipelined


def kernel(lhs: jax.Array, rhs: jax.Array, job: Job) -> jax.Array:
    """One chip's part: gather, multiply, scatter."""
    operands = {"lhs": lhs, "rhs": rhs}
    for mover in job.inputs():
        operands[mover.role] = job.gather(operands[mover.role], mover)
    partial, out = job.dot(**operands), job.output()
    return partial.astype(job.out_dtype) if out is None else job.scatter(partial, out)


def schedule(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> Schedule:
    """Gathers, then the product, then the reduce-scatter."""
    inputs, output = split_movers(plan)
    product = local_product(problem, plan, shape)
    gathers = transfers(*(collective(problem, plan, mover, shape) for mover in inputs))
    scatter = transfers(output and collective(problem, plan, output, shape))
    return Schedule(
        steps=pipelined([Slice(ahead=gathers, behind=scatter, product=product)]),
        **memory(
            problem,
            plan,
            shape,
            gathered={mover.role: shape.size(mover.axis) for mover in inputs},
            partial=product,
            buffers=1,
        ),
    )


COLLECTIVE = Algorithm(
    name="collective",
    summary="whole gathers and reduce-scatters, one product",
    kernel=kernel,
    faults=only_one_slice,
    schedule=schedule,
    cuts=False,
)
