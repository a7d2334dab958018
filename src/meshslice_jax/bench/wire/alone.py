"""Compute without communication and communication without compute, of one or more passes.

Both are what the Collective algorithm does, in the storage order that kernels use: one
local product, and one gather or reduce-scatter for each matrix that moves. Every chip has
arrays of its own, stacked along the leading dimension of a global array.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshslice_jax import collectives
from meshslice_jax.collectives import Axis
from meshslice_jax.dataflow import Contraction, Mover
from meshslice_jax.mesh import MeshShape
from meshslice_jax.problem import GemmProblem

#: (what a chip does with its arrays, their shapes on one chip)
Piece = tuple[Callable[..., jax.Array], list[tuple[int, ...]]]


def compute_piece(problem: GemmProblem, contraction: Contraction, shape: MeshShape) -> Piece:
    """The whole local product of a pass."""
    inner = contraction.streamed_first()
    extents = inner.local_extents(problem, *shape)
    first, second, numbers = inner.dimension_numbers()

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return lax.dot_general(left, right, numbers)

    return product, [_local(inner, role, extents) for role in (first, second)]


def communication_pieces(
    problem: GemmProblem, contraction: Contraction, shape: MeshShape
) -> list[Piece]:
    """The moves of a pass, one for each matrix that moves."""
    inner = contraction.streamed_first()
    return [
        _move(problem, inner, mover, shape) for mover in inner.movers if shape.size(mover.axis) > 1
    ]


def _move(problem: GemmProblem, inner: Contraction, mover: Mover, shape: MeshShape) -> Piece:
    axis = Axis((mover.axis,), (shape.size(mover.axis),))
    extents = inner.local_extents(problem, *shape)
    if mover.is_input:
        extents[inner.streamed] //= axis.size

        def move(x: jax.Array) -> jax.Array:
            return collectives.gather(x, axis, mover.dim)
    else:

        def move(x: jax.Array) -> jax.Array:  # as kernels do between processes
            return collectives.exchange_sum(x, axis, mover.dim, axis.size, x.dtype)

    return move, [_local(inner, mover.role, extents)]


def _local(inner: Contraction, role: str, extents: dict[str, int]) -> tuple[int, ...]:
    return tuple(extents[label] for label in inner.indices(role))


def compiled(pieces: Sequence[Piece], mesh: Mesh) -> Callable[[], object]:
    """One program of several pieces, with its operands."""
    spec = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    operands = [
        [_ones((mesh.size, *local), sharding) for local in locals_] for _, locals_ in pieces
    ]

    def program(stacked):
        found = []
        for (function, _), arrays in zip(pieces, stacked, strict=True):
            found.append(function(*(x[0] for x in arrays))[None])
        return found

    mapped = jax.shard_map(program, mesh=mesh, in_specs=(spec,), out_specs=spec)
    runs = jax.jit(mapped).lower(operands).compile()
    return lambda: runs(operands)


def _ones(shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    local = np.ones((1, *shape[1:]), np.float32)
    return jax.make_array_from_callback(shape, sharding, lambda _: local)
