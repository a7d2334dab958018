"""Arrays of any rank as matrices, and back, without losing their placement.

`as_matrix` moves the dimensions of an operand into two groups, flattens each into one
index and pads it; `from_matrix` trims a result and unfolds its two indices. On Auto axes
XLA follows the placement through both by itself. On Explicit axes the type says it, so it
is computed here:

    flattening      (b over row, s, h over col) -> (b s over row, h over col): the axes of a
                    group, in order
    unfolding       (b s over row, ...) -> (b over row, s, ...): each dimension takes, in
                    order, the axes that divide it; b = 1 leaves them to s, and an axis
                    that no dimension can take is dropped (the result is the same along it)
    padding         an index that is padded or trimmed is first freed of its axes: an
                    uneven extent cannot be typed on them
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from meshslice_jax.site import Site, axes_in, spec_entry

Groups = tuple[tuple[int, ...], tuple[int, ...]]


def as_matrix(x: jax.Array, groups: Groups, extents: tuple[int, int], site: Site) -> jax.Array:
    """`x` as a matrix whose two indices run over two groups of its dimensions.

    Args:
      x: an array; the groups hold all its dimensions.
      groups: dimensions of the first index and of the second, major first.
      extents: the matrix's extents, at least as large as the groups'; the rest is zeros.
      site: where the product runs.
    """
    order = (*groups[0], *groups[1])
    if order != tuple(range(x.ndim)):
        x = lax.transpose(x, order)
    sizes = (x.shape[: len(groups[0])], x.shape[len(groups[0]) :])
    flat = tuple(math.prod(group) for group in sizes)
    typed = site.explicit and AxisType.Explicit in _types(x)
    if typed:
        own = jax.typeof(x).sharding.spec
        halves = (own[: len(groups[0])], own[len(groups[0]) :])
        entries = [
            spec_entry(sum((axes_in(entry) for entry in half), ())) if size == wanted else None
            for half, size, wanted in zip(halves, flat, extents, strict=True)
        ]
    if x.ndim != 2:
        x = lax.reshape(x, flat, out_sharding=_named(site, entries) if typed else None)
    elif typed and flat != extents:
        x = site.reshard(x, PartitionSpec(*entries))
    if flat == extents:
        return x
    return jnp.pad(x, [(0, wanted - size) for size, wanted in zip(flat, extents, strict=True)])


def from_matrix(
    x: jax.Array, sizes: tuple[tuple[int, ...], tuple[int, ...]], site: Site
) -> jax.Array:
    """A matrix trimmed to the extents of two groups of dimensions, and unfolded into them."""
    flat = tuple(math.prod(group) for group in sizes)
    shape = (*sizes[0], *sizes[1])
    typed = bool(site.explicit)
    entries = tuple(jax.typeof(x).sharding.spec) if typed else (None, None)
    if x.shape != flat:
        entries = tuple(
            entry if size == wanted else None
            for entry, size, wanted in zip(entries, x.shape, flat, strict=True)
        )
        x = site.reshard(x, PartitionSpec(*entries)) if typed else x
        x = lax.slice(x, (0, 0), flat)
    if x.shape == shape:
        return x
    if not typed:
        return lax.reshape(x, shape)
    spec = [
        entry
        for group, names in zip(sizes, entries, strict=True)
        for entry in unfolded(group, axes_in(names), dict(site.sizes))
    ]
    return lax.reshape(x, shape, out_sharding=_named(site, spec))


def unfolded(group: tuple[int, ...], names: tuple[str, ...], axis_sizes: dict[str, int]) -> list:
    """The entries of a group of dimensions whose flat index lay over the axes `names`."""
    entries, left = [], list(names)
    for size in group:
        taken = []
        while left and size % axis_sizes[left[0]] == 0:
            size //= axis_sizes[left[0]]
            taken.append(left.pop(0))
        entries.append(spec_entry(tuple(taken)))
        if size > 1:
            left = []  # the next dimension varies faster than what is left of this one
    return entries


def _named(site: Site, entries) -> jax.sharding.NamedSharding | PartitionSpec:
    spec = PartitionSpec(*entries)
    if site.entered is None:
        return spec
    return jax.sharding.NamedSharding(site.entered.abstract_mesh, spec)


def _types(x: jax.Array) -> tuple[AxisType, ...]:
    mesh = jax.typeof(x).sharding.mesh
    return () if mesh.empty else mesh.axis_types
