"""Per-device moves along one mesh axis, for use inside a shard_map.

An `Axis` is a direction of the mesh with its mesh axis names (several when the
1D algorithms flatten the mesh into one ring) and its size, so that everything
here is static. No move is ever traced over an axis of size 1.

    gather, reduce_scatter   the collectives
    exchange_sum             a reduce-scatter by other means, where `exchanges` says so
    all_to_all               every chip sends each other one its part
    shift                    every chip sends to a neighbour on the ring
    broadcast, reduce        a chain of neighbour sends from or to one chip
    skew                     Cannon's alignment, one permute over both axes
    take_slice, put_slices   the strided slices of the streamed dimension
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from meshslice_jax import compat


@dataclasses.dataclass(frozen=True)
class Axis:
    """One direction of the mesh: mesh axis names and their sizes, major first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of chips along the axis."""
        return math.prod(self.sizes)

    def index(self) -> jax.Array:
        """This chip's coordinate along the axis, an int32 scalar."""
        return lax.axis_index(self.names) if self.size > 1 else jnp.int32(0)


def gather(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """All-gathers shards along `axis`, concatenated over dimension `dim`."""
    if axis.size == 1:
        return x
    return lax.all_gather(x, axis.names, axis=dim, tiled=True)


def reduce_scatter(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """Sums over `axis` and leaves each chip its part of dimension `dim`."""
    if axis.size == 1:
        return x
    return lax.psum_scatter(x, axis.names, scatter_dimension=dim, tiled=True)


def exchanges(platform: str) -> bool:
    """Whether a reduce-scatter on a platform has to run as `exchange_sum`.

    Between processes XLA:CPU's goes through gloo, which now and then returns wrong values for
    megabytes, without an error (jax-ml/jax issue 40830).
    """
    return platform == "cpu" and compat.has_joined()


def exchange_sum(x: jax.Array, axis: Axis, dim: int, group: int, dtype) -> jax.Array:
    """What a reduce-scatter among every `group` neighbours gives, by an all-to-all and a sum.

    The bytes are the same. The sum, in `dtype`, is an explicit tree: cheaper on TPUs than a
    reduction over a new leading dimension.
    """
    if group == 1:
        return x.astype(dtype)
    received = all_to_all(x, axis, dim, group)
    parts = lax.split(received, [received.shape[dim] // group] * group, dim)
    parts = [part.astype(dtype) for part in parts]
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(parts) // 2 * 2 :]
    return parts[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_exchanged(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """`gather`, whose transpose is `exchange_sum` in float32 instead of a reduce-scatter."""
    return gather(x, axis, dim)


def _gather_forward(x: jax.Array, axis: Axis, dim: int):
    return gather(x, axis, dim), None


def _gather_backward(axis: Axis, dim: int, _, ct: jax.Array):
    return (exchange_sum(ct, axis, dim, axis.size, jnp.float32).astype(ct.dtype),)


gather_exchanged.defvjp(_gather_forward, _gather_backward)


def all_to_all(x: jax.Array, axis: Axis, dim: int, group: int) -> jax.Array:
    """Exchanges parts of dimension `dim` among every `group` neighbours along `axis`.

    Part i goes to the i-th chip of the group; what arrives is in the order of its senders.
    """
    groups = None
    if group < axis.size:
        groups = tuple(tuple(range(first, first + group)) for first in range(0, axis.size, group))
    return lax.all_to_all(x, axis.names, dim, dim, axis_index_groups=groups, tiled=True)


def tie(x: jax.Array, *after: jax.Array) -> jax.Array:
    """`x` to the last bit, but not before all of `after` are there.

    One element of `x` is selected by comparisons with one of each that no value passes, a NaN
    neither, and that the compiler does not see through. An `optimization_barrier` says the
    same, but XLA:CPU drops it before it orders anything.
    """
    never = jnp.zeros((), bool)
    # The newest comes first: what ties have in common would be computed once, and early, and
    # then nothing of the older ones would have to be there any more.
    for other in after:
        value = lax.slice(other, (0,) * other.ndim, (1,) * other.ndim).reshape(())
        one = jnp.ones((), other.dtype)
        never |= (value < one) & (value > one)
    first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)
    chosen = jnp.where(never, jnp.zeros_like(first), first)
    return lax.dynamic_update_slice(x, chosen, (0,) * x.ndim)


def shift(x: jax.Array, axis: Axis, by: int, stride: int = 1) -> jax.Array:
    """Sends `x` to the chip `by` strides further along the ring."""
    if axis.size == 1:
        return x
    pairs = tuple((i, (i + by * stride) % axis.size) for i in range(axis.size))
    return _permute(x, axis, pairs)


def _permute(x: jax.Array, axis: Axis, pairs: tuple[tuple[int, int], ...]) -> jax.Array:
    """`lax.ppermute` with chips numbered along `axis` as given.

    Over several mesh axes ppermute numbers chips in the mesh's own order, whatever
    the order of the names (jax 0.10 silently, later versions refuse).
    """
    order = [n for n in jax.sharding.get_abstract_mesh().axis_names if n in axis.names]
    sizes = dict(zip(axis.names, axis.sizes, strict=True))

    def number(index: int) -> int:
        place = {}
        for name in reversed(axis.names):
            index, place[name] = divmod(index, sizes[name])
        for name in order:
            index = index * sizes[name] + place[name]
        return index

    renumbered = tuple((number(source), number(target)) for source, target in pairs)
    return lax.ppermute(x, tuple(order), renumbered)


def skew(x: jax.Array, axis: Axis, other: Axis, by: int, offset: int = 0) -> jax.Array:
    """Sends along `axis` by `by` times the chip's coordinate on `other`, plus `offset`.

    One permute over both axes at once, each chip sends its shard once.
    """
    if axis.size == 1 or other.size == 1:
        return x
    pairs = []
    for i in range(other.size):
        for j in range(axis.size):
            pairs.append((i * axis.size + j, i * axis.size + (j + by * i + offset) % axis.size))
    both = Axis(other.names + axis.names, other.sizes + axis.sizes)
    return _permute(x, both, tuple(pairs))


def broadcast(x: jax.Array, axis: Axis, root: int, packets: int, dim: int) -> jax.Array:
    """Gives every chip of the ring the `x` of chip `root`.

    Both ring directions carry one half, each a chain of P-1 neighbour sends; each
    half goes in `packets` pieces, which follow each other along the chain.
    """
    if axis.size == 1:
        return x
    me, parts = axis.index(), []
    for part, by in _directed_packets(x, packets, dim):
        for hop in range(axis.size - 1):
            source = (root + by * hop) % axis.size
            target = (source + by) % axis.size
            received = _permute(part, axis, ((source, target),))
            part = jnp.where(me == target, received, part)
        parts.append(part)
    return lax.concatenate(parts, dim) if len(parts) > 1 else parts[0]


def reduce(x: jax.Array, axis: Axis, root: int, packets: int, dim: int, wire_dtype) -> jax.Array:
    """Sums `x` over the ring into chip `root`; other chips end with partial sums.

    The mirror image of `broadcast`; what travels is rounded to `wire_dtype`.
    """
    if axis.size == 1:
        return x
    parts = []
    for part, by in _directed_packets(x, packets, dim):
        for hop in range(1, axis.size):
            source = (root + by * hop) % axis.size
            target = (source + by) % axis.size
            sent = part.astype(wire_dtype)
            part = part + _permute(sent, axis, ((source, target),)).astype(x.dtype)
        parts.append(part)
    return lax.concatenate(parts, dim) if len(parts) > 1 else parts[0]


def halves(extent: int) -> tuple[int, ...]:
    """The sizes of the parts that go each way round a ring: two, or one of size 1."""
    return (extent - extent // 2, extent // 2) if extent > 1 else (extent,)


def _directed_packets(x: jax.Array, packets: int, dim: int):
    """Pieces of `x` along `dim` and the ring direction in which each goes."""
    start = 0
    for by, half in zip((1, -1), halves(x.shape[dim]), strict=False):
        for _ in range(packets):
            stop = start + half // packets
            yield lax.slice_in_dim(x, start, stop, axis=dim), by
            start = stop


def take_slice(
    x: jax.Array,
    dim: int,
    slice_count: int,
    block_size: int,
    slice_index: int | jax.Array,
    width: int = 1,
) -> jax.Array:
    """Every `slice_count`-th block of `block_size` indices, from block `slice_index` on.

    With a `width` above 1 it is that many neighbouring slices in one; then, and only then,
    the index has to be static.
    (MeshSlice, ISCA 2025, section 3.1: strided blocks, so that gathered slices of
    both operands hold the same global indices whatever the mesh shape.)
    """
    if slice_count == width:
        return x
    extent = x.shape[dim]
    blocks = extent // (slice_count * block_size)
    split = x.shape[:dim] + (blocks, slice_count, block_size) + x.shape[dim + 1 :]
    merged = x.shape[:dim] + (extent // slice_count * width,) + x.shape[dim + 1 :]
    if isinstance(slice_index, int):
        stop = slice_index + width
        picked = lax.slice_in_dim(x.reshape(split), slice_index, stop, axis=dim + 1)
    else:
        # (A dynamic slice of width 1 loses axes on which it varies, under vmap in a loop.)
        picked = lax.dynamic_index_in_dim(x.reshape(split), slice_index, dim + 1, keepdims=False)
    return picked.reshape(merged)


def put_slices(
    slices: list[jax.Array], dim: int, block_size: int, widths: tuple[int, ...]
) -> jax.Array:
    """The inverse of `take_slice` over all slices: interleaves their blocks."""
    if len(slices) == 1:
        return slices[0]
    if slices[0].shape[dim] == widths[0] * block_size:  # one block each: nothing to interleave
        return lax.concatenate(slices, dim)
    parts = []
    for x, width in zip(slices, widths, strict=True):
        blocks = x.shape[dim] // (width * block_size)
        parts.append(x.reshape(x.shape[:dim] + (blocks, width, block_size) + x.shape[dim + 1 :]))
    whole = slices[0].shape[:dim] + (sum(x.shape[dim] for x in slices),)
    return lax.concatenate(parts, dim + 1).reshape(whole + slices[0].shape[dim + 1 :])
