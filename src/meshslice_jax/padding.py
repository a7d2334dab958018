"""The smallest extents that a plan cuts evenly: how far a product has to be padded.

A plan asks only for divisibility: mesh axes divide the extents of the placed matrices, and
slices, blocks, rings and packets divide what a chip holds of them. So for each of m, n and
k the legal extents are the multiples of some number, and that number divides one that is
known to do: chips x slices x blocks x packets (times a little, for slices that differ in
width) over the three passes of the layer. Its divisors are tried, and the smallest multiple
that fits is taken, whatever the algorithm.
"""

import dataclasses
import functools
import math

from meshslice_jax import algorithms
from meshslice_jax.mesh import MeshShape, divisors
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.problem import GemmProblem


@functools.lru_cache(maxsize=4096)
def padded_extents(
    plan: LayerPlan, m: int, n: int, k: int, mesh_shape: MeshShape, replicas: int = 1
) -> tuple[int, int, int]:
    """The smallest (m, n, k) that are no smaller than these and run as planned.

    Args:
      plan: the layer's plan.
      m: global extent of lhs and out, over all replicas.
      n: global extent of rhs and out.
      k: global extent of lhs and rhs.
      mesh_shape: sizes of the plan's row and col axis.
      replicas: data-parallel replicas that share m.

    Raises:
      ValueError: no extents run as planned on this mesh (Cannon's on one that is not
        square); the message is that of `check`.
    """
    algorithms.check_plan(plan)
    enough = _enough(plan, mesh_shape)
    safe = GemmProblem(m=enough, n=enough, k=enough)
    if not _fits(plan, safe, mesh_shape):
        algorithms.check_problem(plan, GemmProblem(m=-(-m // replicas), n=n, k=k), mesh_shape)
        algorithms.check_problem(plan, safe, mesh_shape)
    found = []
    for label, extent, parts in (("m", m, replicas), ("n", n, 1), ("k", k, 1)):
        shares = sorted({-(-extent // (q * parts)) * q for q in divisors(enough)})
        found.append(
            next(
                share * parts
                for share in shares
                if _fits(plan, dataclasses.replace(safe, **{label: share}), mesh_shape)
            )
        )
    return tuple(found)


def _fits(plan: LayerPlan, problem: GemmProblem, shape: MeshShape) -> bool:
    parts = algorithms.layer_problems(problem, plan.forward)
    return all(algorithms.fits(part, getattr(plan, name), shape) for name, part in parts.items())


def _enough(plan: LayerPlan, shape: MeshShape) -> int:
    """An extent that fits as m, n and k wherever any does."""
    passes = (plan.forward, plan.grad_lhs, plan.grad_rhs)
    return math.lcm(*(_enough_of(part, shape) for part in passes))


def _enough_of(part: GemmPlan, shape: MeshShape) -> int:
    """The same for one pass: twice, for the two ring halves, and again for slices that differ."""
    once = 2 * shape.num_chips * part.slice_count * (part.block_size or 1) * part.packets
    for times in range(1, 2 * part.slice_count + 1):
        size = once * times
        if algorithms.fits(GemmProblem(m=size, n=size, k=size), part, shape):
            return size
    return once
