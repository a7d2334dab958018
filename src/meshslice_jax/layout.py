"""How a weight is stored: as it is, or so that every slice that moves is a buffer of its own.

MeshSlice takes strided slices out of the shard of a moving matrix, and a collective wants its
operand in one piece: each slice is copied first, and turned, if the streamed index is the
minor one. Activations come as they come. A weight can be kept as its slices are needed, in all
three products of a step, which stream the same index of it:

    natural    rhs[k, n]; slices are copied
    permuted   one array with the streamed index first; on each chip the slices lie one after
               the other
    sliced     one array a slice, with the streamed index first

    stored = ms.to_layout(weight, plan, mesh=mesh)     # a pytree, as jax.grad and optax like it
    out = ms.matmul(lhs, stored, plan, mesh=mesh)      # its gradient has the same form
    weight = ms.from_layout(stored)

Everything else stays natural: `placements`, a weight that is given to `matmul` as a plain array
(it is converted on the way, at the cost of the copies), its gradient, checkpoints.
"""

import dataclasses
import itertools

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from meshslice_jax import algorithms, collectives
from meshslice_jax.algorithms.meshslice import block_of, units
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan, LayerPlan, as_layer_plan
from meshslice_jax.site import Site, as_matrix, find_site, spec_entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """What a stored weight depends on.

    Attributes:
      layout: "permuted" or "sliced".
      shape: (k, n) of the weight.
      turned: whether the streamed index is n, so that it is stored transposed.
      chips: chips along the mesh axis over which the streamed index is sharded.
      block: consecutive indices of a unit.
      widths: of the slices, in units; see `algorithms.meshslice`.
    """

    layout: str
    shape: tuple[int, int]
    turned: bool
    chips: int
    block: int
    widths: tuple[int, ...]

    def parts(self, rhs: jax.Array) -> tuple[jax.Array, ...]:
        """The stored arrays of a weight [k, n], or of anything that is stored like it."""
        whole = rhs.T if self.turned else rhs
        extent, other = whole.shape
        shards, pieces = whole.reshape(self.chips, extent // self.chips, other), sum(self.widths)
        starts = itertools.accumulate(self.widths[:-1], initial=0)
        rows = [
            collectives.take_slice(shards, 1, pieces, self.block, start, width)
            for start, width in zip(starts, self.widths, strict=True)
        ]
        if self.layout == "permuted":
            rows = [lax.concatenate(rows, 1)]
        return tuple(x.reshape(x.shape[0] * x.shape[1], other) for x in rows)

    def whole(self, parts: tuple[jax.Array, ...]) -> jax.Array:
        """The inverse of `parts`."""
        extent, other = self.shape[self.turned], parts[0].shape[1]
        rows = [x.reshape(self.chips, x.shape[0] // self.chips, other) for x in parts]
        if self.layout == "permuted":
            unit = extent // self.chips // sum(self.widths)
            rows = lax.split(rows[0], [width * unit for width in self.widths], 1)
        shards = collectives.put_slices(rows, 1, self.block, self.widths)
        whole = shards.reshape(extent, other)
        return whole.T if self.turned else whole


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StoredRhs:
    """A weight in the layout of a plan, on a mesh shape: what `to_layout` makes.

    Attributes:
      parts: its arrays; one if "permuted", one a slice if "sliced".
      cut: how they were made.
    """

    parts: tuple[jax.Array, ...]
    cut: Cut = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(k, n), as if it were stored naturally."""
        return self.cut.shape

    @property
    def dtype(self):
        """The dtype of its elements."""
        return self.parts[0].dtype

    def __repr__(self) -> str:
        return f"StoredRhs(shape={self.shape}, dtype={self.dtype}, cut={self.cut})"


def cut_of(plan: GemmPlan, shape: tuple[int, int], mesh_shape: MeshShape) -> Cut:
    """How a weight is cut under a forward plan that fits it."""
    contraction = plan.contraction
    (mover,) = (mover for mover in contraction.movers if mover.role == "rhs")
    extent = shape[mover.dim]
    return Cut(
        layout=plan.rhs_layout,
        shape=tuple(shape),
        turned=mover.dim == 1,
        chips=mesh_shape.size(mover.axis),
        block=block_of(plan, extent, *mesh_shape),
        widths=units(plan)[1],
    )


def as_parts(rhs, plan: GemmPlan, site: Site):
    """A weight as a product takes it: the arrays of the plan's layout, or the weight itself.

    Args:
      rhs: [k, n], or what `to_layout` made of it.
      plan: the forward plan, which fits it.
      site: where the product runs.

    Raises:
      ValueError: it is stored for another plan or mesh.
    """
    if plan.rhs_layout == "natural":
        if isinstance(rhs, StoredRhs):
            raise ValueError(
                f"rhs is stored {rhs.cut.layout!r}, but the plan has rhs_layout='natural'; pass "
                "ms.from_layout(rhs), or the plan that it was stored for"
            )
        return rhs
    cut = cut_of(plan, rhs.shape, site.shape(plan))
    if not isinstance(rhs, StoredRhs):
        return _parts(cut, rhs, plan, site)
    if rhs.cut != cut:
        raise ValueError(
            f"rhs is stored as {rhs.cut}, but the plan on this mesh needs {cut}; store it anew: "
            "ms.to_layout(ms.from_layout(rhs), plan, mesh=mesh)"
        )
    if stacked := [part.shape for part in rhs.parts if part.ndim != 2]:
        raise TypeError(
            f"rhs is a stack of stored weights (parts of shape {stacked[0]}); multiply by one at a "
            "time, under jax.vmap or jax.lax.scan"
        )
    return rhs.parts


def to_layout(rhs: jax.Array, plan: GemmPlan | LayerPlan, *, mesh=None) -> "jax.Array | StoredRhs":
    """A weight as `plan.rhs_layout` wants it stored; as it is where that is "natural".

    Args:
      rhs: [k, n], global, placed in any way; or anything stored like it (a moment of an
        optimiser).
      plan: the plan of the layer; its forward product decides.
      mesh: the mesh; None reads the mesh in context.

    Returns:
      A pytree whose arrays are sharded like the weight: `matmul` takes it in its place.

    Raises:
      ValueError: no mesh, a plan that stores no weights, or a weight that its slices do not
        cut.
      TypeError: not a matrix of numbers, or one that is stored already.
    """
    layer = as_layer_plan(plan)
    plan = layer.forward
    if plan.rhs_layout == "natural":
        return rhs
    if isinstance(rhs, StoredRhs):
        raise TypeError(f"rhs is stored {rhs.cut.layout!r} already; pass ms.from_layout(rhs)")
    algorithms.check_plan(layer)
    rhs = as_matrix(rhs, "rhs")
    site = find_site(mesh, plan, (rhs,))
    shape = site.shape(plan)
    (mover,) = (mover for mover in plan.contraction.movers if mover.role == "rhs")
    pieces = sum(units(plan)[1]) * (plan.block_size or 1)
    for size, name in zip(shape, (plan.row_axis, plan.col_axis), strict=True):
        if rhs.shape[mover.dim] % (size * pieces):
            raise ValueError(
                f"rhs dimension {'kn'[mover.dim]} = {rhs.shape[mover.dim]} is not cut evenly into "
                f"{pieces} parts on each of the {size} chips of mesh axis {name!r}; see ms.check"
            )
    cut = cut_of(plan, rhs.shape, shape)
    return StoredRhs(parts=_parts(cut, rhs, plan, site), cut=cut)


def _parts(cut: Cut, rhs: jax.Array, plan: GemmPlan, site: Site) -> tuple[jax.Array, ...]:
    """The stored arrays; on Explicit axes of the type that the plan gives them."""
    if not site.explicit:
        return cut.parts(rhs)
    names = algorithms.axis_names(plan)
    entries = [spec_entry(names[axis]) for axis in plan.contraction.placement("rhs")]
    spec = site.on_explicit(PartitionSpec(*(entries[::-1] if cut.turned else entries)))
    with site.context():
        return jax.sharding.auto_axes(cut.parts, axes=site.explicit, out_sharding=spec)(rhs)


def from_layout(stored: "jax.Array | StoredRhs") -> jax.Array:
    """The weight [k, n] of what `to_layout` made; any other array as it is."""
    if not isinstance(stored, StoredRhs):
        return stored
    mesh, spec = (getattr(jax.typeof(stored.parts[0]).sharding, name) for name in ("mesh", "spec"))
    types = {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = tuple(axis for axis in types if types[axis] == AxisType.Explicit)
    if not explicit:
        return stored.cut.whole(stored.parts)
    spec = PartitionSpec(*(spec[::-1] if stored.cut.turned else spec))
    with jax.sharding.use_abstract_mesh(mesh):
        whole = jax.sharding.auto_axes(stored.cut.whole, axes=explicit, out_sharding=spec)
        return whole(stored.parts)
