"""Products of a layer that has no hook for them: found in its jaxpr and replaced.

Some layers call `lax.dot_general`, `jnp.dot` or `jnp.einsum` themselves (transformers'
`FlaxConv1D`, `linen.Einsum`, anybody's own). Nothing in JAX or Flax is patched for them:
the layer's method is traced to a jaxpr, and the jaxpr is run equation by equation, with
each `dot_general` that has one of the layer's own parameters as an operand replaced by the
plan's product. A parameter is followed through transposes and casts, so that the record
says how its dimensions lie in the product, and where it is to be placed.

Calls of `jit` and `checkpoint` are entered. A product inside a loop stays as it is; a layer
in which nothing could be replaced is an error.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from meshslice_jax import compat, product_log
from meshslice_jax.dot_general import DotGeneral

_SAME_DIMENSIONS = frozenset({"convert_element_type", "copy", "copy_p", "sharding_constraint"})
_CALLS = frozenset({"jit", "pjit", "closed_call"})
_REMATS = frozenset({"remat2", "remat", "checkpoint"})


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter as an array in the jaxpr: its name, and its dimension for each of ours."""

    name: str
    dims: tuple[int, ...]


def run(
    method: Callable[..., tuple[Any, Any]],
    variables: Any,
    args: tuple,
    kwargs: dict,
    *,
    op: DotGeneral,
    path: str,
    name_of: Callable[[tuple], str | None],
) -> tuple[Any, Any]:
    """Runs `method(variables, *args, **kwargs)` with its own products replaced.

    Args:
      method: a layer's method; it returns its result and the variables after the call.
      variables: a tree of arrays, the layer's parameters among them.
      args: the other arguments; what is no array (flags, None) is not traced.
      kwargs: likewise.
      op: the product to run.
      path: the layer's path, for the record.
      name_of: key path of a leaf of `variables` -> name of the parameter, or None. New
        parameters (at initialisation) are looked up in the returned tree.

    Returns:
      what the method returns.

    Raises:
      NotImplementedError: the layer has parameters of its own, and no product of them that
        could be replaced.
    """
    arrays, whole = split_arrays((args, kwargs))

    def function(variables, arrays):
        args, kwargs = whole(arrays)
        return method(variables, *args, **kwargs)

    closed, shapes = jax.make_jaxpr(function, return_shape=True)(variables, arrays)
    weights = {}
    for var, (keys, leaf) in zip(closed.jaxpr.invars, _leaves(variables), strict=False):
        if name := name_of(keys):
            weights[var] = Weight(name, tuple(range(leaf.ndim)))
    new = _leaves(shapes[1])
    outvars = closed.jaxpr.outvars[len(closed.jaxpr.outvars) - len(new) :]
    for var, (keys, leaf) in zip(outvars, new, strict=True):
        if not isinstance(var, Literal) and (name := name_of(keys)):
            weights.setdefault(var, Weight(name, tuple(range(leaf.ndim))))
    replaced = []

    def product(lhs, rhs, found, params):
        replaced.append(found)
        return _product(op, path, lhs, rhs, found, params)

    out = _evaluate(closed, jax.tree.leaves((variables, arrays)), weights, product)
    if weights and not replaced:
        raise NotImplementedError(
            f"layer {path!r} is to run on a plan, takes no dot_general, and has no product of its "
            "own parameters outside loops and transformations; give its inner layers a rule of "
            "their own, or this one the rule None"
        )
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def split_arrays(tree: Any) -> tuple[list, Callable[[list], Any]]:
    """The arrays of a tree, and a function that puts arrays in their places."""
    leaves, structure = jax.tree.flatten(tree)
    traced = [is_array(leaf) for leaf in leaves]

    def whole(arrays: list) -> Any:
        rest = iter(arrays)
        filled = [next(rest) if is_array else x for x, is_array in zip(leaves, traced, strict=True)]
        return jax.tree.unflatten(structure, filled)

    return [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array], whole


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced, being an array or the shape of one."""
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _leaves(tree) -> list:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _product(op: DotGeneral, path: str, lhs, rhs, found: tuple, params: dict) -> jax.Array:
    """One product as planned, with the parameter as rhs whichever operand it is."""
    contracted, batch = params["dimension_numbers"]
    first, second = found
    weight = second or first
    settings = {
        "preferred_element_type": params["preferred_element_type"],
        "out_sharding": params["out_sharding"],
    }
    precision = params["precision"]
    with product_log.layer(path, weight=(weight.name, weight.dims)):
        if second is not None:
            return op(lhs, rhs, (contracted, batch), precision, **settings)
        if isinstance(precision, tuple):
            precision = precision[::-1]
        out = op(rhs, lhs, (contracted[::-1], batch[::-1]), precision, **settings)
    batched = len(batch[0])
    free = rhs.ndim - batched - len(contracted[1])
    order = [*range(batched), *range(batched + free, out.ndim), *range(batched, batched + free)]
    return lax.transpose(out, order)


def _evaluate(closed: ClosedJaxpr, arguments: Sequence, weights: dict, product: Callable) -> list:
    """`jax.core.eval_jaxpr`, but for products of weights."""
    jaxpr, values = closed.jaxpr, {}
    values.update(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [_read(var, values) for var in eqn.invars]
        found = tuple(None if isinstance(v, Literal) else weights.get(v) for v in eqn.invars)
        if any(found):
            _follow(eqn, found[0], weights)
        if eqn.primitive.name == "dot_general" and any(found):
            outputs = [product(*inputs, found, eqn.params)]
        elif eqn.primitive.name in _CALLS | _REMATS:
            outputs = _enter(eqn, inputs, found, weights, product)
        else:
            outputs = compat.bind(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [_read(var, values) for var in jaxpr.outvars]


def _read(var, values: dict):
    return var.val if isinstance(var, Literal) else values[var]


def _follow(eqn, first: Weight | None, weights: dict) -> None:
    """Marks the result of a transpose or cast of a weight as that weight."""
    if first is None or len(eqn.outvars) != 1:
        return
    if eqn.primitive.name in _SAME_DIMENSIONS:
        weights.setdefault(eqn.outvars[0], first)
    elif eqn.primitive.name == "transpose":
        dims = tuple(first.dims[d] for d in eqn.params["permutation"])
        weights.setdefault(eqn.outvars[0], Weight(first.name, dims))


def _enter(eqn, inputs: list, found: tuple, weights: dict, product: Callable) -> list:
    """A call, evaluated inside; weights are known on both sides of its border."""
    inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
    known = {v: w for v, w in zip(closed.jaxpr.invars, found, strict=True) if w}
    results = [
        (var, outer)
        for var, outer in zip(closed.jaxpr.outvars, eqn.outvars, strict=True)
        if not isinstance(var, Literal)
    ]
    known |= {var: weights[outer] for var, outer in results if outer in weights}

    def inside(*arrays):
        return _evaluate(closed, arrays, known, product)

    if eqn.primitive.name in _REMATS:
        settings = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        inside = jax.checkpoint(inside, **settings)
    outputs = inside(*inputs)
    for var, outer in results:
        if var in known:
            weights.setdefault(outer, known[var])
    return outputs
