"""Moving an activation from one placement to another, between layers.

A layer's output has m along its plan's row axis and n along its col axis; the next layer
wants its lhs as its own dataflow and twin say. Where the two differ, the activation is laid
out anew in the forward pass, and its gradient back again in the backward pass.

A placement names the mesh axes of each dimension, major axis first. An axis moves if it
lies in another dimension afterwards, or behind other axes of the same dimension; each axis
that moves costs one all-to-all of the local shard along it. On a ring of P chips that takes
a quarter of the time in which the P shards could be gathered: the mean distance is a
quarter of the ring instead of all of it, and both directions are used (JAX scaling book,
chapter 3). A line has half the rate.
"""

from meshslice_jax import algorithms
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan

#: Mesh axes of each of two dimensions.
Placement = tuple[tuple[str, ...], tuple[str, ...]]


def placement(plan: GemmPlan, role: str, mesh_shape: MeshShape) -> Placement:
    """Where the dimensions of `role` lie on a mesh with axes "row" and "col".

    Axes of size 1 are left out: lying along them or not is the same.
    """
    names = algorithms.axis_names(plan)
    first, second = (
        tuple(name for name in names[axis] if mesh_shape.size(name) > 1)
        for axis in plan.contraction.placement(role)
    )
    return first, second


def relayout_s(
    bytes_: int, source: Placement, target: Placement, mesh_shape: MeshShape, hardware: HardwareSpec
) -> float:
    """Seconds of one relayout.

    Args:
      bytes_: the whole matrix.
      source: where it lies.
      target: where it is wanted.
      mesh_shape: sizes of "row" and "col".
      hardware: rates and latencies.
    """
    before, after = _places(source), _places(target)
    moved = sorted(axis for axis in before | after if before.get(axis) != after.get(axis))
    shard_bytes = bytes_ / mesh_shape.num_chips
    return sum(_all_to_all_s(shard_bytes, mesh_shape.size(axis), hardware) for axis in moved)


def _places(placement: Placement) -> dict[str, tuple[int, tuple[str, ...]]]:
    """For each axis, its dimension and the axes before it there."""
    return {
        axis: (dim, axes[:index])
        for dim, axes in enumerate(placement)
        for index, axis in enumerate(axes)
    }


def _all_to_all_s(shard_bytes: float, ring: int, hardware: HardwareSpec) -> float:
    hops = ring // 2 if hardware.is_ring(ring) else ring - 1
    rate = hardware.axis_bytes_per_s(ring, overlapped=False)
    return hardware.gather_launch_s + hops * hardware.gather_hop_s + shard_bytes * ring / (4 * rate)
