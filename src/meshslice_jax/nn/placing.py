"""Where the parameters of a model lie, so that its products move nothing but what they plan.

A kernel is rhs[k, n] of its layer's product, with k and n unfolded into the kernel's own
dimensions ((hidden, heads, head_dim) has n = heads head_dim), perhaps transposed, perhaps
stacked over the layers of a scan. The plan says over which mesh axes k and n lie; each
dimension takes, in order, the axes that divide it. Everything that is no kernel of a
planned product (biases, norms, embeddings) is replicated.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshslice_jax import gemm
from meshslice_jax.flatten import unfolded
from meshslice_jax.plan import LayerPlan
from meshslice_jax.product_log import Product
from meshslice_jax.site import axes_in


def kernel_spec(
    plan: LayerPlan, shape: tuple[int, ...], contracted: tuple[int, ...], axis_sizes: dict
) -> PartitionSpec:
    """The placement of rhs as an array of any rank.

    Args:
      plan: the layer's plan.
      shape: rhs's global shape.
      contracted: its dimensions that make up k, major first.
      axis_sizes: sizes of the mesh axes.
    """
    _, spec, _ = gemm.placements(plan)
    free = tuple(d for d in range(len(shape)) if d not in contracted)
    entries: list = [None] * len(shape)
    for dims, names in ((contracted, spec[0]), (free, spec[1])):
        found = unfolded(tuple(shape[d] for d in dims), axes_in(names), axis_sizes)
        for d, entry in zip(dims, found, strict=True):
            entries[d] = entry
    return PartitionSpec(*entries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A parameter that is rhs of a planned product.

    Attributes:
      path: names from the root of the parameter tree.
      shape: its shape in its layer; in the tree it may have further leading dimensions.
      spec: its placement in its layer.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    spec: PartitionSpec

    def spec_in_tree(self, shape: tuple[int, ...]) -> PartitionSpec | None:
        """The placement of the leaf, which may be stacked along one dimension or more."""
        extra = len(shape) - len(self.shape)
        for start in range(extra + 1) if extra >= 0 else ():
            # All stacked dimensions stand together; those of nn.scan's default stand first.
            where = [*range(extra)] if start == 0 else [*range(start, start + extra)]
            rest = [size for d, size in enumerate(shape) if d not in where]
            if tuple(rest) == self.shape:
                entries = iter(self.spec)
                return PartitionSpec(
                    *(None if d in where else next(entries) for d in range(len(shape)))
                )
        return None


def kernels(products: Iterable[Product], mesh: Mesh | AbstractMesh) -> tuple[Kernel, ...]:
    """The kernels of the planned products of a trace."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    found = {}
    for product in products:
        if product.plan is None:
            continue
        spec = kernel_spec(product.plan, product.rhs_shape, product.rhs_contracted, sizes)
        name, dims = product.weight or ("kernel", tuple(range(len(product.rhs_shape))))
        shape, entries = [0] * len(dims), [None] * len(dims)
        for rhs_dim, own_dim in enumerate(dims):
            shape[own_dim], entries[own_dim] = product.rhs_shape[rhs_dim], spec[rhs_dim]
        path = (*filter(None, product.layer.split("/")), *name.split("/"))
        found.setdefault(path, Kernel(path=path, shape=tuple(shape), spec=PartitionSpec(*entries)))
    return tuple(found.values())


def fallback_kernels(products: Iterable[Product]) -> Iterator[Kernel]:
    """The parameters of products without a plan; nothing says how to cut them."""
    for product in products:
        name = product.weight[0] if product.weight else "kernel"
        path = (*filter(None, product.layer.split("/")), name)
        yield Kernel(path=path, shape=product.rhs_shape, spec=PartitionSpec())


@dataclasses.dataclass(frozen=True)
class Shardings:
    """From a tree of parameters to the tree of their shardings.

    Any tree will do that has the parameters' names at the end of its paths: parameters,
    `{"params": ...}`, gradients, the moments of an optimiser. Leaves that are no kernel of
    a planned product are replicated.
    """

    mesh: Mesh | AbstractMesh
    kernels: tuple[Kernel, ...]

    def __call__(self, tree: Any) -> Any:
        """The NamedSharding of every leaf."""
        return jax.tree_util.tree_map_with_path(self._of, tree)

    def _of(self, keys: tuple, leaf: Any) -> NamedSharding:
        path = names(keys)
        found = self.kernel(path)
        if found is None and "params" not in path:  # the moments of an optimiser
            ends = [k for k in self.kernels if path[-len(k.path) :] == k.path]
            found = max(ends, key=lambda kernel: len(kernel.path), default=None)
        spec = found and found.spec_in_tree(tuple(leaf.shape))
        return NamedSharding(self.mesh, spec or PartitionSpec())

    def kernel(self, path: tuple[str, ...]) -> Kernel | None:
        """The kernel at a path in a tree of parameters, or in `{"params": ...}`."""
        below = path[path.index("params") + 1 :] if "params" in path else path
        for kernel in self.kernels:
            # A module that is a layer itself goes by its name; its parameters are the roots.
            if kernel.path == below or (len(below) == 1 and kernel.path[1:] == below):
                return kernel
        return None


def names(keys: tuple) -> tuple[str, ...]:
    """The names in the path of a leaf; boxes of Flax's metadata have none."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", ""))) for key in keys if _named(key))


def _named(key: Any) -> bool:
    return hasattr(key, "key") or hasattr(key, "idx")


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is an array that can be put somewhere."""
    return isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, jax.core.Tracer)


def size_bytes(leaf: Any) -> int:
    """Bytes of a whole array."""
    return math.prod(leaf.shape) * jax.numpy.dtype(leaf.dtype).itemsize
