"""The decoder block of `gpt` as a linen module: the same parameters, the same function."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen
from jax.sharding import Mesh

from meshslice_jax.dot_general import dot_general
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.nn.gpt import apply_block
from meshslice_jax.nn.layout import BlockLayout, block_layout
from meshslice_jax.nn.parameters import Parameter, block_parameters, first_values


class LinenGPTBlock(linen.Module):
    """One decoder block on a plan (linen): x[batch, seq, hidden] to the same.

    The parameter tree is `{layer: {"kernel", "bias"}}`, norms with "scale" and "bias", as in
    `GPTBlock`. It carries its placements as linen's partitioning metadata, for
    `linen.get_partition_spec` and `linen.get_sharding`.

    Attributes:
      plan: the plan of the model.
      mesh: its mesh; see `block_layout`.
      param_dtype: dtype of the parameters.
      product: of the FC layers; see `block_layout`.
    """

    plan: ModelPlan
    mesh: Mesh
    param_dtype: object = jnp.float32
    product: Callable = dot_general

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The block.

        Raises: as for `block_layout`.
        """
        layout = block_layout(self.plan, self.mesh, product=self.product)
        layout.check_call(x.shape[0])
        weights = {
            name: _Layer(layout, tuple(entries.items()), self.param_dtype, name=name)()
            for name, entries in block_parameters(layout).items()
        }
        return apply_block(layout, weights, layout.place(x, layout.stream))


class _Layer(linen.Module):
    """The arrays of one layer."""

    layout: BlockLayout
    found: tuple[tuple[str, Parameter], ...]
    dtype: object

    @linen.compact
    def __call__(self) -> dict[str, jax.Array]:
        def init(key, one: Parameter):
            values = first_values(one, self.layout.sharding(one.spec), jnp.dtype(self.dtype), key)
            return linen.Partitioned(values, names=tuple(one.spec), mesh=self.layout.mesh)

        return {name: self.param(name, init, one) for name, one in self.found}
