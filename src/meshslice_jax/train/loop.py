"""The training loop: batches in, losses out, a checkpoint now and then.

Every process of a job runs the same loop; batches are a function of the step, so nothing
has to be agreed on but where to begin, which process 0 decides. The loss of a step is
fetched when the next one is on its way, so that devices do not wait for the host.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from meshslice_jax import distributed
from meshslice_jax.train import text
from meshslice_jax.train.checkpoint import Checkpoints
from meshslice_jax.train.step import State, Trainer

#: Steps that a profile records: the second of the run, compiled by then, and those after it.
_PROFILE_FROM, _PROFILE_STEPS = 1, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What a run reads.

    Attributes:
      text: training and validation tokens.
      batch: sequences of a step.
      seq_len: tokens of a sequence.

    Raises:
      ValueError: a text that is too short for a sequence, or its held-out part is.
    """

    text: text.Text
    batch: int
    seq_len: int

    def __post_init__(self):
        for tokens in self.text:
            text.sequences(tokens, 1, self.seq_len, (0,))

    def pieces(self, seed: int, step: int) -> np.ndarray:
        """The training batch of a step."""
        return text.sequences(self.text.training, self.batch, self.seq_len, (seed, step))

    def held_out(self, count: int) -> Iterator[np.ndarray]:
        """The validation batches, always the same."""
        for index in range(count):
            yield text.sequences(self.text.validation, self.batch, self.seq_len, (0, index))


@dataclasses.dataclass(frozen=True)
class Record:
    """What is known of a step when its loss is.

    Attributes:
      step: its number, from 0.
      loss: before its update, in nats a token.
      tokens_per_s: since the step before, over all devices; None for the first.
    """

    step: int
    loss: float
    tokens_per_s: float | None


def begin(trainer: Trainer, checkpoints: Checkpoints | None, resume: bool) -> State:
    """The first state of a run, or that of its newest whole checkpoint.

    Raises:
      ValueError: the folder holds checkpoints and the run is not to be resumed, or those
        of another model. A field that an older version did not write is not compared.
    """
    if checkpoints is None:
        return trainer.init()
    if not resume and (steps := checkpoints.steps()):
        raise ValueError(
            f"{checkpoints.directory} holds checkpoints up to step {steps[0]}; resume, or use "
            "another folder"
        )
    checkpoints.clear()
    step = distributed.first_text(str(checkpoints.newest()) if distributed.is_first() else "")
    if step == "None":
        return trainer.init()
    folder, before = checkpoints.folder(int(step)), checkpoints.run_of(int(step))
    ours = checkpoints.run["model"]
    if any(before["model"].get(name, value) != value for name, value in ours.items()):
        raise ValueError(
            f"{folder} holds the model {before['model']}, and this run has {ours}; use another "
            "folder"
        )
    checkpoints.say(f"resumed from {folder}")
    return checkpoints.restore(int(step), trainer.abstract)


def train(
    trainer: Trainer,
    data: Data,
    state: State,
    *,
    on_step: Callable[[Record], None],
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int = 100,
    profile_dir: str | None = None,
) -> State:
    """Runs to the last step of the settings.

    Args:
      trainer: the model and its optimizer.
      data: what it is trained on.
      state: where to begin; its arrays are donated.
      on_step: is called in order with what is known of each step.
      checkpoints: where to save, if at all; the last state is saved too.
      checkpoint_every: steps between checkpoints.
      profile_dir: where to write a trace of a few steps.
    """
    settings, first = trainer.settings, int(state["step"])
    waiting, before = None, None
    with contextlib.ExitStack() as profile:
        for step in range(first, settings.steps):
            if profile_dir is not None and step == first + _PROFILE_FROM:
                profile.enter_context(jax.profiler.trace(profile_dir))
            pieces = text.on_mesh(data.pieces(settings.seed, step), trainer.data)
            state, loss = trainer.step(state, pieces)
            if waiting is not None:
                before = _tell(on_step, *waiting, before, data)
            waiting = step, loss
            distributed.step()
            if step == min(first + _PROFILE_FROM + _PROFILE_STEPS, settings.steps) - 1:
                jax.block_until_ready(state)
                profile.close()
            if checkpoints is not None and (
                (step + 1) % checkpoint_every == 0 or step + 1 == settings.steps
            ):
                checkpoints.save(step + 1, state)
        if waiting is not None:
            _tell(on_step, *waiting, before, data)
    if checkpoints is not None:
        checkpoints.close()
    return state


def _tell(on_step, step: int, loss: jax.Array, before: float | None, data: Data) -> float:
    """Waits for a loss and passes it on; returns when it came."""
    value, now = float(loss), time.perf_counter()
    speed = None if before is None else data.batch * data.seq_len / (now - before)
    on_step(Record(step, value, speed))
    return now


def evaluate(trainer: Trainer, data: Data, state: State, batches: int = 4) -> float:
    """The mean loss on validation batches, in nats a token."""
    losses = [
        float(trainer.evaluate(state["weights"], text.on_mesh(pieces, trainer.data)))
        for pieces in data.held_out(batches)
    ]
    return float(np.mean(losses))
