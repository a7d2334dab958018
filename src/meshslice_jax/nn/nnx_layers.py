"""nnx modules on a plan, changed in place: products swapped, kernels placed.

Parameters that are no kernel of a planned product are replicated over the mesh, unless
they were placed before.

A layer with a `dot_general` attribute gets a product of its own there. A layer without one
becomes an instance of a subclass of its own class whose `__call__` runs through `rewrite`;
its attributes, its state and the names in it stay what they are.
"""

import dataclasses
import functools

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshslice_jax import product_log
from meshslice_jax.dot_general import DotGeneral
from meshslice_jax.nn import rewrite
from meshslice_jax.nn.linen_layers import Unplanned, UnplannedClass, swapped
from meshslice_jax.nn.placing import is_concrete, kernel_spec, names
from meshslice_jax.nn.rules import Assignment, Choice


@dataclasses.dataclass(frozen=True)
class LayerProduct:
    """A product, and for the record (not in `==`) its layer's path and who assigned it."""

    op: DotGeneral | Unplanned
    path: str = dataclasses.field(compare=False)
    assignment: Assignment = dataclasses.field(compare=False)

    def __call__(self, *args, **kwargs) -> jax.Array:
        product_log.assigned(self.assignment)
        with product_log.layer(self.path):
            return self.op(*args, **kwargs)


def parallelize_nnx(
    model: nnx.Module, assignment: Assignment, mesh: Mesh | AbstractMesh
) -> nnx.Module:
    """Swaps the products of a model's layers and places their kernels, in place."""
    for keys, module in list(nnx.iter_modules(model)):
        path = "/".join(map(str, keys))
        hooked = hasattr(module, "dot_general")
        choice = assignment.choose(path, hooked=hooked)
        if hooked:
            _swap(module, path, choice, assignment)
            if choice.op is not None:
                _place(module, choice.op, mesh)
        else:
            _rewrite(module, path, choice, assignment)
    if isinstance(mesh, Mesh):
        nnx.update(
            model, jax.tree.map(functools.partial(_spread, mesh), nnx.state(model, nnx.Param))
        )
    return model


def _spread(mesh: Mesh, leaf):
    """A parameter that lies on no more than one device, replicated over the mesh."""
    if not is_concrete(leaf) or mesh.size == 1:
        return leaf
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return leaf
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))


def _rewrite(module: nnx.Module, path: str, choice: Choice, assignment: Assignment) -> None:
    """Makes a layer without a hook one that is rewritten, or again what it was."""
    base = getattr(type(module), "meshslice_base", type(module))
    if choice.op is not None and _owns_parameters(module):
        module.meshslice_choice = LayerProduct(choice.op, path, assignment)
        module.__class__ = _rewriting(base)
    elif base is not type(module):
        del module.meshslice_choice
        module.__class__ = base


def _swap(module: nnx.Module, path: str, choice: Choice, assignment: Assignment) -> None:
    fields = [f for f in ("dot_general", "dot_general_cls") if hasattr(module, f)]
    before = {field: _own_product(getattr(module, field)) for field in fields}
    after = swapped(before, choice)
    for field in fields:
        found = after.get(field)
        named = field == "dot_general" and found is not None
        setattr(module, field, LayerProduct(found, path, assignment) if named else found)


def _own_product(found):
    """What a layer had before it was parallelized, if it was; None is lax's product."""
    if isinstance(found, LayerProduct):
        return found.op.product if isinstance(found.op, Unplanned) else None
    return found.cls if isinstance(found, UnplannedClass) else found


def _place(module: nnx.Module, op: DotGeneral, mesh: Mesh | AbstractMesh) -> None:
    """Puts the kernel of a hooked layer where its plan has it; Flax's own layers tell."""
    if not (hasattr(module, "kernel") and hasattr(module, "in_features")):
        return
    kernel = module.kernel.get_value()
    features = [getattr(module, f"{side}_features") for side in ("in", "out")]
    inputs, outputs = (f if isinstance(f, tuple) else (f,) for f in features)
    shape = (*inputs, *outputs)
    stacked = kernel.ndim - len(shape)
    if stacked < 0 or kernel.shape[stacked:] != shape:
        return  # batch dimensions: several products
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    spec = kernel_spec(op.plan, shape, tuple(range(len(inputs))), sizes)
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * stacked, *spec))
    if isinstance(kernel, jax.ShapeDtypeStruct):
        module.kernel.set_value(jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=sharding))
    elif isinstance(mesh, Mesh):
        module.kernel.set_value(jax.device_put(kernel, sharding))


def _owns_parameters(module: nnx.Module) -> bool:
    return any(isinstance(value, nnx.Param) for value in vars(module).values())


@functools.cache
def _rewriting(cls: type) -> type:
    """The subclass of a layer's class that replaces the products of its own parameters."""

    def __call__(self, *args, **kwargs):  # noqa: N807
        graph, state = nnx.split(self)
        chosen = self.meshslice_choice
        product_log.assigned(chosen.assignment)

        def pure(state, *args, **kwargs):
            module = nnx.merge(graph, state)
            result = cls.__call__(module, *args, **kwargs)
            return result, nnx.state(module)

        result, state = rewrite.run(
            pure, state, args, kwargs, op=chosen.op, path=chosen.path, name_of=_own
        )
        nnx.update(self, state)
        return result

    members = {"__call__": __call__, "__module__": cls.__module__, "meshslice_base": cls}
    return type(cls)(cls.__name__, (cls,), members)


def _own(keys: tuple) -> str | None:
    """The name of a parameter that the layer itself holds."""
    found = names(keys)
    return found[0] if len(found) == 1 else None
