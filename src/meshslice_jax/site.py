"""Where a product runs: which mesh, which of its axes, and how operands get there.

A caller may be on an Auto or an Explicit mesh, given as an argument or in context,
with further axes that are somebody else's, or inside a shard_map of its own. All of
that is decided here, once per call, into one static value, the `Site`:

    the mesh has just the plan's axes    fully manual over it
    the mesh has further axes            manual over the plan's axes (batch_axes
                                         included), the others stay automatic
    vmap(spmd_axis_name=)                fully manual: the batch is on that axis
    inside a caller's shard_map          manual over the plan's axes, mesh from context
    Explicit axes in context             entered as Auto through jax.sharding.auto_axes
    an Explicit mesh given out of context: the same where an operand has a type on it,
                                         otherwise its devices as an Auto mesh
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshslice_jax import compat
from meshslice_jax.collectives import Axis
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import dtype_fault


def as_matrix(x, role: str):
    """An operand as a matrix of numbers, or whatever has the shape and dtype of one.

    Raises:
      TypeError: it is none, or of numbers of less than 8 bits.
    """
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        x = jnp.asarray(x)
    names = {"lhs": "[m, k]", "rhs": "[k, n]"}[role]
    if len(x.shape) != 2:
        raise TypeError(
            f"{role} must be a matrix {names}, got shape {tuple(x.shape)}; flatten other "
            "dimensions first, or use ms.dot_general"
        )
    if fault := dtype_fault(x.dtype):
        raise TypeError(f"{role} has {fault}")
    return x


def axes_in(entry) -> tuple[str, ...]:
    """The mesh axes that an entry of a PartitionSpec names."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def spec_entry(names: tuple[str, ...]):
    """The entry of a PartitionSpec for some mesh axes, the inverse of `axes_in`."""
    if not names:
        return None
    return names[0] if len(names) == 1 else names


