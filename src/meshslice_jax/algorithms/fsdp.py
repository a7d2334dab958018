"""FSDP: fully sharded data parallelism on the mesh flattened into one ring.

A 1D baseline. All chips form one ring along "row"; lhs and out are sharded over m
and never move, rhs (the weight) is sharded over its streamed index and gathered,
overlapped as a ring. In the table of dataflows that is OS, or LS with rhs stored
sharded over n, on a mesh of P x 1. Its backward products are the other rows of the
table: dlhs gathers rhs again, drhs is reduce-scattered (RS), which makes no sense
as a forward product. (Zhao et al. 2023; MeshSlice, ISCA 2025, section 2.2.)
"""

import jax

from meshslice_jax.algorithms import ring
from meshslice_jax.algorithms.base import Algorithm, Job
from meshslice_jax.dataflow import Dataflow
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule


def kernel(lhs: jax.Array, rhs: jax.Array, job: Job) -> jax.Array:
    """One chip's part on the flattened ring."""
    return ring.kernel(lhs, rhs, job, "row")


def faults(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> list[str]:
    """What the ring cannot do."""
    return ring.faults(problem, plan, MeshShape(shape.num_chips, 1), "row")


def schedule(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> Schedule:
    """A ring of sends of the weight or its gradient."""
    return ring.schedule(problem, plan, MeshShape(shape.num_chips, 1), "row")


FSDP = Algorithm(
    name="fsdp",
    summary="1D: gathers rhs on one ring over the whole mesh",
    kernel=kernel,
    faults=faults,
    schedule=schedule,
    options=("ring_form", "scatter_group"),
    flatten=lambda plan: "row",
    forward_dataflows=(Dataflow.OS, Dataflow.LS),
)
