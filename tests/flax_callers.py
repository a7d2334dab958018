"""The table of callers: every way in which Flax and jnp take a product as an argument.

A caller makes its parameters (small integers) and a function of (parameters, x) that uses
the product it is given. The conformance suite compares each with `lax.dot_general`, and
docs/flax.md shows the table that `support_table` prints.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import meshslice_jax as ms
from meshslice_jax import product_log
from reference import small_integers

#: Input of most callers: batch, sequence, features. 24 = 3 heads of 8 divides every mesh,
#: 3 heads do not.
SHAPE = (4, 4, 24)


@dataclasses.dataclass(frozen=True)
class Caller:
    """One row of the table.

    Attributes:
      name: what a user writes.
      build: product -> (params -> (params, x) -> out) as (parameter tree of shapes and
        dtypes, function).
      shape: shape of x.
      note: what is special about it.
    """

    name: str
    build: Callable[[Any], tuple[Any, Callable]]
    shape: tuple[int, ...] = SHAPE
    note: str = ""


def mixing(query, key, value, *args, **kwargs):
    """Attention without a softmax, so that integers stay integers."""
    return query + 2 * key - value


def linen(module: Callable[[Any], nn.Module], shape=SHAPE):
    """A builder for a linen module made with the product."""

    def build(product):
        made = module(product)
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        params = jax.eval_shape(lambda x: made.init(jax.random.key(0), x), x)
        return params, made.apply

    return build


def nnx_module(module: Callable[[Any, nnx.Rngs], nnx.Module], prepare=lambda module: None):
    """A builder for an nnx module made with the product."""

    def build(product):
        graph, state = nnx.split(nnx.eval_shape(lambda: module(product, nnx.Rngs(0))))
        params, rest = nnx.split_state(state, nnx.Param, ...)

        def apply(params, x):
            made = nnx.merge(graph, params, rest)
            prepare(made)
            return made(x)

        return params, apply

    return build


class _Block(nn.Module):
    product: Any

    @nn.compact
    def __call__(self, x, _):
        return x - nn.Dense(24, dot_general=self.product)(x) % 3, None


def _scanned(product):
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(_Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            return layers(product)(x, None)[0]

    return Layers()


def _einsum(product):
    params = {"w": jax.ShapeDtypeStruct((24, 3, 8), jnp.float32)}
    return params, lambda p, x: jnp.einsum("bsh,hnd->bsnd", x, p["w"], _dot_general=product)


CALLERS = (
    Caller("linen.Dense", linen(lambda f: nn.Dense(24, dot_general=f))),
    Caller(
        "linen.Dense(dot_general_cls=)",
        linen(lambda f: nn.Dense(24, dot_general_cls=functools.partial(_same, f))),
        note="the class is called without arguments",
    ),
    Caller("linen.Dense, one vector", linen(lambda f: nn.Dense(24, dot_general=f), (24,)), (24,)),
    Caller(
        "linen.Dense, batch 1",
        linen(lambda f: nn.Dense(24, dot_general=f), (1, 1, 24)),
        (1, 1, 24),
        "as at `init`",
    ),
    Caller(
        "linen.Dense(dtype=bfloat16)",
        linen(lambda f: nn.Dense(24, dtype=jnp.bfloat16, dot_general=f)),
        note="float32 parameters, cast before the product",
    ),
    Caller(
        "linen.Dense, odd sizes",
        linen(lambda f: nn.Dense(7, dot_general=f), (3, 5, 10)),
        (3, 5, 10),
    ),
    Caller(
        "linen.DenseGeneral(features=(3, 8))",
        linen(lambda f: nn.DenseGeneral((3, 8), dot_general=f)),
        note="3 heads on 4 columns: the flattened 24 divide",
    ),
    Caller(
        "linen.DenseGeneral(axis=(-2, -1))",
        linen(lambda f: nn.DenseGeneral(24, axis=(-2, -1), dot_general=f), (4, 4, 3, 8)),
        (4, 4, 3, 8),
    ),
    Caller(
        "linen.DenseGeneral(batch_dims=(0,))",
        linen(lambda f: nn.DenseGeneral(24, batch_dims=(0,), dot_general=f)),
        note="several products",
    ),
    Caller(
        "linen.MultiHeadDotProductAttention",
        linen(
            lambda f: nn.MultiHeadDotProductAttention(
                3, qkv_dot_general=f, out_dot_general=f, attention_fn=mixing
            )
        ),
        note="`qkv_dot_general`, `out_dot_general`",
    ),
    Caller("linen.scan(linen.remat(...))", linen(_scanned), note="kernels stacked over layers"),
    Caller("nnx.Linear", nnx_module(lambda f, r: nnx.Linear(24, 24, dot_general=f, rngs=r))),
    Caller(
        "nnx.Linear(preferred_element_type=float32)",
        nnx_module(
            lambda f, r: nnx.Linear(
                24,
                24,
                dtype=jnp.bfloat16,
                preferred_element_type=jnp.float32,
                use_bias=False,
                dot_general=f,
                rngs=r,
            )
        ),
        note="bfloat16 operands, float32 result",
    ),
    Caller(
        "nnx.LinearGeneral(24, (3, 8))",
        nnx_module(lambda f, r: nnx.LinearGeneral(24, (3, 8), dot_general=f, rngs=r)),
    ),
    Caller(
        "nnx.LinearGeneral((3, 8), 24, axis=(-2, -1))",
        nnx_module(
            lambda f, r: nnx.LinearGeneral((3, 8), 24, axis=(-2, -1), dot_general=f, rngs=r)
        ),
        (4, 4, 3, 8),
    ),
    Caller(
        "nnx.MultiHeadAttention",
        nnx_module(
            lambda f, r: nnx.MultiHeadAttention(
                3,
                24,
                qkv_dot_general=f,
                out_dot_general=f,
                attention_fn=mixing,
                decode=False,
                rngs=r,
            )
        ),
        note="`qkv_dot_general`, `out_dot_general`",
    ),
    Caller("jnp.einsum(_dot_general=)", _einsum),
)


def _same(product):
    return product


def arguments(caller: Caller, params: Any) -> tuple[Any, np.ndarray]:
    """Small integers for a caller's parameters and input."""
    leaves, structure = jax.tree.flatten(params)
    filled = [small_integers(7 + i, *leaf.shape) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, filled), small_integers(1, *caller.shape)


