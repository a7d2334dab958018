"""Results of a benchmark as tables, JSON, CSV and bars."""

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import msgspec
from rich.console import Console

from meshslice_jax import distributed
from meshslice_jax.bench import Candidate, Options, Pass, Row
from meshslice_jax.cli import common
from meshslice_jax.cli.tables import megabytes, number, print_table

#: Column titles of a case's table; those with a unit say whether it was measured.
COLUMNS = (
    "algorithm",
    "flow",
    "mesh",
    "m n k",
    "local m n k",
    "S",
    "block",
    "row MB",
    "col MB",
    "peak MB",
    "compile s",
    "median ms",
    "modelled ms",
    "min-max ms",
    "/gspmd",
    "/dense",
    "check",
)
#: Columns that a narrow terminal does without, the first to go first; files have them all.
EXPENDABLE = (
    *("block", "m n k", "min-max ms", "local m n k", "row MB", "col MB", "mesh"),
    *("modelled ms", "peak MB"),
)


def print_bench(
    options: Options,
    devices: list[jax.Device],
    results: Iterable[tuple[Pass, list[Candidate], list[Row]]],
    json_path: Path | None,
    plot_path: Path | None,
    notes: Sequence[str] = (),
) -> bool:
    """Prints results as they come and writes the files at the end, however it ends.

    Returns:
      Whether any candidate failed, or no plan ran at all.
    """
    console, rows = common.stdout(), []
    console.print(common.header(devices), soft_wrap=True, markup=False)
    if banner := common.emulation_banner(devices):
        console.print(banner, style="bold yellow", soft_wrap=True, markup=False)
    console.print(
        f"mesh {options.mesh_shape}, {options.repeats} interleaved rounds; ms and compile s are "
        "measured, MB (sent by one chip along an axis, held by one chip) are by the schedule; "
        "flow is the pass's own dataflow, after the layer's where they differ; /gspmd and "
        "/dense are medians of the ratios within each round",
        soft_wrap=True,
    )
    for note in (_projection_note(options), *notes):
        common.say(console, note)
    try:
        for case, found, measured in results:
            rows += measured
            _print_case(console, case, found, measured)
    finally:
        if json_path is not None and distributed.is_first():
            write_rows(json_path, rows)
    if plot_path is not None and distributed.is_first():
        write_plot(plot_path, rows)
    return _print_summary(console, rows)


def _projection_note(options: Options) -> str:
    if options.hardware is None:
        dtype = next(iter(options.layers.values())).lhs_dtype
        return f"modelled ms is empty: the default profile has no FLOP/s for operands of {dtype}"
    return (
        f"modelled ms is what the time model projects for this mesh of {options.hardware.name} "
        "chips; it was not measured"
    )


#: Rows that are no plans.
BASELINES = ("gspmd", "dense")


def title(case: Pass) -> str:
    """The forward product of a case in the form A[m,k] B[k,n], and its pass."""
    forward = case.forward
    return (
        f"{case.layer} {case.name}: A[m={forward.m},k={forward.k}] "
        f"B[k={forward.k},n={forward.n}], {forward.lhs_dtype}"
    )


def _print_case(console: Console, case: Pass, found: list[Candidate], rows: list[Row]) -> None:
    console.print()
    print_table(
        console,
        COLUMNS,
        [_cells(candidate, row) for candidate, row in zip(found, rows, strict=True)],
        title=title(case),
        expendable=EXPENDABLE,
        styles=["red" if row.status == "failed" else None for row in rows],
    )
    reasons: dict[tuple[str, str], list[str]] = {}
    for candidate, row in zip(found, rows, strict=True):
        if row.reason:
            label = " ".join(filter(None, (_flow(candidate), _slices(row))))
            reasons.setdefault((f"{row.status} {row.algorithm}", row.reason), []).append(label)
    for (what, reason), labels in reasons.items():
        text = f"  {what} {', '.join(labels)}: {reason}"
        console.print(text, soft_wrap=True, markup=False)


def _flow(candidate: Candidate) -> str:
    """The pass's own dataflow, after the layer's where they differ: rs>ls, rs>ls twin."""
    own, layer = candidate.row.dataflow, candidate.forward.dataflow.value
    if own is None:
        return ""
    twin = " twin" if candidate.forward.row_axis == "col" else ""
    return (own if own == layer else f"{layer}>{own}") + twin


def _slices(row: Row) -> str:
    return f"S={row.slice_count}" if row.slice_count else ""


