"""`parallelize`: a Flax model that others wrote, unmodified, with its products on a plan.

    model, shardings = ms.nn.parallelize(linen_module, plan, mesh, x)
    variables = jax.jit(model.init, out_shardings=...)(key, x)      # or a checkpoint's
    y = model.apply(jax.device_put(variables, shardings(variables)), x)

    model = ms.nn.parallelize(nnx_module, plan, mesh)               # in place

Layers are matched to the plan by their path (`rules`), their products swapped for the
plan's, their kernels placed where the plan has them. `explain` says what came of it.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen
import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.nn.linen_layers import ParallelModule
from meshslice_jax.nn.nnx_layers import parallelize_nnx
from meshslice_jax.nn.placing import Shardings, is_concrete, kernels
from meshslice_jax.nn.rewrite import split_arrays
from meshslice_jax.nn.rules import Rule, assign
from meshslice_jax.nn.trace import trace
from meshslice_jax.plan import GemmPlan, LayerPlan


def parallelize(
    model: flax.linen.Module | nnx.Module,
    plan: ModelPlan | Mapping[str, GemmPlan | LayerPlan] | GemmPlan | LayerPlan,
    mesh: Mesh | AbstractMesh,
    *inputs: Any,
    rules: list[Rule] | None = None,
    batch_axes: tuple[str, ...] | None = None,
    pad: bool = False,
    on_unsupported: str = "error",
    strict: bool = False,
    **kwargs: Any,
) -> Any:
    """Runs the products of a model's layers on a plan.

    Args:
      model: a linen or nnx module; not a bound one.
      plan: a ModelPlan of `tune`; a plan for each layer name that the rules use; or one
        plan, which every layer that takes a `dot_general` gets unless a rule says None.
      mesh: the mesh. It has the plan's axes, and may have others. An AbstractMesh will do
        for `explain` and for placements, with no device of it at hand.
      *inputs: arguments of one call, as `model.apply` (without variables) or the nnx
        module takes them; arrays or `jax.ShapeDtypeStruct`s. One call is traced to see
        which parameter is which product's kernel; nothing is computed. A linen model needs
        them; an nnx model only for layers that have no hook for a product.
      rules: (regular expression searched in a layer's path, layer of the plan or a plan or
        None) in order of precedence; by default `DEFAULT_RULES`.
      batch_axes: mesh axes over which the batch is sharded beyond the plan's axes; by
        default all further axes of the mesh.
      pad: see `dot_general`.
      on_unsupported: see `dot_general`.
      strict: raise if any product with a parameter, in a layer or anywhere else, stays off
        the plan without a rule that says None, or a rule matches no layer; needs inputs.
      **kwargs: keyword arguments of the call.

    Returns:
      For linen `(model, shardings)`: the model has `init` and `apply` of the module, and
      `shardings(tree)` is the tree of NamedShardings for a tree of its parameters. For nnx
      the module that was passed.

    Raises:
      TypeError: not a Flax module, or a linen module without inputs.
      ValueError: rules and plan that do not belong together, a plan for another mesh or
        for axes that it lacks, a
        product that cannot run on its plan (with its layer), strict and a fallback.
    """
    assignment = assign(
        plan,
        mesh,
        rules=rules,
        batch_axes=batch_axes,
        pad=pad,
        on_unsupported=on_unsupported,
    )
    if strict and not (inputs or kwargs):
        raise ValueError("strict=True needs the inputs of a call: what falls back shows there")
    if isinstance(model, flax.linen.Module):
        return _linen(ParallelModule(model, assignment), mesh, inputs, kwargs, strict)
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model must be a linen or nnx module, got {type(model).__name__}; transformers' "
            "Flax models hold theirs as model.module"
        )
    parallelize_nnx(model, assignment, mesh)
    if inputs or kwargs:
        found = trace(model, inputs, kwargs, assignment=assignment)
        if strict:
            found.raise_fallbacks()
        _place(model, Shardings(mesh, kernels(found.products, mesh)))
    return model


def _linen(model: ParallelModule, mesh, inputs, kwargs, strict: bool):
    if not (inputs or kwargs):
        raise TypeError(
            "a linen module's parameters are known by a call only: "
            "parallelize(module, plan, mesh, *inputs), arrays or jax.ShapeDtypeStructs"
        )
    keys = {name: jax.random.key(0) for name in ("params", "dropout")}
    arrays, whole = split_arrays((inputs, kwargs))

    def init(arrays):
        inputs, kwargs = whole(arrays)
        return model.module.init(keys, *inputs, **kwargs)

    variables = jax.eval_shape(init, arrays)
    found = trace(model, (variables, *inputs), {"rngs": keys, "mutable": True, **kwargs})
    if strict:
        found.raise_fallbacks()
    return model, Shardings(mesh, kernels(found.products, mesh))


def _place(model: nnx.Module, shardings: Shardings) -> None:
    """Places the kernels of an nnx model that a trace has found."""
    state = nnx.state(model, nnx.Param)
    wanted = shardings(state)

    def placed(leaf, sharding):
        if not sharding.spec or not is_concrete(leaf):
            return leaf  # nothing is known of it: left where it is
        return jax.device_put(leaf, sharding)

    nnx.update(model, jax.tree.map(placed, state, wanted))
