"""What a decoder computes between its products, chip by chip.

Each function is a shard_map over the whole mesh, so that the collectives in a compiled
block are those written here:

    layer_norm     forward: one all-reduce over the feature axes, of two numbers a token;
                   backward: one more like it, and the sums of scale and bias over tokens
    attention      none
    embed          gathers the table's columns over the token axes, reduce-scatters the
                   found rows over the feature axes (each is found on one chip); backward
                   the other way round
    cross_entropy  three numbers a token over the vocabulary's axes (maximum, sum of
                   exponentials, the target's logit), and the mean: logits stay where they are

Sums are in float32 whatever the dtype of the activations.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshslice_jax import collectives, compat
from meshslice_jax.nn.layout import BlockLayout
from meshslice_jax.site import axes_in

_EPSILON = 1e-5


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over mesh axes, marked as varying so that its cotangents are summed once."""
    return lax.pcast(lax.psum(x, axes), axes, to="varying") if axes else x


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, layout: BlockLayout) -> jax.Array:
    """Normalises the features of x[batch, seq, hidden] on the stream.

    Args:
      x: activations, placed as the stream.
      scale: [hidden], in float32.
      bias: [hidden], in float32.
      layout: the placements.
    """
    tokens, features = layout.stream

    def local(x, scale, bias):
        wide = x.astype(jnp.float32)
        sums = jnp.stack([wide.sum(-1), (wide * wide).sum(-1)])
        mean, square = _sum(sums, axes_in(features))[..., None] / layout.shape.hidden
        normal = (wide - mean) * lax.rsqrt(jnp.maximum(square - mean * mean, 0.0) + _EPSILON)
        return (normal * scale + bias).astype(x.dtype)

    place = P(tokens, None, features)
    with jax.named_scope("layer_norm"):
        return jax.shard_map(
            local, mesh=layout.mesh, in_specs=(place, P(features), P(features)), out_specs=place
        )(x, scale, bias)


def attention(qkv: jax.Array, layout: BlockLayout) -> jax.Array:
    """Causal self-attention of whole sequences and heads, where the qkv product left them.

    Args:
      qkv: [batch, seq, features], features being kv_heads groups of heads, in each its
        queries, its key and its value.
      layout: the placements.

    Returns:
      [batch, seq, heads * head_dim], heads in the order of the groups.
    """
    shape, (tokens, features) = layout.shape, layout.attention
    queries = shape.heads // shape.kv_heads

    # XLA:CPU (jaxlib 0.12) refuses some bfloat16 x bfloat16 = float32 products.
    widened = compat.platform_of(layout.mesh) == "cpu"

    def product(equation, a, b):
        if widened:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)

    def local(qkv):
        batch, seq, _ = qkv.shape
        groups = qkv.reshape(batch, seq, -1, queries + 2, shape.head_dim)
        q, k, v = groups[..., :queries, :], groups[..., queries, :], groups[..., queries + 1, :]
        scores = product("bsgqd,btgd->bgqst", q, k) * shape.head_dim**-0.5
        past = lax.broadcasted_iota(jnp.int32, (seq, seq), 0) >= lax.broadcasted_iota(
            jnp.int32, (seq, seq), 1
        )
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
        found = product("bgqst,btgd->bsgqd", weights.astype(v.dtype), v)
        return found.astype(qkv.dtype).reshape(batch, seq, -1)

    place = P(tokens, None, features)
    with jax.named_scope("attention"):
        return jax.shard_map(local, mesh=layout.mesh, in_specs=place, out_specs=place)(qkv)


def embed(tokens: jax.Array, table: jax.Array, layout: BlockLayout) -> jax.Array:
    """Rows of the embedding for tokens[batch, seq], placed as the stream.

    Args:
      tokens: ids, in any placement.
      table: [vocab, hidden], vocab over the feature axes, hidden over the token axes.
      layout: the placements.
    """
    place, features = layout.stream
    columns = layout.within_replica(place)
    token_axis, feature_axis = layout.axis(columns), layout.axis(features)
    exchanged = collectives.exchanges(compat.platform_of(layout.mesh))
    gather = collectives.gather_exchanged if exchanged else collectives.gather

    def scatter(part):
        if exchanged:
            return collectives.exchange_sum(part, feature_axis, 2, feature_axis.size, part.dtype)
        return collectives.reduce_scatter(part, feature_axis, 2)

    def local(tokens, table):
        table = gather(table, token_axis, 1)
        index = tokens - feature_axis.index() * table.shape[0]
        mine = (index >= 0) & (index < table.shape[0])
        rows = table[jnp.where(mine, index, 0)]
        part = jnp.where(mine[..., None], rows, jnp.zeros_like(rows))
        return scatter(part)

    with jax.named_scope("embed"):
        return jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(P(place, None), P(features, columns)),
            out_specs=P(place, None, features),
        )(tokens, table)


def cross_entropy(logits: jax.Array, targets: jax.Array, layout: BlockLayout) -> jax.Array:
    """The mean negative log-likelihood of the targets, in nats.

    Args:
      logits: [batch, seq, vocab], tokens and vocabulary over the stream's axes.
      targets: ids[batch, seq], in any placement.
      layout: the placements.
    """
    place, features = layout.stream
    axes, count = axes_in(features), targets.size

    def local(logits, targets):
        logits = logits.astype(jnp.float32)
        first = lax.axis_index(axes) * logits.shape[-1] if axes else 0
        biggest = lax.stop_gradient(logits).max(-1)
        biggest = lax.pmax(biggest, axes) if axes else biggest
        shifted = logits - biggest[..., None]
        ids = first + lax.broadcasted_iota(targets.dtype, logits.shape, 2)
        hit = jnp.where(ids == targets[..., None], shifted, jnp.zeros_like(shifted))
        sums = jnp.stack([jnp.exp(shifted).sum(-1), hit.sum(-1)])
        total, target = lax.psum(sums, axes) if axes else sums
        return lax.psum((jnp.log(total) - target).sum(), axes_in(place)) / count

    with jax.named_scope("cross_entropy"):
        return jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(P(place, None, features), P(place, None)),
            out_specs=P(),
        )(logits, targets)
