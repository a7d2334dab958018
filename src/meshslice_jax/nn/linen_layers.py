"""Linen modules on a plan, unmodified: their methods are intercepted as they are called.

`nn.intercept_methods` sees every method call of every submodule, with the module's path,
also under `nn.scan`, `nn.remat` and `nn.jit`. A layer with a `dot_general` field gets its
product for the length of the call, on the bound instance that Flax makes for one `apply`;
a layer without one is run through `rewrite`. Parameters, their names and the modules
themselves stay what they are.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import lift_direct_transform
from jax import lax

from meshslice_jax import product_log
from meshslice_jax.dot_general import DotGeneral
from meshslice_jax.nn import rewrite
from meshslice_jax.nn.placing import names
from meshslice_jax.nn.rules import Assignment, Choice

#: The assignment under which a model is traced: a key of JAX's caches, because nn.jit
#: keeps its traces by module, and the module does not know of it.
_assigned = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class ParallelModule:
    """A linen module whose products run as assigned; `init` and `apply` are the module's.

    Attributes:
      module: the module as it was.
      assignment: which of its layers run on which plan.
    """

    module: nn.Module
    assignment: Assignment

    def init(self, *args, **kwargs):
        """`module.init`; the products run as assigned there too."""
        with intercepted(self.assignment):
            return self.module.init(*args, **kwargs)

    def init_with_output(self, *args, **kwargs):
        """`module.init_with_output`."""
        with intercepted(self.assignment):
            return self.module.init_with_output(*args, **kwargs)

    def apply(self, *args, **kwargs):
        """`module.apply`."""
        with intercepted(self.assignment):
            return self.module.apply(*args, **kwargs)


@contextlib.contextmanager
def intercepted(assignment: Assignment) -> Iterator[None]:
    """Runs linen modules as assigned, while it is in context."""
    rewriting: set[tuple[str, ...]] = set()
    interceptor = functools.partial(_intercept, assignment, rewriting)
    product_log.assigned(assignment)
    with _assigned(assignment), nn.intercept_methods(interceptor):
        yield


def _intercept(assignment: Assignment, rewriting: set, call, args, kwargs, context):
    module = context.module
    hooked = "dot_general" in module.__dataclass_fields__
    if context.method_name != "__call__" or module.path in rewriting:
        return call(*args, **kwargs)
    path = "/".join(module.path) or module.name or ""
    choice = assignment.choose(path, hooked=hooked)
    if hooked:
        with _hooked(module, path, choice), product_log.layer(path):
            return call(*args, **kwargs)
    if choice.op is None or not _owns_parameters(module):
        return call(*args, **kwargs)
    rewriting.add(module.path)
    try:
        with product_log.layer(path):
            return _rewritten(module, context.method_name, choice, path, args, kwargs)
    finally:
        rewriting.discard(module.path)


@contextlib.contextmanager
def _hooked(module: nn.Module, path: str, choice: Choice) -> Iterator[None]:
    """The module with the chosen product, which it reads from its fields when called."""
    if choice.op is None and not product_log.is_recording():
        yield
        return
    fields = [f for f in ("dot_general", "dot_general_cls") if f in module.__dataclass_fields__]
    before = {field: getattr(module, field) for field in fields}
    after = swapped(before, choice)
    for field in fields:  # the fields of a module are frozen
        object.__setattr__(module, field, after.get(field))
    try:
        yield
    finally:
        for field, value in before.items():
            object.__setattr__(module, field, value)


def swapped(before: dict[str, Any], choice: Choice) -> dict[str, Any]:
    """What a layer's `dot_general` and `dot_general_cls` are to be; the class goes first."""
    if choice.op is not None:
        return {"dot_general": choice.op}
    if before.get("dot_general_cls") is not None:
        return {"dot_general_cls": UnplannedClass(before["dot_general_cls"], choice)}
    return {"dot_general": unplanned(before["dot_general"], choice)}


@dataclasses.dataclass(frozen=True)
class Unplanned:
    """The layer's own product, recorded."""

    product: Any
    choice: Choice

    def __call__(self, lhs, rhs, dimension_numbers, *args, **kwargs):
        with jax.named_scope(product_log.DENSE):
            out = self.product(lhs, rhs, dimension_numbers, *args, **kwargs)
        product_log.record(
            product_log.Product(
                lhs_shape=lhs.shape,
                rhs_shape=rhs.shape,
                out_shape=out.shape,
                rhs_contracted=tuple(dimension_numbers[0][1]),
                reason=self.choice.reason,
                chosen=self.choice.chosen,
            )
        )
        return out


@dataclasses.dataclass(frozen=True)
class UnplannedClass:
    """The layer's own class of products, whose instance is recorded."""

    cls: Any
    choice: Choice

    def __call__(self):
        return unplanned(self.cls(), self.choice)


def unplanned(own: Any, choice: Choice) -> Any:
    """The layer's own product (None is lax's), recorded; one on a plan records itself."""
    return own if isinstance(own, DotGeneral) else Unplanned(own or lax.dot_general, choice)


def _owns_parameters(module: nn.Module) -> bool:
    """Whether the module holds arrays itself; before they are made nobody can say."""
    found = module.variables.get("params", {})
    return not found or any(not hasattr(leaf, "items") for leaf in found.values())


def _rewritten(module, method: str, choice: Choice, path: str, args, kwargs):
    """A module's method with the products of its own parameters replaced."""
    return lift_direct_transform(
        functools.partial(_lifted, choice, path),
        (getattr(type(module), method),),
        module,
        *args,
        multi_scope=False,
        **kwargs,
    )


def _lifted(choice: Choice, path: str, method, scope, *args, **kwargs):
    """A lifted transformation in Flax's sense: `rewrite.run` with a scope's variables."""

    def inner(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
        def pure(variables, *args, **kwargs):
            inner_scope = scope_fn(variables, rngs)
            result = method(inner_scope, *args, **kwargs)
            return result, repack_fn(inner_scope)

        return rewrite.run(pure, variables, args, kwargs, op=choice.op, path=path, name_of=_own)

    packed = lift.pack(inner, (True,), (True,), (True,), name="planned", enable_kwargs=True)
    return packed(scope, *args, **kwargs)


def _own(keys: tuple) -> str | None:
    """The name of a parameter that the layer itself holds: one below "params"."""
    found = names(keys)
    if "params" in found and len(found) - found.index("params") == 2:
        return found[-1]
    return None
