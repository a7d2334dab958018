"""Where the chips of a mesh stand on the physical torus.

A mesh axis takes one dimension of the torus, or several, row-major: 32 rows of a 32x8 mesh on
4x8x8 are its first two dimensions. So neighbours along an axis of one dimension are physical
neighbours, and an axis of two has two levels: groups of 8 neighbours along one dimension, and
rings of 4 between chips of the same place in their groups along the other. The compiler's
choices and estimates do not depend on the order of the devices; where traffic goes, in the
replay, does.
"""

import dataclasses
import itertools
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
    """Places of the chips of a mesh, in the mesh's order.

    Attributes:
      names: of the dimensions, after the mesh axis that they belong to.
      sizes: of the dimensions.
      places: coordinates of each chip.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    def spanned(self, chips: tuple[int, ...]) -> tuple[int, ...]:
        """The dimensions along which some chips differ."""
        found = [self.places[chip] for chip in chips]
        return tuple(d for d in range(len(self.sizes)) if len({place[d] for place in found}) > 1)


def flat(shape: tuple[int, int]) -> Layout:
    """A mesh whose axes are the dimensions of its torus."""
    return Layout(("row", "col"), tuple(shape), tuple(np.ndindex(*shape)))


def lay_out(dims: tuple[int, ...], shape: tuple[int, int]) -> Layout:
    """Lays a mesh on a torus.

    Args:
      dims: sizes of the torus.
      shape: (rows, cols); each is one dimension of the torus or a product of several.

    Returns:
      Coordinates are those of the torus, all its dimensions.

    Raises:
      ValueError: no choice of dimensions makes up this mesh.
    """
    rows, cols = shape
    for count in range(len(dims) + 1):
        for chosen in itertools.combinations(range(len(dims)), count):
            rest = tuple(d for d in range(len(dims)) if d not in chosen)
            sizes = [tuple(dims[d] for d in part) for part in (chosen, rest)]
            if (math.prod(sizes[0]), math.prod(sizes[1])) != (rows, cols):
                continue
            order = np.argsort(chosen + rest)
            names = np.array([*_names("row", sizes[0]), *_names("col", sizes[1])])[order]
            places = (np.array(place)[order] for place in np.ndindex(*sizes[0], *sizes[1]))
            return Layout(
                names=tuple(map(str, names)),
                sizes=tuple(dims),
                places=tuple(tuple(int(i) for i in place) for place in places),
            )
    fitting = sorted({s for s in _mesh_shapes(dims) if 1 not in s} or _mesh_shapes(dims))
    raise ValueError(
        f"a {rows}x{cols} mesh does not lie on a {'x'.join(map(str, dims))} torus: each mesh "
        "axis must be one of its dimensions or a product of several; what fits: "
        + ", ".join(f"{r}x{c}" for r, c in fitting)
    )


def _names(axis: str, sizes: tuple[int, ...]) -> list[str]:
    """Names of an axis's dimensions: the axis, numbered if several are longer than 1."""
    several = sum(size > 1 for size in sizes) > 1
    return [f"{axis}{number}" if several else axis for number in range(len(sizes))]


def _mesh_shapes(dims: tuple[int, ...]) -> set[tuple[int, int]]:
    parts = itertools.chain.from_iterable(
        itertools.combinations(dims, count) for count in range(len(dims) + 1)
    )
    return {(math.prod(part), math.prod(dims) // math.prod(part)) for part in parts}