def spec_of(spec: PartitionSpec) -> PartitionSpec:
    """A PartitionSpec with its entries in the form that `spec_entry` gives them."""
    return PartitionSpec(*(spec_entry(axes_in(entry)) for entry in spec))


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a product runs; static and hashable.

    Attributes:
      mesh: what the shard_map is built over; None takes it from the context.
      sizes: (axis name, size) of the whole mesh.
      manual: the axes over which the shard_map is manual.
      partial: whether other axes remain automatic or are the caller's.
      explicit: Explicit axes that have to be entered.
      entered: an Explicit mesh, given out of context, on which an operand has a type.
      platform: "cpu", "tpu" or "gpu".
    """

    mesh: Mesh | AbstractMesh | None
    sizes: tuple[tuple[str, int], ...]
    manual: frozenset[str]
    partial: bool
    explicit: tuple[str, ...]
    entered: Mesh | None
    platform: str

    def axis(self, names: tuple[str, ...]) -> Axis:
        """The direction of the mesh along some of its axes, major first."""
        return Axis(names, tuple(dict(self.sizes)[name] for name in names))

    def shape(self, plan: GemmPlan) -> MeshShape:
        """The sizes of a plan's own two axes."""
        found = dict(self.sizes)
        return MeshShape(found[plan.row_axis], found[plan.col_axis])

    def replicas(self, plan: GemmPlan) -> int:
        """The number of data-parallel replicas of the product."""
        return self.axis(plan.batch_axes).size

    def place(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Puts an operand where the plan wants it, before it becomes a residual."""
        if self.explicit:
            return self._typed(x, spec)
        if self.partial:  # a constraint here would replicate over the caller's axes
            return x
        traced = isinstance(x, jax.core.Tracer)
        if self.mesh is None:
            return lax.with_sharding_constraint(x, spec) if traced else x
        sharding = NamedSharding(self.mesh, spec)
        return lax.with_sharding_constraint(x, sharding) if traced else jax.device_put(x, sharding)

    def put(self, x: jax.Array, sharding: NamedSharding | PartitionSpec) -> jax.Array:
        """Puts a result where the caller wants it, whatever the plan says.

        Raises:
          ValueError: a sharding of another mesh, or one that does not fit the result.
          NotImplementedError: one that names Auto axes of a mesh with Explicit ones.
        """
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        if isinstance(sharding, NamedSharding) and _sizes(sharding.mesh) != self.sizes:
            raise ValueError(
                f"out_sharding is on a mesh with axes {dict(_sizes(sharding.mesh))}, but the "
                f"product runs on {dict(self.sizes)}"
            )
        if self.explicit:
            if self.on_explicit(spec) != spec_of(spec):
                raise NotImplementedError(
                    f"out_sharding={spec} names axes that are not Explicit; of this mesh only "
                    f"{', '.join(map(repr, self.explicit))} are"
                )
            return self.reshard(x, spec)
        if self.mesh is None:
            return lax.with_sharding_constraint(x, spec)
        sharding = NamedSharding(self.mesh, spec)
        traced = isinstance(x, jax.core.Tracer)
        return lax.with_sharding_constraint(x, sharding) if traced else jax.device_put(x, sharding)

    def _typed(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """An operand on Explicit axes: placed as it is, or as planned if it was never placed.

        The reshard is there also where it changes nothing: it takes a cotangent of any
        type, as a scan's carry has that is placed only after the first step.
        """
        if AxisType.Explicit in _types_of(x):
            own = jax.typeof(x).sharding.spec
            return self.reshard(x, own if any(entry is not None for entry in own) else spec)
        if self.entered is not None and not isinstance(x, jax.core.Tracer):
            return jax.device_put(x, NamedSharding(self.entered, spec))
        return self.reshard(x, spec)

    def on_explicit(self, spec: PartitionSpec) -> PartitionSpec:
        """What a type on the Explicit axes can say of a placement."""
        kept = (tuple(a for a in axes_in(entry) if a in self.explicit) for entry in spec)
        return PartitionSpec(*(spec_entry(names) for names in kept))

    def reshard(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """`x` with the type `spec` on the Explicit mesh."""
        spec = self.on_explicit(spec)
        if self.entered is None:
            return jax.sharding.reshard(x, spec)
        return jax.sharding.reshard(x, NamedSharding(self.entered.abstract_mesh, spec))

    def context(self) -> contextlib.AbstractContextManager:
        """The Explicit mesh in context, for as long as a product is traced."""
        if self.entered is None:
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(self.entered.abstract_mesh)


def find_site(mesh: Mesh | AbstractMesh | None, plan: GemmPlan, operands: tuple) -> Site:
    """Decides where a product runs.

    Args:
      mesh: the mesh that the caller gave, or None.
      plan: names the two axes.
      operands: lhs and rhs; on an Explicit mesh out of context their types count.

    Raises:
      ValueError: no mesh at all, another mesh in context, axes that the mesh lacks, or
        axes over which the caller is already manual.
    """
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    in_context = not jax.sharding.get_abstract_mesh().empty
    mesh = _mesh_in_context(mesh) if in_context else (mesh or compat.legacy_context_mesh())
    if mesh is None:
        raise ValueError(
            "no mesh: pass mesh=, or call under jax.set_mesh(mesh) "
            f"(axes {plan.row_axis!r} and {plan.col_axis!r} are needed)"
        )
    if not in_context:
        mesh = _as_operands_see_it(mesh, operands)
    types = _checked_axis_types(mesh, plan)
    explicit = tuple(axis for axis in types if types[axis] == AxisType.Explicit)
    entered = None
    if explicit and not in_context:
        if any(AxisType.Explicit in _types_of(x) for x in operands):
            entered = mesh
            if any(AxisType.Auto in _types_of(x) for x in operands):
                raise ValueError(
                    "one operand is placed on the mesh with Explicit axes, the other was made "
                    "by a product of operands that were not; work under jax.set_mesh(mesh), or "
                    "place all operands on the mesh"
                )
        else:
            mesh, explicit = with_auto_axes(mesh), ()
    whole = _fully_manual(types, dict(_sizes(mesh)), plan)
    return Site(
        mesh=None if in_context or entered is not None else mesh,
        sizes=_sizes(mesh),
        manual=frozenset(types if whole else _axes_of(plan)),
        partial=not whole,
        explicit=explicit,
        entered=entered,
        platform=compat.platform_of(mesh),
    )


def _as_operands_see_it(mesh: Mesh | AbstractMesh, operands: tuple) -> Mesh | AbstractMesh:
    """An Auto mesh with the axis types that operands have on the same devices."""
    for x in operands:
        seen = jax.typeof(x).sharding.mesh
        if AxisType.Explicit in _types_of(x) and seen.axis_types != mesh.axis_types:
            if _sizes(seen) != _sizes(mesh):
                raise ValueError(
                    f"mesh= has axes {dict(_sizes(mesh))}, but an operand is placed on a mesh "
                    f"with Explicit axes {dict(_sizes(seen))}; pass that mesh"
                )
            if isinstance(mesh, Mesh):
                return Mesh(mesh.devices, mesh.axis_names, axis_types=seen.axis_types)
    return mesh


def _mesh_in_context(given: Mesh | AbstractMesh | None) -> AbstractMesh:
    """The mesh in context; a given one must be the same."""
    context = jax.sharding.get_abstract_mesh()
    if given is None:
        return context
    if _sizes(given) != _sizes(context):
        raise ValueError(
            f"mesh= has axes {dict(_sizes(given))}, but the mesh in context has "
            f"{dict(_sizes(context))}; pass the same mesh or none"
        )
    concrete = compat.concrete_context_mesh()
    if isinstance(given, Mesh) and concrete is not None:
        order = [[device.id for device in m.devices.flat] for m in (given, concrete)]
        if order[0] != order[1]:
            raise ValueError(
                f"mesh= has devices {order[0]}, but the mesh in context has {order[1]}; pass "
                "the same mesh or none"
            )
    return context


def _checked_axis_types(mesh: Mesh | AbstractMesh, plan: GemmPlan) -> dict[str, AxisType]:
    """The type of each axis of the mesh, which has the plan's axes, free to be used."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    ours = _axes_of(plan)
    if missing := [axis for axis in ours if axis not in types]:
        raise ValueError(
            f"the plan's axes {', '.join(map(repr, ours))} are not all in the mesh "
            f"{dict(_sizes(mesh))}: {', '.join(map(repr, missing))} missing; set row_axis, "
            "col_axis and batch_axes"
        )
    if taken := [axis for axis in ours if types[axis] == AxisType.Manual]:
        raise ValueError(
            f"matmul is called inside a shard_map that is already manual over {taken}; call it "
            "outside, or make that shard_map manual over other axes only"
        )
    return types


def _fully_manual(types: dict[str, AxisType], sizes: dict[str, int], plan: GemmPlan) -> bool:
    """Whether the shard_map may be manual over the whole mesh."""
    if AxisType.Manual in types.values():
        return False
    others = set(types) - set(_axes_of(plan))
    return all(sizes[axis] == 1 for axis in others) or bool(compat.spmd_axis_names())


def _axes_of(plan: GemmPlan) -> tuple[str, ...]:
    return (plan.row_axis, plan.col_axis, *plan.batch_axes)


def _types_of(x: jax.Array) -> tuple[AxisType, ...]:
    """The axis types of the mesh on which an operand has a type, if any."""
    mesh = jax.typeof(x).sharding.mesh
    return () if mesh.empty else mesh.axis_types


def with_auto_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh, all of its axes Auto."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)  # the defaults differ between versions
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)


def _sizes(mesh: Mesh | AbstractMesh) -> tuple[tuple[str, int], ...]:
    return tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
