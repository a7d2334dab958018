"""A GPT whose FC layers run on a `ModelPlan`, forward and backward.

    tokens -> embed + positions -> blocks -> norm -> logits -> loss
    block:  x + out(attention(qkv(norm x))), then x + ff2(gelu(ff1(norm x)))
            (a gated MLP: x + down(silu(gate) * up))

Every product is `ms.dot_general` under its layer's plan, which flattens tokens; dX and dW run
the plan's backward products. Between the products nothing moves but what `sharded` lists,
and relayouts where the plan's neighbours disagree (see `layout`).

`apply_block` is the block as a function of its parameters; the modules for nnx (here) and
linen (`linen_block`) hold those parameters and nothing else. The blocks of a GPT are
stacked and run as a scan, each rematerialised in the backward pass if asked for.
Parameters are kept in `param_dtype` and converted to `dtype` where they are used, before
they move. Positions are learned and norms are LayerNorms, whatever the shape's family.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from meshslice_jax import product_log
from meshslice_jax.dot_general import dot_general
from meshslice_jax.gemm import placements
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.nn import sharded
from meshslice_jax.nn.layout import BlockLayout, block_layout
from meshslice_jax.nn.parameters import (
    Parameter,
    block_parameters,
    first_values,
    outer_parameters,
    stacked,
)

#: Layer -> name -> array, as `block_parameters` describes them.
Parameters = Mapping[str, Mapping[str, jax.Array]]


def project(layout: BlockLayout, name: str, x: jax.Array, weights: Mapping) -> jax.Array:
    """The FC layer `name` of x[batch, seq, k], as its plan says; [batch, seq, n]."""
    lhs, _, out = placements(layout.layers[name])
    found = _multiply(layout, name, layout.place(x, lhs), weights["kernel"], x.dtype)
    found = layout.place(found, out)
    return found + weights["bias"].astype(x.dtype) if "bias" in weights else found


def _multiply(layout: BlockLayout, name: str, x: jax.Array, kernel: jax.Array, dtype) -> jax.Array:
    """x[batch, seq, k] @ kernel[k, n] on the plan of the layer, or of the output layer."""
    product = layout.product(layout.layers.get(name, layout.head), mesh=layout.mesh)
    with jax.named_scope(name), product_log.layer(name, ("kernel", (0, 1))):
        return product(
            x, kernel.astype(x.dtype), (((2,), (0,)), ((), ())), preferred_element_type=dtype
        )


def apply_block(layout: BlockLayout, weights: Parameters, x: jax.Array) -> jax.Array:
    """One decoder block: x[batch, seq, hidden] to the same, placed as the stream."""
    attention, mlp = layout.shape.branches
    normed = sharded.layer_norm(x, **weights["attention_norm"], layout=layout)
    heads = sharded.attention(project(layout, attention[0], normed, weights["qkv"]), layout)
    out = project(layout, attention[1], heads, weights["out"])
    x = layout.place(x + out, layout.stream)
    normed = sharded.layer_norm(x, **weights["mlp_norm"], layout=layout)
    inner = project(layout, mlp[0], normed, weights[mlp[0]])
    if layout.shape.gated:
        pairs = inner.reshape(*inner.shape[:2], -1, 2)
        inner = jax.nn.silu(pairs[..., 0]) * pairs[..., 1]
    else:
        inner = jax.nn.gelu(inner)
    return layout.place(x + project(layout, mlp[1], inner, weights[mlp[1]]), layout.stream)


class _Layer(nnx.Module):
    """The arrays of one layer, made where they belong on the mesh."""

    def __init__(self, layout: BlockLayout, found: dict[str, Parameter], dtype, rngs: nnx.Rngs):
        for name, one in found.items():
            sharding = layout.sharding(one.spec)
            value = first_values(one, sharding, jnp.dtype(dtype), rngs.params())
            setattr(self, name, nnx.Param(value, spec=one.spec))


class GPTBlock(nnx.Module):
    """One decoder block (nnx), or several stacked ones.

    Args:
      plan: the plan of the model.
      mesh: its mesh; see `block_layout`.
      rngs: the stream "params" is used.
      count: None for one block, else the number of blocks in the stack.
      param_dtype: dtype of the parameters.
      product: of the FC layers; see `block_layout`.

    Raises: as for `block_layout`.
    """

    def __init__(
        self,
        plan: ModelPlan,
        mesh: Mesh,
        *,
        rngs: nnx.Rngs,
        count: int | None = None,
        param_dtype=jnp.float32,
        product: Callable = dot_general,
    ):
        self.layout = block_layout(plan, mesh, product=product)
        found = block_parameters(self.layout)
        for name, entries in (found if count is None else stacked(found, count)).items():
            setattr(self, name, _Layer(self.layout, entries, param_dtype, rngs))

    @property
    def weights(self) -> Parameters:
        """The arrays by layer and name."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x[batch, seq, hidden] through the block."""
        self.layout.check_call(x.shape[0])
        return apply_block(self.layout, self.weights, self.layout.place(x, self.layout.stream))


