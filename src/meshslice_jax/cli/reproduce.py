"""`meshslice reproduce`: the paper's numbers beside ours."""

import collections
import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshslice_jax import reproduce as reproduction
from meshslice_jax.cli import common
from meshslice_jax.cli.tables import print_table
from meshslice_jax.hardware import HardwareSpec, hardware_spec


def reproduce(
    hardware: Annotated[
        str, typer.Option(help="Hardware profile: a name, or a path to its JSON.")
    ] = "tpu_v4_paper",
    wang: Annotated[
        str,
        typer.Option(
            help="Form of Wang's algorithm: (activations|weights|best|prototype)_ringed_"
            "(merged|unmerged)[_no_prologue][_one_way]."
        ),
    ] = str(reproduction.WangForm()),
    json: Annotated[Path | None, typer.Option(help="Write all rows as a JSON list.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write all rows as CSV, with difference and verdict.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Folder for plots, each a PNG with its data as CSV.")
    ] = None,
) -> None:
    """Print every published number beside ours, from one calibration.

    Missed tolerances are printed as missed; they do not change the exit code.
    """
    with common.usage_errors():
        common.check_outputs(json, csv, draws=plot is not None)
        spec = hardware_spec(hardware)
        rows = reproduction.reproduce(spec, parse_wang(wang))
    print_rows(common.stdout(), rows, spec)
    if json is not None:
        reproduction.write_json(rows, json)
    if csv is not None:
        reproduction.write_csv(rows, csv)
    if plot is not None:
        reproduction.write_plots(rows, plot, spec.name)


def parse_wang(text: str) -> reproduction.WangForm:
    """The form of Wang's algorithm that is written as `text`.

    Raises:
      ValueError: there is none.
    """
    choices = itertools.product(
        ("col", "row", "best", "prototype"), (True, False), (True, False), (2, 1)
    )
    for ring, merged, prologue, directions in choices:
        form = reproduction.WangForm(
            ring=ring, merged=merged, prologue=prologue, directions=directions
        )
        if str(form) == text:
            return form
    raise ValueError(
        f"--wang {text!r} is not of the form (activations|weights|best|prototype)_ringed_"
        f"(merged|unmerged)[_no_prologue][_one_way], such as {reproduction.WangForm()}"
    )


def print_rows(console: Console, rows: list[reproduction.Row], spec: HardwareSpec) -> None:
    """Prints the rows that can be compared, what was fitted, and how many were met."""
    shown = reproduction.compared(rows)
    common.say(console, common.profile_line(spec))
    console.print()
    print_table(
        console,
        reproduction.COLUMNS,
        [row.cells() for row in shown],
        expendable=("chips", "difference"),
        styles=["red" if row.verdict.startswith("missed") else None for row in shown],
    )
    console.print()
    kinds = collections.Counter(row.kind for row in shown)
    common.say(console, ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    verdicts = collections.Counter(row.verdict.partition(" (")[0] for row in shown)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items() if verdict)
    common.say(console, f"{len(shown)} of {len(rows)} rows have a number to compare: {counted}")
    common.say(
        console,
        "fitted: the profile's constants were chosen to meet these numbers; predicted: they "
        "follow from the same constants; reported: the calibration does not describe that setting",
    )
