"""The training loop: batches in, losses out, a checkpoint now and then.

Every process of a job runs the same loop; batches are a function of the step, so nothing
has to be agreed on but where to begin, which process 0 decides. The loss of a step is
fetched when the next one is on its way, so that devices do not wait for the host.

Steps are numbered by how many the state has made when they end: 1 is the first, a checkpoint
of step 100 was saved after step 100, and a run that goes on with it begins with step 101.
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
      step: its number, from 1.
      loss: before its update, in nats a token.
      tokens_per_s: since the step before, over all devices, without what the loop waits for
        between them (a checkpoint, a profile); None for the first of a run.
    """

    step: int
    loss: float
    tokens_per_s: float | None


class _Losses:
    """Losses of steps on their way, and the clock of those that came."""

    def __init__(self, on_step: Callable[[Record], None], tokens: int):
        self.on_step, self.tokens = on_step, tokens
        self.coming: tuple[int, jax.Array] | None = None
        self.since: float | None = None

    def add(self, step: int, loss: jax.Array) -> None:
        """A step was sent to the devices: the one before it is told."""
        self.tell()
        self.coming = step, loss

    def tell_if_known(self) -> None:
        """Before a step is sent: where devices wait for it, or sending one runs it (on CPU)."""
        if self.coming is not None and self.coming[1].is_ready():
            self.tell()

    def tell(self) -> None:
        """Waits for the loss that is on its way, if one is, and passes it on."""
        if self.coming is None:
            return
        step, value, now = self.coming[0], float(self.coming[1]), time.perf_counter()
        speed = None if self.since is None else self.tokens / (now - self.since)
        self.on_step(Record(step, value, speed))
        self.coming, self.since = None, now

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around what belongs to no step: told first, and the clock goes on after it."""
        self.tell()
        yield
        if self.since is not None:
            self.since = time.perf_counter()


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
    profiled = first + _PROFILE_FROM if profile_dir is not None else None
    losses = _Losses(on_step, data.batch * data.seq_len)
    with contextlib.ExitStack() as profile:
        for made in range(first, settings.steps):
            if made == profiled:
                with losses.pause():
                    profile.enter_context(jax.profiler.trace(profile_dir))
            pieces = text.on_mesh(data.pieces(settings.seed, made), trainer.data)
            losses.tell_if_known()
            state, loss = trainer.step(state, pieces)
            step = made + 1
            losses.add(step, loss)
            distributed.step()
            if profiled is not None and step == min(profiled + _PROFILE_STEPS, settings.steps):
                with losses.pause():
                    jax.block_until_ready(state)
                    profile.close()
            due = step % checkpoint_every == 0 or step == settings.steps
            if checkpoints is not None and due:
                with losses.pause():
                    checkpoints.save(step, state)
        losses.tell()
    if checkpoints is not None:
        checkpoints.close()
    return state


def evaluate(trainer: Trainer, data: Data, state: State, batches: int = 4) -> float:
    """The mean loss on validation batches, in nats a token."""
    losses = [
        float(trainer.evaluate(state["weights"], text.on_mesh(pieces, trainer.data)))
        for pieces in data.held_out(batches)
    ]
    return float(np.mean(losses))
