"""Wang: one direction's collective becomes a ring that overlaps, the other blocks.

`plan.ring` names the mesh axis whose collective is decomposed; see `ring`. XLA does
the same to a GSPMD einsum (collective matmul, windowed einsum).
(Wang et al., ASPLOS 2023; MeshSlice, ISCA 2025, section 2.3.)
"""

import jax

from meshslice_jax.algorithms import ring
from meshslice_jax.algorithms.base import Algorithm, Job
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule


def kernel(lhs: jax.Array, rhs: jax.Array, job: Job) -> jax.Array:
    """One chip's part: the mover along `plan.ring` is ringed."""
    return ring.kernel(lhs, rhs, job, job.plan.ring)


def faults(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> list[str]:
    """What the ring cannot do."""
    return ring.faults(problem, plan, shape, plan.ring)


def schedule(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> Schedule:
    """One blocking collective and one ring of sends."""
    return ring.schedule(problem, plan, shape, plan.ring)


WANG = Algorithm(
    name="wang",
    summary="one collective cut into an overlapped ring, the other blocking",
    kernel=kernel,
    faults=faults,
    schedule=schedule,
    options=("ring", "ring_form", "scatter_group"),
)
