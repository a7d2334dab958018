"""1D tensor parallelism with sequence-parallel activations, on one ring.

A 1D baseline. All chips form one ring; rhs (the weight) stays put and m is
streamed, which is RS on a mesh flattened to 1 x P or P x 1:

    split="column"   rhs sharded over n; lhs, sharded over m, is gathered
    split="row"      rhs sharded over k; out is reduce-scattered over m

Both are overlapped as a ring. The backward products are the other rows of the
table. (Shoeybi et al. 2019; Korthikanti et al. 2022; MeshSlice, ISCA 2025,
section 2.2.)
"""

import jax

from meshslice_jax.algorithms import ring
from meshslice_jax.algorithms.base import Algorithm, Job
from meshslice_jax.dataflow import Dataflow
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule


def _flatten(plan: GemmPlan) -> str:
    return "col" if plan.split == "column" else "row"


def kernel(lhs: jax.Array, rhs: jax.Array, job: Job) -> jax.Array:
    """One chip's part on the flattened ring."""
    return ring.kernel(lhs, rhs, job, _flatten(job.plan))


def faults(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> list[str]:
    """What the ring cannot do."""
    return ring.faults(problem, plan, TP1D.view(plan, shape), _flatten(plan))


def schedule(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> Schedule:
    """A ring of sends of the activations or their gradients."""
    return ring.schedule(problem, plan, TP1D.view(plan, shape), _flatten(plan))


TP1D = Algorithm(
    name="tp1d",
    summary="1D: gathers lhs (column) or reduce-scatters out (row) over m",
    kernel=kernel,
    faults=faults,
    schedule=schedule,
    flatten=_flatten,
    forward_dataflows=(Dataflow.RS,),
    options=("split", "ring_form", "scatter_group"),
)
