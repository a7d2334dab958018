"""The `meshslice` program: its commands by name."""

from typing import Annotated

import typer

import meshslice_jax
from meshslice_jax import distributed
from meshslice_jax.cli.bench import bench
from meshslice_jax.cli.compile import compile_
from meshslice_jax.cli.doctor import doctor
from meshslice_jax.cli.launch import launch
from meshslice_jax.cli.reproduce import reproduce
from meshslice_jax.cli.simulate import simulate
from meshslice_jax.cli.train import train
from meshslice_jax.cli.tune import tune

app = typer.Typer(
    name="meshslice",
    help="2D tensor-parallel matrix products on JAX meshes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(bench)
app.command()(doctor)
app.command()(tune)
app.command()(train)
app.command()(simulate)
app.command()(reproduce)
app.command("compile")(compile_)
app.command()(launch)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshslice-jax {meshslice_jax.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    """2D tensor-parallel matrix products on JAX meshes."""


def main() -> None:
    """Entry point of the `meshslice` script."""
    try:
        app()
    except SystemExit as end:
        if end.code:
            distributed.fail()
        raise
