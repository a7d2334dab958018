"""One abstract call of a model, and all its products: what ran on a plan and what did not.

The call is traced, never computed. Products of layers record themselves (`product_log`);
those that no layer owns (attention scores, tied embeddings) are found in the jaxpr.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from meshslice_jax import product_log
from meshslice_jax.nn.linen_layers import ParallelModule, intercepted
from meshslice_jax.nn.rewrite import split_arrays
from meshslice_jax.product_log import Product


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The products of one call.

    Attributes:
      products: those of layers, in order. What a layer does twice alike (in a scan, or
        because it is called twice) is listed once.
      others: (lhs shape, rhs shape, how often) of products that no layer owns.
    """

    products: tuple[Product, ...]
    others: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]

    @property
    def fallbacks(self) -> tuple[Product, ...]:
        """Products of layers that run as `lax.dot_general` although no rule asks for it."""
        return tuple(p for p in self.products if p.plan is None and not p.chosen)

    def raise_fallbacks(self) -> None:
        """Raises if there are any.

        Raises:
          ValueError: it lists them with their reasons.
        """
        if self.fallbacks:
            lines = [f"  {p.layer or '(no name)'}: {p.reason}" for p in self.fallbacks]
            raise ValueError(
                f"{len(lines)} of {len(self.products)} products do not run on a plan; give them "
                "rules, or the rule None:\n" + "\n".join(lines)
            )


def trace(model: Any, inputs: tuple, kwargs: dict, *, assignment=None) -> Trace:
    """Traces one call of a ParallelModule's `apply`, an nnx module, or any function."""
    function = model
    if isinstance(model, ParallelModule):
        function = model.apply
    elif isinstance(model, nnx.Module):
        graph, state = nnx.split(model)
        inputs = (state, *inputs)

        def function(state, *args, **kwargs):
            return nnx.merge(graph, state)(*args, **kwargs)

    arrays, whole = split_arrays((inputs, kwargs))

    def call(arrays):
        args, keywords = whole(arrays)
        return jax.tree.leaves(function(*args, **keywords))

    within = contextlib.nullcontext() if assignment is None else intercepted(assignment)
    with product_log.recording() as products, within:
        closed = jax.make_jaxpr(call)(arrays)
    return Trace(products=tuple(dict.fromkeys(products)), others=_others(closed.jaxpr))


def _others(jaxpr: Jaxpr) -> tuple:
    """Products outside shard_maps that no layer recorded."""
    found = collections.Counter(
        (tuple(lhs.aval.shape), tuple(rhs.aval.shape)) for lhs, rhs in _dots(jaxpr)
    )
    return tuple((lhs, rhs, count) for (lhs, rhs), count in found.items())


def _dots(jaxpr: Jaxpr) -> Iterator[tuple]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            if product_log.DENSE not in str(eqn.source_info.name_stack):
                yield tuple(eqn.invars)
        elif eqn.primitive.name != "shard_map":
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(inner):
                    yield from _dots(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)
