"""The log of a run: one JSON object a step, and the plot of its losses.

The fields of a line are those of `loop.Record`; "step" counts from 1, as checkpoints do.
A line is written as soon as its step's loss is known, so the log of a run that was killed
ends with its last step, perhaps in the middle of a line. A resumed run appends: steps
since the last checkpoint appear twice.
"""

import json
import os
from typing import IO, Any


def read_log(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a log in order; a last line that was cut off is left out."""
    found = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                found.append(json.loads(line))
    return found


def append(file: IO[str], **record: Any) -> None:
    """Writes a record and hands it to the operating system."""
    file.write(json.dumps(record) + "\n")
    file.flush()


def open_log(path: str | os.PathLike) -> IO[str]:
    """A log to append to; a last line that was cut off is removed."""
    if os.path.exists(path):
        with open(path, "rb+") as file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)
    return open(path, "a", encoding="utf-8")


def plot_losses(records: list[dict[str, Any]], entropy: float, path: str | os.PathLike) -> None:
    """Draws the loss by step, and the entropy that a model of frequencies reaches.

    Args:
      records: of a log; where a step appears twice the last counts.
      entropy: nats a token.
      path: of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = {record["step"]: record["loss"] for record in records}
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = sorted(losses)
    axes.plot(steps, [losses[step] for step in steps], label="training loss")
    axes.axhline(entropy, color="black", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats per token", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
