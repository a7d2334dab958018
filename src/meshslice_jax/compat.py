"""The few facts about JAX that have no public name; one place to fix on an upgrade.

Tested with jax 0.10 and 0.12.
"""

import os

import jax
from jax._src import clusters as _clusters
from jax._src import core as _core
from jax._src import distributed as _distributed
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


def has_joined() -> bool:
    """Whether this process is one of several that `jax.distributed` has joined."""
    return _distributed.global_state.client is not None


def process_id() -> int:
    """This process's number; unlike `jax.process_index` it starts no device."""
    return _distributed.global_state.process_id or 0


def num_processes() -> int:
    """The number of joined processes; unlike `jax.process_count` it starts no device."""
    return _distributed.global_state.num_processes or 1


def cluster_name() -> str | None:
    """The cluster that `jax.distributed.initialize()` would find by itself, or None."""
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        return "JAX_COORDINATOR_ADDRESS"
    kinds = (kind for kind in _clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method)
    return next((kind.__name__ for kind in kinds if kind.is_env_present()), None)


def put_text(key: str, text: str) -> None:
    """Stores text with the coordinator of `jax.distributed`; a key is used once."""
    _distributed.global_state.client.key_value_set(key, text)


def get_text(key: str, timeout_s: float) -> str:
    """Text that a process has stored; waits for it, RuntimeError after `timeout_s`."""
    return _distributed.global_state.client.blocking_key_value_get(key, int(timeout_s * 1e3))


def wait_at_barrier(key: str, timeout_s: float) -> None:
    """Waits for all processes; RuntimeError, which names those that miss, after `timeout_s`."""
    _distributed.global_state.client.wait_at_barrier(key, int(timeout_s * 1e3))


def bind(eqn, inputs: list) -> list:
    """Runs one equation of a jaxpr, as `jax.core.eval_jaxpr` does; its results."""
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = ((), found) if isinstance(found, dict) else found
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *inputs, **params)
    return list(results) if eqn.primitive.multiple_results else [results]
