"""`meshslice simulate`: a plan on a simulated cluster, in order or with faults."""

from pathlib import Path
from typing import Annotated

import typer

from meshslice_jax.cli import common, plan_report, simulation_report
from meshslice_jax.faults import Faults
from meshslice_jax.plan_simulation import PlanSimulation, simulate_plan
from meshslice_jax.timeline import write_trace


def simulate(
    plan: Annotated[Path, typer.Option(help="A plan that `meshslice tune --out` wrote.")],
    hardware: Annotated[
        str | None, typer.Option(help="Hardware profile; by default the one that the plan names.")
    ] = None,
    jitter: Annotated[
        float, typer.Option(help="Mean delay of a local product, as a fraction of its time.")
    ] = 0.0,
    hop_jitter: Annotated[
        float, typer.Option(help="Mean delay of a hop of a link, as a fraction of its time.")
    ] = 0.0,
    slow_chip: Annotated[
        list[str] | None,
        typer.Option(help="ROW,COL:FACTOR, a chip that computes more slowly; may be repeated."),
    ] = None,
    slow_link: Annotated[
        list[str] | None,
        typer.Option(
            help="ROW,COL:LINK:FACTOR with LINK of row+, row-, col+, col-: a slower link of that "
            "chip; may be repeated."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws of jitter.", min=0)] = 0,
    depth: Annotated[
        int | None, typer.Option(help="Slices gathered ahead: 2 or 3; by default the plan's.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline that ui.perfetto.dev opens.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a PNG, with its data as CSV beside it.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write what was found as JSON.")] = None,
) -> None:
    """Simulate the FC products of a plan's block on every chip of its mesh.

    One replica is simulated, forward and backward, under the plan's block schedule.
    Everything printed is simulated or closed form; nothing is measured.
    """
    with common.usage_errors():
        common.check_outputs(trace, plot, json, draws=plot is not None)
        found = simulate_plan(
            common.read_plan(plan),
            hardware,
            faults=Faults(
                product_jitter=jitter,
                hop_jitter=hop_jitter,
                slow_chips=tuple(parse_chip(text) for text in slow_chip or []),
                slow_links=tuple(parse_link(text) for text in slow_link or []),
                seed=seed,
            ),
            buffer_depth=depth,
            record=trace is not None,
        )
        if trace is not None:
            _write_trace(found, trace)
    for note in plan_report.stale_notes(found.plan, found.hardware):
        common.say(common.stdout(), note)
    simulation_report.print_simulation(common.stdout(), found)
    if plot is not None:
        simulation_report.write_plot(found, plot)
    if json is not None:
        json.write_text(simulation_report.to_json(found))


def parse_chip(text: str) -> tuple[int, int, float]:
    """Reads "3,1:1.5" as (3, 1, 1.5).

    Raises:
      ValueError: another form.
    """
    place, _, factor = text.partition(":")
    try:
        row, col = map(int, place.split(","))
        return row, col, float(factor)
    except ValueError:
        raise ValueError(
            f"--slow-chip {text!r} is not of the form ROW,COL:FACTOR, such as 3,1:1.5"
        ) from None


def parse_link(text: str) -> tuple[int, int, str, float]:
    """Reads "3,1:row+:2" as (3, 1, "row+", 2.0).

    Raises:
      ValueError: another form.
    """
    try:
        place, link, factor = text.split(":")
        row, col = map(int, place.split(","))
        return row, col, link, float(factor)
    except ValueError:
        raise ValueError(
            f"--slow-link {text!r} is not of the form ROW,COL:LINK:FACTOR, such as 3,1:row+:2"
        ) from None


def _write_trace(found: PlanSimulation, path: Path) -> None:
    if len(found.timelines) > 1:
        shapes = ", ".join("x".join(map(str, one.mesh_shape)) for one in found.timelines)
        raise ValueError(
            f"--trace shows one mesh, and this plan's layers are simulated on {shapes}: it mixes "
            "1D and 2D algorithms"
        )
    write_trace(found.timelines[0], path)