def value_and_gradients(callers, product):
    """One program: (parameters, x) of each caller -> value, dtype-true gradients of both."""
    functions = [caller.build(product)[1] for caller in callers]

    def loss(arrays):
        outs = [f(params, x) for f, (params, x) in zip(functions, arrays, strict=True)]
        return sum((out.astype(jnp.float32) ** 2).sum() for out in outs), outs

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def support_table() -> str:
    """What each caller passes and what becomes of it, in Markdown; nothing is computed."""
    plan = ms.GemmPlan(slice_count=2)
    product = ms.dot_general(plan, mesh=ms.make_mesh((2, 4)), pad=True, on_unsupported="dense")
    lines = ["| caller | lhs x rhs | runs | |", "|---|---|---|---|"]
    for caller in CALLERS:
        params, function = caller.build(product)
        with product_log.recording() as log:
            jax.eval_shape(function, params, jax.ShapeDtypeStruct(caller.shape, jnp.float32))
        for found in dict.fromkeys((p.lhs_shape, p.rhs_shape, p.reason, p.trimmed) for p in log):
            lhs, rhs, reason, trimmed = found
            runs = "on the plan" if reason is None else "raises, or dense"
            if trimmed:
                runs += ", padded with `pad=True`"
            shapes = f"{list(lhs)} x {list(rhs)}"
            lines.append(f"| `{caller.name}` | {shapes} | {runs} | {caller.note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    ms.emulate_devices(8)
    print(support_table(), end="")
