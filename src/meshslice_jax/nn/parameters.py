"""The parameters of a decoder: name, shape, placement and first values, in one table.

Names and shapes are natural: kernels are [in, out], whatever the plan and the mesh, so a
checkpoint fits any of them. Two matrices hold several side by side, cut so that a shard of
columns holds whole pieces on any mesh:

    qkv      [hidden, kv_heads x (queries, key, value) x head_dim]: a group of query heads,
             then their key and value head, group by group
    gate_up  [hidden, ffn x (gate, up)]: each gate beside its up

Blocks are alike: those of a whole model are stacked, with the block first.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshslice_jax.gemm import placements
from meshslice_jax.nn.layout import BlockLayout

_STD = 0.02


class Parameter(NamedTuple):
    """Shape and placement of one array, and the normal distribution of its first values."""

    shape: tuple[int, ...]
    spec: P
    mean: float = 0.0
    std: float = 0.0


def _norm(layout: BlockLayout) -> dict[str, Parameter]:
    shape, spec = (layout.shape.hidden,), P(layout.stream[1])
    return {"scale": Parameter(shape, spec, mean=1.0), "bias": Parameter(shape, spec)}


def block_parameters(layout: BlockLayout) -> dict[str, dict[str, Parameter]]:
    """The parameters of one block, by layer.

    Layers that end a branch start smaller by sqrt(2 layers), as in GPT-2, so that the
    residual stream does not grow with depth. A gated MLP comes without biases, as in Llama.
    """
    model, found = layout.shape, {"attention_norm": _norm(layout), "mlp_norm": _norm(layout)}
    last = {branch[-1] for branch in model.branches}
    for name, (k, n) in model.fc_widths.items():
        _, rhs, out = placements(layout.layers[name])
        std = _STD / (2 * model.layers) ** 0.5 if name in last else _STD
        found[name] = {"kernel": Parameter((k, n), rhs, std=std)}
        if not model.gated:
            found[name]["bias"] = Parameter((n,), P(out[1]))
    return found


def stacked(found: dict[str, dict[str, Parameter]], count: int) -> dict[str, dict[str, Parameter]]:
    """Parameters of `count` blocks, the block's index first."""
    return {
        layer: {
            name: one._replace(shape=(count, *one.shape), spec=P(None, *one.spec))
            for name, one in entries.items()
        }
        for layer, entries in found.items()
    }


def outer_parameters(layout: BlockLayout) -> dict[str, dict[str, Parameter]]:
    """The parameters outside the blocks: embedding, positions, last norm, output layer."""
    model, (tokens, features) = layout.shape, layout.stream
    columns = layout.within_replica(tokens)
    table = Parameter((model.vocab, model.hidden), P(features, columns), std=_STD)
    positions = Parameter((model.seq_len, model.hidden), P(None, features), std=_STD)
    found = {
        "embedding": {"table": table},
        "positions": {"table": positions},
        "final_norm": _norm(layout),
    }
    if not model.tied_embeddings:
        kernel = Parameter((model.hidden, model.vocab), P(columns, features), std=_STD)
        found["head"] = {"kernel": kernel}
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def first_values(one: Parameter, sharding: NamedSharding, dtype, key: jax.Array) -> jax.Array:
    """A parameter's first values, made on the chips where they belong.

    They depend on the key alone, not on the mesh.

    Args:
      one: the parameter.
      sharding: its placement.
      dtype: its dtype.
      key: of its random numbers.
    """
    values = jnp.full(one.shape, one.mean, dtype)
    if one.std:
        values += one.std * jax.random.normal(key, one.shape, dtype)
    return lax.with_sharding_constraint(values, sharding)
