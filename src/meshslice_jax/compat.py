"""The few facts about JAX that have no public name; one place to fix on an upgrade.

Tested with jax 0.10 and 0.12.
"""

import jax
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import xla_bridge as _xla_bridge


def legacy_context_mesh() -> jax.sharding.Mesh | None:
    """The mesh of an enclosing `with mesh:` block, or None."""
    mesh = _mesh.thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def concrete_context_mesh() -> jax.sharding.Mesh | None:
    """The mesh of an enclosing `jax.set_mesh` with its devices, or None."""
    mesh = _mesh.get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh


def spmd_axis_names() -> frozenset:
    """Mesh axes given to an enclosing `vmap(..., spmd_axis_name=)`."""
    env = _core.get_axis_env()
    return frozenset(env.spmd_axis_names) | frozenset(env.explicit_mesh_axis_names)


def varying_axes(x: jax.Array) -> frozenset:
    """Manual mesh axes on which the value of `x` varies."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def platform_of(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> str:
    """The platform of the mesh's devices; the default backend's where it has none."""
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0].platform
    device = getattr(mesh, "abstract_device", None)
    return getattr(device, "platform", None) or jax.default_backend()


def jax_has_started() -> bool:
    """Whether JAX already holds its devices, so that their number is fixed."""
    return _xla_bridge.backends_are_initialized()
