"""Products with a parameter as an operand, found in a jaxpr, whoever multiplies.

A value is a parameter's as long as it is made of parameters and constants alone: casts,
transposes, reshapes, scales and slices of a weight are that weight. A value that an input
has touched, or that a product has made, is an activation's: attention scores have no
weight, the logits of a tied embedding have one.
"""

import math
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from meshslice_jax import product_log
from meshslice_jax.nn.placing import names
from meshslice_jax.nn.rewrite import is_array

#: What an activation is made of; None is what a constant is made of, a path a parameter.
INPUT = "input"
Source = tuple[str, ...] | str | None


def sources(tree: Any, *, owned: bool) -> list[Source]:
    """What each array of `(inputs, keywords)` is: a parameter stands below "params".

    Args:
      tree: the arguments of a call, or their shapes.
      owned: whether the first input is the model's own, so that the rest of it (statistics,
        scales) counts as constants.
    """
    found = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not is_array(leaf):
            continue
        path = names(keys)
        if "params" in path:
            found.append(path[path.index("params") + 1 :])
        elif (owned and path[:2] == ("0", "0")) or _is_key(leaf):
            found.append(None)
        else:
            found.append(INPUT)
    return found


def products(jaxpr: Jaxpr, given: Iterable[Source]) -> Iterator[tuple]:
    """(equation, path of its weight or None) of dense products that no layer recorded.

    Products inside shard_maps belong to whoever wrote these.
    """
    yield from _walk(jaxpr, list(given))


def _walk(jaxpr: Jaxpr, given: list[Source]) -> Generator[tuple, None, list[Source]]:
    """The products of a jaxpr; returns what its results are made of."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [_source(var, known) for var in eqn.invars]
        name = eqn.primitive.name
        bodies = [] if name == "shard_map" else _bodies(eqn)
        made = [_joined(inputs, eqn.invars)] * len(eqn.outvars)
        if name == "dot_general":
            made = [INPUT]
            if product_log.DENSE not in str(eqn.source_info.name_stack):
                yield eqn, next((s for s in reversed(inputs) if isinstance(s, tuple)), None)
        elif name == "dynamic_slice":
            made = inputs[:1]
        elif name in ("scan", "while"):  # what is constant at first may be carried
            inputs = [source or INPUT for source in inputs]
        for i, body in enumerate(bodies):
            results = yield from _walk(body, _entering(name, inputs, body))
            if len(results) == len(made):
                made = [_joined(p) for p in zip(made, results, strict=True)] if i else results
        known.update(zip(eqn.outvars, made, strict=True))
    return [_source(var, known) for var in jaxpr.outvars]


def _entering(name: str, inputs: list[Source], body: Jaxpr) -> list[Source]:
    """The operands of an equation as those of its body; first are what a branch hasn't."""
    count = len(body.invars)
    if count == len(inputs) or (name in ("cond", "while") and count < len(inputs)):
        return inputs[len(inputs) - count :]
    return [INPUT] * count


def _joined(found: Iterable[Source], variables: Iterable = ()) -> Source:
    """What a value made of several is: of weights the largest gives its name."""
    found = list(found)
    if INPUT in found:
        return INPUT
    sizes = [math.prod(var.aval.shape) for var in variables] or [0] * len(found)
    weights = [(size, s) for size, s in zip(sizes, found, strict=True) if s is not None]
    return max(weights, key=lambda pair: pair[0])[1] if weights else None


def _source(var, known: dict) -> Source:
    return None if isinstance(var, Literal) else known.get(var)


def _bodies(eqn) -> list[Jaxpr]:
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
    return [x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in leaves if _is_jaxpr(x)]


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
