"""What `meshslice train` shows: the run, its progress, its end; process 0 alone speaks."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshslice_jax import distributed
from meshslice_jax.cli import common
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.train import log as logs
from meshslice_jax.train.loop import Record
from meshslice_jax.train.settings import TrainSettings


def print_run(
    console: Console,
    devices: list[jax.Device],
    plan: ModelPlan,
    settings: TrainSettings,
    entropy: float,
) -> None:
    """The devices, the model, how its layers run, and what a loss has to beat."""
    common.say(console, common.header(devices))
    if (banner := common.emulation_banner(devices)) is not None:
        common.say(console, banner)
    replicas = f", {plan.data_parallel} replicas" if plan.data_parallel > 1 else ""
    common.say(
        console,
        f"{plan.model.name}: {plan.model.weights:,} weights, vocabulary {plan.model.vocab} "
        f"(bytes), {settings.dtype} | mesh {plan.mesh_shape}{replicas} | batch {plan.batch} x "
        f"{plan.seq_len} tokens | "
        f"{settings.steps} steps",
    )
    for name, layer in plan.layers.items():
        one = layer.forward
        twin = ", rows and columns exchanged" if one.row_axis == "col" else ""
        common.say(
            console,
            f"  {name}: {one.algorithm} {one.dataflow.value}, {one.slice_count} slices{twin}",
        )
    common.say(console, f"unigram entropy of the text: {entropy:.4f} nats a byte")


class Recorder:
    """Shows each step and writes it to the log; process 0 only."""

    def __init__(self, steps: int, progress: Progress | None, file: IO[str] | None):
        self.steps, self.progress, self.file = steps, progress, file
        self.records: list[dict[str, Any]] = []
        self.task = progress and progress.add_task("", total=steps, note="")

    def add(self, record: Record) -> None:
        """The loss of a step is known."""
        fields = dataclasses.asdict(record)
        self.records.append(fields)
        if self.file is not None:
            logs.append(self.file, **fields)
        if not distributed.is_first():
            return
        speed = "" if record.tokens_per_s is None else f"  {record.tokens_per_s:,.0f} tokens/s"
        note = f"loss {record.loss:.4f}{speed}"
        if self.progress is not None:
            self.progress.update(self.task, completed=record.step, note=note)
        elif record.step % max(1, self.steps // 20) == 0 or record.step == self.steps:
            common.say(common.stdout(), f"step {record.step}/{self.steps}  {note}")


@contextlib.contextmanager
def progress_of(steps: int, first: int, log: Path | None) -> Iterator[Recorder]:
    """A bar on a terminal, a line now and then elsewhere."""
    console = common.stderr()
    with contextlib.ExitStack() as stack:
        file = bar = None
        if distributed.is_first():
            file = stack.enter_context(logs.open_log(log)) if log is not None else None
            if console.is_terminal:
                columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
                note = TextColumn("{task.fields[note]}")
                bar = stack.enter_context(Progress(*columns, note, console=console))
        recorder = Recorder(steps, bar, file)
        if bar is not None:
            bar.update(recorder.task, completed=first)
        yield recorder


def print_end(
    console: Console, records: list[dict[str, Any]], validation: float, entropy: float
) -> None:
    """The last losses, in nats a byte."""
    if records:
        last = [record["loss"] for record in records[-20:]]
        common.say(
            console,
            f"training loss, mean of the last {len(last)} steps: "
            f"{sum(last) / len(last):.4f} nats a byte",
        )
    common.say(
        console,
        f"validation loss: {validation:.4f} nats a byte; unigram entropy of the text: "
        f"{entropy:.4f}",
    )


def plot(records: list[dict[str, Any]], log: Path | None, entropy: float, path: Path) -> None:
    """Draws the losses of this run, or all that its log holds."""
    logs.plot_losses(logs.read_log(log) if log is not None else records, entropy, path)
