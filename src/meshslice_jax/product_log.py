"""What became of the products of a model, told while it is traced.

A product that is injected into somebody else's layer knows its shapes but not its layer,
and whoever asks what ran (`nn.explain`) does not hold the product. Both meet here:

    with recording() as log:                     # explain
        with layer("decoder/0/query"):           # whoever calls the layer
            record(Product(...))                 # the product itself

Nothing is global: log and layer are a context of the current thread, and part of the key
of JAX's tracing caches, so that a function which was traced before is traced again under a
new log. Without a log nothing is recorded and no cache is missed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, Mesh

from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import LayerPlan
from meshslice_jax.problem import GemmProblem

#: Named scope of the dense products that are recorded.
DENSE = "dense_product"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One product that was traced, and what became of it.

    Attributes:
      layer: the layer's path, or "" where nobody named one.
      lhs_shape: global shape of lhs as it was passed.
      rhs_shape: global shape of rhs.
      out_shape: global shape of the result.
      rhs_contracted: the dimensions of rhs over which it sums.
      weight: which parameter of the layer rhs is, and the parameter's dimension for each
        dimension of rhs.
      problem: the product as it runs, padded, over all replicas; None if it is not one
        matrix product.
      plan: the plan on which it runs; None where it runs as `lax.dot_general`.
      mesh_shape: sizes of the plan's row and col axis; None without a plan.
      mesh: the mesh of the plan, as given or in context; None without a plan.
      replicas: data-parallel replicas that share m.
      trimmed: extents (m, n, k) before padding, if it was padded.
      reason: why it does not run on a plan; None where it does.
      chosen: whether somebody asked for the dense product (a rule), so that it is no
        fallback.
    """

    layer: str = ""
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    rhs_contracted: tuple[int, ...] = ()
    weight: tuple[str, tuple[int, ...]] | None = None
    problem: GemmProblem | None = None
    plan: LayerPlan | None = None
    mesh_shape: MeshShape | None = None
    mesh: Mesh | AbstractMesh | None = None
    replicas: int = 1
    trimmed: tuple[int, int, int] | None = None
    reason: str | None = None
    chosen: bool = False

    @property
    def path(self) -> str:
        """The layer's path, and the parameter's name in it where that is no kernel."""
        name = self.weight[0] if self.weight else "kernel"
        return self.layer if name == "kernel" else "/".join(filter(None, (self.layer, name)))


class _Log:
    """Products, and who assigned them; compared by identity, as a key of caches."""

    def __init__(self, assignments: list):
        self.products: list[Product] = []
        self.assignments = assignments


#: (log, layer, weight) while somebody records, else None.
_current = jax.make_user_context(None)


@contextlib.contextmanager
def recording(assignments: list | None = None) -> Iterator[list[Product]]:
    """Collects the products that are traced inside, in order; yields the list.

    Args:
      assignments: a list to which `assigned` adds.
    """
    log = _Log([] if assignments is None else assignments)
    with _current((log, "", None)):
        yield log.products


@contextlib.contextmanager
def layer(path: str, weight: tuple[str, tuple[int, ...]] | None = None) -> Iterator[None]:
    """Names the layer of the products traced inside, and of the errors that they raise.

    Args:
      path: the layer's path.
      weight: the parameter of the layer that is rhs; see `Product`.
    """
    found = _current.value
    try:
        with contextlib.nullcontext() if found is None else _current((found[0], path, weight)):
            yield
    except (ValueError, NotImplementedError) as error:
        note = f"in layer {path!r}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def assigned(assignment) -> None:
    """Tells the log in context, if there is one, what decides on the layers traced now."""
    if _current.value is not None and assignment not in _current.value[0].assignments:
        _current.value[0].assignments.append(assignment)


def is_recording() -> bool:
    """Whether there is a log in context."""
    return _current.value is not None


def record(product: Product) -> None:
    """Adds a product to the log in context, if there is one."""
    if _current.value is not None:
        log, path, weight = _current.value
        log.products.append(
            dataclasses.replace(
                product, layer=product.layer or path, weight=product.weight or weight
            )
        )
