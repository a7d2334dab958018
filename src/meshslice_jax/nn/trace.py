"""One abstract call of a model, and all its products: what ran on a plan and what did not.

The call is traced, never computed. Products of layers record themselves (`product_log`);
the others are found in the jaxpr: those that have a parameter as an operand (`weights`)
are products of its layer, off the plan; the rest (attention scores) are nobody's.
"""

import collections
import dataclasses
from typing import Any

import jax
from flax import nnx

from meshslice_jax import product_log
from meshslice_jax.nn import weights
from meshslice_jax.nn.linen_layers import ParallelModule
from meshslice_jax.nn.rewrite import split_arrays
from meshslice_jax.nn.rules import Assignment
from meshslice_jax.product_log import Product


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The products of one call.

    Attributes:
      products: those of layers, in order, and then those of parameters that no layer
        recorded. What a layer does twice alike (in a scan, or because it is called twice)
        is listed once.
      others: (lhs shape, rhs shape, how often) of products without a parameter.
      unmatched: regular expressions of rules that are found in no layer's path.
      hardware: the profile of the plan, if it has one.
    """

    products: tuple[Product, ...]
    others: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    unmatched: tuple[str, ...] = ()
    hardware: str | None = None

    @property
    def fallbacks(self) -> tuple[Product, ...]:
        """Products of layers that run as `lax.dot_general` although no rule asks for it."""
        return tuple(p for p in self.products if p.plan is None and not p.chosen)

    def raise_fallbacks(self) -> None:
        """Raises if there are any, or rules that match nothing.

        Raises:
          ValueError: it lists them with their reasons.
        """
        faults = []
        if self.fallbacks:
            lines = [f"  {p.path or '(no name)'}: {p.reason}" for p in self.fallbacks]
            faults.append(
                f"{len(lines)} of {len(self.products)} products do not run on a plan; give them "
                "rules, or the rule None:\n" + "\n".join(lines)
            )
        faults += [f"rule {pattern!r} matched no layer" for pattern in self.unmatched]
        if faults:
            raise ValueError("\n".join(faults))


def trace(
    model: Any, inputs: tuple, kwargs: dict, *, assignment: Assignment | None = None
) -> Trace:
    """Traces one call of a ParallelModule's `apply`, an nnx module, or any function.

    Args:
      model: which of these.
      inputs: its arguments; arrays or their shapes.
      kwargs: likewise.
      assignment: of an nnx module, where it is known; its layers tell theirs.
    """
    function, root = model, ""
    if isinstance(model, ParallelModule):
        function, root = model.apply, model.module.name or ""
    elif isinstance(model, nnx.Module):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        inputs = ({"params": params, "rest": rest}, *inputs)

        def function(state, *args, **kwargs):
            return nnx.merge(graph, state["params"], state["rest"])(*args, **kwargs)

    arrays, whole = split_arrays((inputs, kwargs))

    def call(arrays):
        args, keywords = whole(arrays)
        return jax.tree.leaves(function(*args, **keywords))

    assignments = [] if assignment is None else [assignment]
    with product_log.recording(assignments) as products:
        closed = jax.make_jaxpr(call)(arrays)
    owned = isinstance(model, ParallelModule | nnx.Module)
    sources = weights.sources((inputs, kwargs), owned=owned)
    others = collections.Counter()
    for eqn, weight in weights.products(closed.jaxpr, sources):
        if weight is None:
            others[tuple(tuple(var.aval.shape) for var in eqn.invars)] += 1
        else:
            products.append(_product(eqn, weight, assignments, root))
    paths = {p.layer for p in products}
    for source in sources:
        if isinstance(source, tuple):
            paths |= {"/".join(source[:end]) for end in range(1, len(source) + 1)}
    return Trace(
        products=tuple(dict.fromkeys(products)),
        others=tuple((lhs, rhs, count) for (lhs, rhs), count in others.items()),
        unmatched=tuple(p for found in assignments for p in found.unmatched(paths)),
        hardware=next((found.hardware for found in assignments if found.hardware), None),
    )


def _product(eqn, weight: tuple[str, ...], assignments: list[Assignment], root: str) -> Product:
    """A product of a parameter that no layer recorded, and why it is on no plan."""
    layer, path = "/".join(weight[:-1]) or root, "/".join(weight)
    choices = [a.choose(where, hooked=False) for a in assignments for where in (layer, path)]
    reason = "its layer takes no dot_general"
    if left := [choice for choice in choices if choice.chosen]:
        reason = left[0].reason
    elif any(choice.op for choice in choices):
        reason += ", and this product, in a loop or of a part of the parameter, can't be replaced"
    elif choices:
        reason += f", and {choices[0].reason}"
    lhs, rhs = (tuple(var.aval.shape) for var in eqn.invars)
    return Product(
        layer=layer,
        lhs_shape=lhs,
        rhs_shape=rhs,
        out_shape=tuple(eqn.outvars[0].aval.shape),
        rhs_contracted=tuple(eqn.params["dimension_numbers"][0][1]),
        weight=(weight[-1] if weight else "", ()),
        reason=reason,
        chosen=bool(left),
    )
