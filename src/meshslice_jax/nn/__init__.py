"""Flax on a plan: a GPT whose FC layers run on a `ModelPlan`, and models that others wrote.

Rooms of the GPT: `layout` reads every placement off the plan, `parameters` lists the
arrays, `sharded` holds what runs between the products, `gpt` the model. Of others' models:
`rules` match layers to plans, `linen_layers` and `nnx_layers` swap products, `rewrite` does
so in layers that have no hook, `placing` says where kernels lie, `weights` finds products of
parameters, `trace` and `explain` tell what ran. Importing the package does not import this
one, which imports Flax; `ms.nn` does.
"""

from meshslice_jax.nn.explain import Explanation as Explanation
from meshslice_jax.nn.explain import explain as explain
from meshslice_jax.nn.gpt import GPT as GPT
from meshslice_jax.nn.gpt import GPTBlock as GPTBlock
from meshslice_jax.nn.linen_block import LinenGPTBlock as LinenGPTBlock
from meshslice_jax.nn.linen_layers import ParallelModule as ParallelModule
from meshslice_jax.nn.parallelize import parallelize as parallelize
from meshslice_jax.nn.placing import Shardings as Shardings
from meshslice_jax.nn.rules import DEFAULT_RULES as DEFAULT_RULES
from meshslice_jax.nn.rules import with_axes as with_axes