class GPT(nnx.Module):
    """A decoder-only transformer on a plan.

    Args:
      plan: what `ms.tune` gives; `plan.model` has the sizes, `plan.batch` sequences are a step.
      mesh: `ms.make_mesh(plan.mesh_shape)`, or with a further axis for the replicas of the
        plan: `ms.make_mesh((data_parallel, rows, cols), ("data", "row", "col"))`. Of a mesh
        with Explicit axes the devices are used, with Auto axes; none may be in context.
      rngs: the stream "params" is used.
      dtype: of activations, and of the products' operands; sums are in float32.
      param_dtype: of the parameters.
      remat: whether a block's activations are computed again in the backward pass instead
        of kept; only its input is.
      unroll: blocks per iteration of the scan.
      product: of the FC layers; see `block_layout`.

    Raises:
      ValueError: the model does not fit the mesh as planned, with every size at fault.
      NotImplementedError: see `block_layout`.
    """

    def __init__(
        self,
        plan: ModelPlan,
        mesh: Mesh,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        remat: bool = True,
        unroll: int = 1,
        product: Callable = dot_general,
    ):
        self.layout = block_layout(plan, mesh, product=product)
        self.dtype, self.remat, self.unroll = jnp.dtype(dtype), remat, unroll
        for name, entries in outer_parameters(self.layout).items():
            setattr(self, name, _Layer(self.layout, entries, param_dtype, rngs))
        self.blocks = GPTBlock(
            plan,
            mesh,
            rngs=rngs,
            count=plan.model.layers,
            param_dtype=param_dtype,
            product=product,
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits[batch, seq, vocab] in float32 of ids[batch, seq], vocab over feature axes.

        Raises:
          ValueError: a batch or a length that does not fit.
        """
        layout, (batch, seq) = self.layout, tokens.shape
        layout.check_call(batch)
        if seq > layout.shape.seq_len:
            raise ValueError(
                f"tokens have length {seq}, and the model has seq_len = {layout.shape.seq_len} "
                "positions; cut them, or make the model with a longer seq_len"
            )
        table = self.embedding.table[...].astype(self.dtype)
        positions = self.positions.table[...][:seq].astype(self.dtype)
        x = layout.place(sharded.embed(tokens, table, layout) + positions, layout.stream)
        x = self._run_blocks(x)
        norm = self.final_norm
        x = sharded.layer_norm(x, norm.scale[...], norm.bias[...], layout)
        kernel = table.T if layout.shape.tied_embeddings else self.head.kernel[...]
        logits = _multiply(layout, "head", x, kernel, jnp.float32)
        return layout.place(logits, layout.stream)

    def _run_blocks(self, x: jax.Array) -> jax.Array:
        def step(x, weights):
            return apply_block(self.layout, weights, x), None

        step = jax.checkpoint(step, prevent_cse=False) if self.remat else step
        return lax.scan(step, x, self.blocks.weights, unroll=self.unroll)[0]

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """The mean cross entropy in nats of targets[batch, seq] given tokens[batch, seq]."""
        return sharded.cross_entropy(self(tokens), targets, self.layout)
