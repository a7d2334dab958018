"""A line of what was measured over the wire; its files."""

import csv
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshslice_jax.timing import Samples


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One variant of one pass at one rate; all times are measured, medians over rounds.

    `ratio_to_gspmd` is the median of the ratios of the same round, `ratio_low` and
    `ratio_high` the smallest and the largest. `hidden` is what part of the smaller of
    compute and communication was hidden. `compute_ms` and `communication_ms` were measured
    in the same rounds, `comm_over_compute` is their ratio; `rate_mbit` is the links'.
    `block_size` is that of MeshSlice's slices, null the largest; `rhs_layout` is how the weight
    is stored.
    """

    algorithm: str
    dataflow: str
    slice_count: int
    pass_: str = msgspec.field(name="pass")
    comm_over_compute: float
    ms: float
    ratio_to_gspmd: float
    ratio_low: float
    ratio_high: float
    hidden: float
    repeats: int
    gather_order: str
    block_size: int | None
    rhs_layout: str
    mesh: str
    m: int
    n: int
    k: int
    rate_asked: str
    rate_mbit: float
    compute_ms: float
    communication_ms: float


def statistics_of(
    own: Samples, gspmd: Samples, compute: Samples, communication: Samples
) -> dict[str, float]:
    """The measured fields of a record."""
    ratios = own.ratios_to(gspmd)
    smaller = min(compute.median_s, communication.median_s)
    hidden_s = compute.median_s + communication.median_s - own.median_s
    return {
        "comm_over_compute": communication.ratio_to(compute),
        "ms": own.median_s * 1e3,
        "ratio_to_gspmd": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "hidden": hidden_s / smaller,
        "repeats": len(own.seconds),
        "compute_ms": compute.median_s * 1e3,
        "communication_ms": communication.median_s * 1e3,
    }


def write_records(path: Path, records: Sequence[Record]) -> None:
    """A JSON list with one record on each line; the file is whole at any time."""
    lines = ",\n".join(json.dumps(msgspec.to_builtins(record)) for record in records)
    beside = path.with_name(path.name + ".part")
    beside.write_text(f"[\n{lines}\n]\n")
    beside.replace(path)


def read_records(path: Path) -> list[Record]:
    """What `write_records` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=list[Record])


def label(record: Record) -> str:
    """The variant of a record in a few words."""
    words = [record.algorithm]
    if record.algorithm.startswith("meshslice"):
        words.append(f"S={record.slice_count}")
        if record.gather_order == "free":
            words.append("free order")
        if record.block_size is not None:
            words.append(f"strided B={record.block_size}")
        if record.rhs_layout != "natural":
            words.append("stored")
    return " ".join(words)


def write_plot(path: Path, records: Sequence[Record]) -> None:
    """Ratios to GSPMD with their spread, a panel for each dataflow, pass and rate.

    The records that were drawn are written beside it as CSV.
    """
    from matplotlib.figure import Figure  # an extra: imported only where it is asked for

    panels: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in records:
        line = panels.setdefault((record.dataflow, record.pass_), {})
        line.setdefault(record.rate_asked, []).append(record)
    columns = max((len(line) for line in panels.values()), default=1)
    figure = Figure(figsize=(4.5 * columns, 3.2 * max(len(panels), 1)), layout="constrained")
    grid = figure.subplots(max(len(panels), 1), columns, squeeze=False)
    for axes, ((dataflow, pass_), line) in zip(grid, panels.items(), strict=False):
        for axis, found in zip(axes, line.values(), strict=False):
            _draw(axis, found)
            times = f"communication {found[0].comm_over_compute:.2f} x compute"
            axis.set_title(f"{dataflow} {pass_}, {times}", loc="left", fontsize=8)
        for axis in axes[len(line) :]:
            axis.set_axis_off()
    figure.savefig(path, dpi=150)
    with path.with_suffix(".csv").open("w", newline="") as file:
        names = [field.encode_name for field in msgspec.structs.fields(Record)]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(msgspec.to_builtins(record) for record in records)


def _draw(axis, found: Sequence[Record]) -> None:
    ratios = [record.ratio_to_gspmd for record in found]
    below = [record.ratio_to_gspmd - record.ratio_low for record in found]
    above = [record.ratio_high - record.ratio_to_gspmd for record in found]
    axis.barh([label(record) for record in found], ratios, xerr=[below, above], capsize=2)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_xlabel("time / GSPMD's, measured: median, min-max of rounds", fontsize=7)
    axis.tick_params(labelsize=7)
