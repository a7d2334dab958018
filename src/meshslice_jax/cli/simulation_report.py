"""A simulated plan as a table, JSON and bars."""

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
from rich.console import Console

from meshslice_jax.block import BlockSchedule
from meshslice_jax.cli import common, plan_report
from meshslice_jax.cli.tables import milliseconds, print_table
from meshslice_jax.faults import Faults
from meshslice_jax.plan_simulation import PlanSimulation
from meshslice_jax.timeline import Timeline

#: Columns of the table of passes.
COLUMNS = (
    "layer",
    "pass",
    "flow",
    "algorithm",
    "S",
    "compute ms",
    "simulated ms",
    "closed form ms",
    "sim/closed",
    "lower ms",
    "upper ms",
    "exposed ms",
)
#: Columns that a narrow terminal does without, the first to go first.
EXPENDABLE = ("upper ms", "lower ms", "compute ms", "flow", "S")


def print_simulation(console: Console, found: PlanSimulation) -> None:
    """Prints a row for each layer and pass, their sum, and the slowest chip."""
    common.say(console, common.profile_line(found.hardware).replace("modelled", "simulated"))
    common.say(console, plan_report.plan_line(found.plan) + "; one replica's block is simulated")
    common.say(console, f"{_told(found.block, 'plain order')}; {_told(found.faults, 'no faults')}")
    console.print()
    print_table(console, COLUMNS, _rows(found), expendable=EXPENDABLE)
    console.print()
    common.say(
        console,
        f"block: {milliseconds(found.total_s)} ms simulated, {milliseconds(found.predicted_s)} ms "
        f"in closed form ({found.total_s / found.predicted_s - 1:+.2%}), "
        f"{milliseconds(found.math_s)} ms of products, {milliseconds(found.exposed_s)} ms exposed; "
        f"utilisation {found.utilisation:.1%}",
    )
    for timeline in found.timelines:
        common.say(console, _chips(timeline))
    _print_left_out(console, found)


