"""What the benchmark scripts share: how a script becomes a command."""

from collections.abc import Callable

import typer


def run(command: Callable[..., None]) -> None:
    """Runs a command of the package with this script's arguments.

    Each script asks one question and takes the options of that command; devices are
    emulated before JAX starts, so scripts import nothing that computes.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    app()