def _cells(candidate: Candidate, row: Row) -> list[str]:
    local = " ".join(map(str, candidate.local)) if candidate.local else ""
    spread = "" if row.min_ms is None else f"{row.min_ms:.1f}-{row.max_ms:.1f}"
    return [
        row.algorithm,
        _flow(candidate),
        row.mesh,
        f"{row.m} {row.n} {row.k}",
        local,
        number(row.slice_count, "d"),
        number(row.block_size, "d"),
        megabytes(row.bytes_row),
        megabytes(row.bytes_col),
        megabytes(row.peak_bytes),
        number(row.compile_s, ".2f"),
        number(row.median_ms, ".2f"),
        number(row.projected_ms, ".4f"),
        spread,
        number(row.ratio_to_gspmd, ".2f"),
        number(row.ratio_to_dense, ".2f"),
        row.check or row.status,
    ]


def _print_summary(console: Console, rows: list[Row]) -> bool:
    """What ran, and how each algorithm did over all passes; whether anything went wrong."""
    if any(row.median_ms is not None for row in rows):
        console.print()
        print_table(console, SUMMARY, _totals(rows), title="fastest of each pass, measured")
    counts = {status: sum(row.status == status for row in rows) for status in _STATUSES}
    wrong = sum(row.check == "FAILED" for row in rows)
    nothing = not any(row.status == "ok" and row.algorithm not in BASELINES for row in rows)
    failed = counts["failed"] > 0 or nothing
    text = ", ".join(f"{count} {status}" for status, count in counts.items())
    text = f"{len(rows)} rows: {text}; {wrong} wrong answers"
    console.print()
    if nothing:
        text += "; no plan ran"
    console.print(text, style="red" if failed else "green")
    return failed


#: Column titles of the summary.
SUMMARY = ("algorithm", "passes", "sum of medians, ms", "median /gspmd", "median /dense")


def _totals(rows: list[Row]) -> list[list[str]]:
    """For each algorithm its fastest row of every pass, added up."""
    fastest: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row.median_ms is not None:
            best = fastest.setdefault(row.algorithm, {})
            key = row.layer, row.pass_
            if key not in best or row.median_ms < best[key].median_ms:
                best[key] = row
    return [
        [
            name,
            str(len(best)),
            number(sum(row.median_ms for row in best.values()), ".1f"),
            *(
                number(statistics.median(found) if found else None, ".2f")
                for found in (
                    [r.ratio_to_gspmd for r in best.values() if r.ratio_to_gspmd is not None],
                    [r.ratio_to_dense for r in best.values() if r.ratio_to_dense is not None],
                )
            ),
        ]
        for name, best in fastest.items()
    ]


_STATUSES = ("ok", "skipped", "failed")


def write_rows(path: Path, rows: list[Row]) -> None:
    """Rows as a JSON list, one on each line; without the brackets for a .jsonl file."""
    lines = [json.dumps(msgspec.to_builtins(row)) for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(line + "\n" for line in lines))
    else:
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def write_plot(path: Path, rows: list[Row]) -> None:
    """Bars of the measured medians with their spread, a panel for each layer and pass.

    The rows that were drawn are written beside it as CSV.
    """
    from matplotlib.figure import Figure  # an extra: imported only where it is asked for

    timed = [row for row in rows if row.median_ms is not None]
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in timed:
        panels.setdefault((row.layer, row.pass_), []).append(row)
    columns = max(len({pass_ for _, pass_ in panels}), 1)
    lines = -(-max(len(panels), 1) // columns)
    figure = Figure(figsize=(5 * columns, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, ((layer, pass_), found) in zip(axes, panels.items(), strict=False):
        median = [row.median_ms for row in found]
        below = [row.median_ms - row.min_ms for row in found]
        above = [row.max_ms - row.median_ms for row in found]
        axis.barh([_label(row) for row in found], median, xerr=[below, above], capsize=2)
        axis.invert_yaxis()
        axis.set_title(f"{layer} {pass_}", loc="left", fontsize=9)
        axis.set_xlabel("ms, measured: median, min-max", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.savefig(path, dpi=150)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.encode_name for field in msgspec.structs.fields(Row)])
        writer.writeheader()
        writer.writerows(msgspec.to_builtins(row) for row in timed)


def _label(row: Row) -> str:
    mesh = row.mesh if row.algorithm == "gspmd" else ""
    return " ".join(filter(None, (row.algorithm, row.dataflow, mesh, _slices(row))))
