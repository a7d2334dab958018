"""Text as tokens: bytes, and batches that are a function of the step.

A byte is a token, so there is nothing to learn or to download. The default text is one that
every Python installation carries, the help topics of `pydoc`. A batch is drawn from the
step's own random numbers: a run that is resumed at step n sees what an uninterrupted one
saw there, on any mesh and in any number of processes.
"""

import math
import os
from typing import NamedTuple

import jax
import numpy as np

#: Tokens are bytes.
VOCAB = 256


class Text(NamedTuple):
    """Tokens to train on, and the end of the text, which is kept for validation."""

    training: np.ndarray
    validation: np.ndarray


def load_text(path: str | os.PathLike | None = None, held_out: float = 0.05) -> Text:
    """The bytes of a file, or of Python's help topics.

    Args:
      path: a file; None is `pydoc_data.topics`.
      held_out: the fraction at the end that is kept for validation.

    Raises:
      ValueError: the file cannot be read.
    """
    if path is None:
        import pydoc_data.topics

        topics = pydoc_data.topics.topics
        data = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise ValueError(f"text {os.fspath(path)} cannot be read: {error.strerror}") from None
    tokens = np.frombuffer(data, np.uint8)
    cut = len(tokens) - int(len(tokens) * held_out)
    return Text(tokens[:cut], tokens[cut:])


def unigram_entropy(tokens: np.ndarray) -> float:
    """Nats a token of a model that knows the frequencies of the tokens and nothing else."""
    counts = np.bincount(tokens, minlength=VOCAB)
    shares = counts[counts > 0] / counts.sum()
    return -sum(share * math.log(share) for share in shares.tolist())


def sequences(tokens: np.ndarray, batch: int, seq_len: int, seed: tuple[int, ...]) -> np.ndarray:
    """Random pieces [batch, seq_len + 1] of a text: inputs, and targets one further.

    Args:
      tokens: the text.
      batch: pieces.
      seq_len: tokens of a piece, without its last target.
      seed: of the draw, such as (seed of the run, step).

    Raises:
      ValueError: the text is shorter than a piece.
    """
    if len(tokens) <= seq_len + 1:
        raise ValueError(
            f"a text of {len(tokens)} tokens has no pieces of {seq_len + 1}; use a longer text or "
            "a smaller seq_len"
        )
    starts = np.random.default_rng(seed).integers(0, len(tokens) - seq_len, batch)
    return tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)


def on_mesh(pieces: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Host data that every process has, as one array over the devices of all of them."""
    return jax.make_array_from_callback(pieces.shape, sharding, lambda index: pieces[index])
