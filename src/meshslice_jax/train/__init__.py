"""Training a GPT on a plan: text, one compiled step, a loop, checkpoints.

`plan` chooses how the model runs on a mesh, `text` makes batches, `step` compiles the
update, `loop` runs it, `checkpoint` saves and restores, `log` keeps the losses. The command
`meshslice train` puts them together. Nothing here is needed to train a model of one's own:
`nn.GPT` is an ordinary module.
"""

from meshslice_jax.train.checkpoint import Checkpoints as Checkpoints
from meshslice_jax.train.loop import Data as Data
from meshslice_jax.train.loop import Record as Record
from meshslice_jax.train.loop import begin as begin
from meshslice_jax.train.loop import evaluate as evaluate
from meshslice_jax.train.loop import train as train
from meshslice_jax.train.plan import byte_gpt as byte_gpt
from meshslice_jax.train.plan import training_plan as training_plan
from meshslice_jax.train.settings import TrainSettings as TrainSettings
from meshslice_jax.train.step import Trainer as Trainer
from meshslice_jax.train.step import make_trainer as make_trainer
from meshslice_jax.train.text import load_text as load_text
from meshslice_jax.train.text import unigram_entropy as unigram_entropy
