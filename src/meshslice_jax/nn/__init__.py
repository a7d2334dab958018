"""Flax on a plan: a GPT whose FC layers run on a `ModelPlan`.

Rooms: `layout` reads every placement off the plan, `parameters` lists the arrays,
`sharded` holds what runs between the products, `gpt` the model. Importing the package
does not import this one, which imports Flax; `ms.nn` does.
"""

from meshslice_jax.nn.gpt import GPT as GPT
from meshslice_jax.nn.gpt import GPTBlock as GPTBlock
from meshslice_jax.nn.linen_block import LinenGPTBlock as LinenGPTBlock