def _told(record: BlockSchedule | Faults, none: str) -> str:
    """The fields of a record that are not their defaults, or `none`."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    plain = type(record)()
    changed = [f"{name}={value}" for name, value in fields.items() if value != getattr(plain, name)]
    return ", ".join(changed) or none


def _rows(found: PlanSimulation) -> list[list[str]]:
    rows = []
    for one in found.passes:
        gemm = getattr(found.plan.layers[one.layer], one.name)
        predicted = one.predicted
        rows.append(
            [
                one.layer,
                one.name,
                plan_report.flow_of(gemm),
                gemm.algorithm,
                str(gemm.slice_count),
                milliseconds(predicted.math_s),
                milliseconds(one.simulated_s),
                milliseconds(predicted.total_s),
                f"{one.simulated_s / predicted.total_s:.4f}",
                milliseconds(predicted.lower_bound_s),
                milliseconds(predicted.upper_bound_s),
                milliseconds(one.exposed_s),
            ]
        )
    return rows


def slowest_chip(timeline: Timeline) -> tuple[int, int]:
    """(row, col) of the chip whose products take longest; the first of equals."""
    return _place(timeline.busy_s["mxu"])


def last_chip(timeline: Timeline) -> tuple[int, int]:
    """(row, col) of the chip that is done last; the first of equals."""
    return _place(timeline.finish_s)


def _place(values: np.ndarray) -> tuple[int, int]:
    row, col = np.unravel_index(np.argmax(values), values.shape)
    return int(row), int(col)


def _chips(timeline: Timeline) -> str:
    """When chips are done, which is slowest, and what they are busy with."""
    mesh = "x".join(map(str, timeline.mesh_shape))
    first, last = timeline.finish_s.min(), timeline.finish_s.max()
    told = [f"{mesh} mesh: all chips are done at {milliseconds(last)} ms"]
    if last > first:
        told = [
            f"{mesh} mesh: the last chip, {last_chip(timeline)}, is done at "
            f"{milliseconds(last)} ms, the first at {milliseconds(first)} ms"
        ]
    products = timeline.busy_s["mxu"]
    if products.max() > products.min():
        told.append(
            f"the slowest chip, {slowest_chip(timeline)}, multiplies for "
            f"{milliseconds(products.max())} ms, the median chip for "
            f"{milliseconds(np.median(products))} ms"
        )
    busy = {name: values.mean() / timeline.total_s for name, values in timeline.busy_s.items()}
    told.append("busy on average: " + ", ".join(f"{k} {v:.0%}" for k, v in busy.items()))
    peak = timeline.peak_temporary_bytes / 1e6
    told.append(f"gathered slices and partial results at their peak: {peak:.1f} MB")
    return "; ".join(told)


def _print_left_out(console: Console, found: PlanSimulation) -> None:
    parts = {
        f"the gradients' all-reduce over {found.plan.data_parallel} replicas": found.data_parallel_s
    }
    if found.plan.predicted is not None:
        name = f"relayouts between layers (on {found.plan.hardware})"
        parts[name] = found.plan.predicted.relayout_s
    shown = [f"{name} {milliseconds(value)} ms" for name, value in parts.items() if value]
    if shown:
        common.say(console, f"not simulated, closed form: {', '.join(shown)}")


def to_json(found: PlanSimulation) -> str:
    """What was found, as JSON text; times in seconds."""
    passes = [
        {
            "layer": one.layer,
            "pass": one.name,
            "simulated_s": one.simulated_s,
            "exposed_s": one.exposed_s,
            "predicted": dataclasses.asdict(one.predicted),
        }
        for one in found.passes
    ]
    meshes = [
        {
            "mesh_shape": list(one.mesh_shape),
            "total_s": one.total_s,
            "slowest_chip": slowest_chip(one),
            "last_chip": last_chip(one),
            "peak_temporary_bytes": one.peak_temporary_bytes,
            "finish_s": one.finish_s.tolist(),
        }
        for one in found.timelines
    ]
    fields = {
        "kind": "simulated",
        "model": found.plan.model.name,
        "hardware": found.hardware.name,
        "mesh_shape": list(found.plan.mesh_shape),
        "data_parallel": found.plan.data_parallel,
        "block_schedule": dataclasses.asdict(found.block),
        "faults": dataclasses.asdict(found.faults),
        "total_s": found.total_s,
        "math_s": found.math_s,
        "exposed_s": found.exposed_s,
        "closed_form_s": found.predicted_s,
        "data_parallel_s": found.data_parallel_s,
        "utilisation": found.utilisation,
        "passes": passes,
        "meshes": meshes,
    }
    return json.dumps(fields, indent=1) + "\n"


def write_plot(found: PlanSimulation, path: Path) -> None:
    """Bars of simulated beside closed-form times, with the bounds; data as CSV beside it."""
    from matplotlib.figure import Figure  # an extra: imported only where it is asked for

    labels = [f"{one.layer} {one.name}" for one in found.passes]
    simulated = [one.simulated_s * 1e3 for one in found.passes]
    closed = [one.predicted.total_s * 1e3 for one in found.passes]
    bounds = [
        [(one.predicted.total_s - one.predicted.lower_bound_s) * 1e3 for one in found.passes],
        [(one.predicted.upper_bound_s - one.predicted.total_s) * 1e3 for one in found.passes],
    ]
    figure = Figure(figsize=(8, 0.5 * len(labels) + 1.5), layout="constrained")
    axis, places = figure.subplots(), np.arange(len(labels))
    axis.barh(places - 0.2, simulated, 0.4, label="simulated")
    axis.barh(places + 0.2, closed, 0.4, xerr=bounds, capsize=2, label="closed form, bounds")
    axis.set_yticks(places, labels)
    axis.invert_yaxis()
    axis.set_xlabel(f"ms on {found.hardware.name}; nothing was measured")
    axis.set_title(f"{found.plan.model.name}, {found.plan.mesh_shape}", loc="left", fontsize=9)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_CSV_FIELDS)
        for one in found.passes:
            times = [getattr(one.predicted, name) for name in _CSV_FIELDS[4:]]
            writer.writerow([one.layer, one.name, one.simulated_s, one.exposed_s, *times])


_CSV_FIELDS = (
    "layer",
    "pass",
    "simulated_s",
    "simulated_exposed_s",
    "total_s",
    "math_s",
    "lower_bound_s",
    "upper_bound_s",
)
