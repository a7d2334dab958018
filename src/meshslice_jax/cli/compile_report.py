"""What `meshslice compile` prints and writes: tables, JSON, schedules, timelines."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from meshslice_jax.cli import common
from meshslice_jax.cli.tables import megabytes, milliseconds, print_table
from meshslice_jax.compiled.replay import Replay
from meshslice_jax.compiled.run import Compiled, CompiledBlock, Failed, Findings

Blocks = Mapping[str, CompiledBlock | str]
_COLUMNS = (
    "layer pass algorithm flow S form options async sync hidden copies_ms exposed_ms "
    "projected_ms x_FLOPs x_peer peak_MB planned_MB compile_s tried"
).split()
_EXPENDABLE = ("compile_s", "tried", "options", "planned_MB", "peak_MB")
_COLOURS = {"product": "tab:blue", "copy": "tab:orange", "wait": "tab:red"}


def banner(found: Findings) -> str:
    """What the numbers are."""
    study = found.study
    return (
        f"PROJECTED for {study.topology}, mesh {study.space.mesh_shape}, profile "
        f"{study.space.hardware.name}, {study.clock_hz / 1e9:.3f} GHz: compiled schedules and "
        f"cycles (jax {common.version_of('jax')}, libtpu {common.version_of('libtpu')}), links "
        "by a ring model; nothing was measured"
    )


def describe(row: Compiled | Failed) -> str:
    """One line about a candidate."""
    one = row.candidate
    text = (
        f"{row.layer} {row.pass_} {one.algorithm} {one.plan.dataflow.value} "
        f"S={one.plan.slice_count} {one.form} {one.option_set}: "
    )
    if isinstance(row, Failed):
        return text + f"failed, {row.reason.splitlines()[0][:200]}"
    return text + f"{milliseconds(row.projected_s)} ms, compiled in {row.compile_s:.1f} s"


def print_findings(
    console: Console, found: Findings, name: str, blocks: Blocks, sensitivity: bool
) -> None:
    """The fastest schedule of each product and algorithm, totals, and what failed."""
    common.say(console, f"{name}\n{banner(found)}\n")
    rows, peers = found.best(), _best_peers(found)
    cells = [_cells(found, row, peers.get(row.product)) for row in rows]
    print_table(console, _COLUMNS, cells, expendable=_EXPENDABLE)
    if found.choices():
        common.say(console, "")
        _print_totals(console, found, sensitivity)
    for rule, block in blocks.items():
        common.say(console, _block_line(found, rule, block))
    if found.failed:
        common.say(console, f"\n{len(found.failed)} candidates did not compile:")
        for one in found.failed:
            common.say(console, f"  {describe(one)}")


def _best_peers(found: Findings) -> dict[tuple[str, str], float]:
    """Product -> seconds of the fastest algorithm that is not MeshSlice."""
    fastest = {}
    for row in found.rows:
        if row.candidate.algorithm != "meshslice":
            known = fastest.get(row.product, float("inf"))
            fastest[row.product] = min(known, row.projected_s)
    return fastest


def _cells(found: Findings, row: Compiled, peer_s: float | None) -> list[str]:
    one, replay = row.candidate, row.replay
    return [
        row.layer,
        row.pass_,
        one.algorithm,
        one.plan.dataflow.value,
        str(one.plan.slice_count),
        one.form,
        one.option_set,
        str(replay.async_collectives),
        str(replay.sync_collectives),
        f"{replay.hidden:.2f}",
        milliseconds(replay.copies_s),
        milliseconds(replay.exposed_s),
        milliseconds(row.projected_s),
        f"{row.projected_s / row.ideal_s:.2f}",
        "" if peer_s is None else f"{row.projected_s / peer_s:.2f}",
        megabytes(row.peak_bytes),
        "" if row.planned_bytes is None else megabytes(row.planned_bytes),
        f"{row.compile_s:.1f}",
        str(found.tried(row.product, one.algorithm)),
    ]


def totals(found: Findings) -> list[dict]:
    """The sum over all products under each rule for choosing, and under other assumptions."""
    return [
        {
            "plan": rule,
            "projected_s": sum(row.projected_s for row in rows),
            "ideal_s": sum(row.ideal_s for row in rows),
            "variants": {
                name: sum(row.variants[name] for row in rows) for name in rows[0].variants
            },
        }
        for rule, rows in found.choices().items()
    ]


def _print_totals(console: Console, found: Findings, sensitivity: bool) -> None:
    sums = totals(found)
    names = list(sums[0]["variants"]) if sensitivity else []
    peers = [one["projected_s"] for one in sums if one["plan"] not in _OURS]
    columns = ["all products", "projected_ms", "x_FLOPs", "x_peer", *names]
    cells = []
    for one in sums:
        ratio = f"{one['projected_s'] / min(peers):.2f}" if peers else ""
        cells.append(
            [
                one["plan"],
                milliseconds(one["projected_s"]),
                f"{one['projected_s'] / one['ideal_s']:.2f}",
                ratio,
                *(milliseconds(one["variants"][name]) for name in names),
            ]
        )
    print_table(console, columns, cells)


_OURS = ("meshslice", "natural", "fixed", "tuned")


def _block_line(found: Findings, rule: str, block: CompiledBlock | str) -> str:
    if isinstance(block, str):
        return f"block as one program, {rule}: failed, {block.splitlines()[0][:200]}"
    parts = sum(row.projected_s for row in found.choices()[rule])
    return (
        f"block as one program, {rule}: {milliseconds(block.replay.projected_s)} ms, "
        f"{block.replay.projected_s / parts:.3f} of its products one by one; hidden "
        f"{block.replay.hidden:.2f}, exposed {milliseconds(block.replay.exposed_s)} ms, copies "
        f"{milliseconds(block.replay.copies_s)} ms, peak {megabytes(block.peak_bytes)} MB, "
        f"compiled in {block.compile_s:.0f} s"
    )


def to_json(found: Findings, blocks: Blocks) -> str:
    """What was found, as JSON text; times in seconds."""
    study = found.study
    fields = {
        "kind": "projected from compiled schedules, not measured",
        "topology": str(study.topology),
        "mesh_shape": list(study.space.mesh_shape),
        "hardware": study.space.hardware.name,
        "clock_hz": study.clock_hz,
        "versions": {name: common.version_of(name) for name in ("jax", "jaxlib", "libtpu")},
        "products": [_product(found, row) for row in found.best()],
        "totals": totals(found),
        "blocks": [_block(rule, block) for rule, block in blocks.items()],
        "tried": [_tried(row) for row in found.rows],
        "failed": [
            {"layer": one.layer, "pass": one.pass_, "reason": one.reason, **_setting(one)}
            for one in found.failed
        ],
    }
    return json.dumps(fields, indent=1) + "\n"


def _setting(row: Compiled | Failed) -> dict:
    one = row.candidate
    return {
        "algorithm": one.algorithm,
        "dataflow": one.plan.dataflow.value,
        "slice_count": one.plan.slice_count,
        "form": one.form,
        "option_set": one.option_set,
        "options": dict(one.options),
    }


def _tried(row: Compiled) -> dict:
    replay = row.replay
    return {
        "layer": row.layer,
        "pass": row.pass_,
        **_setting(row),
        "layout": row.layout,
        "projected_s": row.projected_s,
        "ideal_s": row.ideal_s,
        "hidden": replay.hidden,
        "communication_s": replay.communication_s,
        "exposed_s": replay.exposed_s,
        "products_s": replay.product_s,
        "copies_s": replay.copies_s,
        "sync_collectives": replay.sync_collectives,
        "async_collectives": replay.async_collectives,
        "peak_bytes": row.peak_bytes,
        "planned_bytes": row.planned_bytes,
        "compile_s": row.compile_s,
        "variants": dict(row.variants),
    }


def _product(found: Findings, row: Compiled) -> dict:
    tried = found.tried(row.product, row.candidate.algorithm)
    return _tried(row) | {"candidates_tried": tried}


def _block(rule: str, block: CompiledBlock | str) -> dict:
    if isinstance(block, str):
        return {"plan": rule, "reason": block}
    return {
        "plan": rule,
        "projected_s": block.replay.projected_s,
        "ideal_s": block.ideal_s,
        "hidden": block.replay.hidden,
        "exposed_s": block.replay.exposed_s,
        "copies_s": block.replay.copies_s,
        "peak_bytes": block.peak_bytes,
        "compile_s": block.compile_s,
    }


def _resources(found: Findings) -> list[str]:
    """What a schedule holds: the core, its waiting, each direction of each dimension."""
    directions = (f"{name}{way}" for name in found.study.links.grid.names for way in "+-")
    return ["core", "wait", *directions]


def _named(found: Findings) -> Iterator[tuple[str, Compiled]]:
    for row in found.best():
        yield f"{row.layer}.{row.pass_}.{row.candidate.algorithm}", row


def write_hlo(found: Findings, blocks: Blocks, folder: Path) -> None:
    """The fastest schedule of each product and algorithm, and of blocks, as HLO text."""
    folder.mkdir(exist_ok=True)
    for name, row in _named(found):
        (folder / f"{name}.hlo").write_text(row.hlo)
    for rule, block in blocks.items():
        if not isinstance(block, str):
            (folder / f"block.{rule}.hlo").write_text(block.hlo)


def write_trace(found: Findings, path: Path) -> None:
    """A trace in Chrome's format: a process for each schedule, a track for each resource."""
    events, resources = [], _resources(found)
    for number, (name, row) in enumerate(_named(found)):
        events.append(_title("process", number, 0, name))
        events += [_title("thread", number, i, track) for i, track in enumerate(resources)]
        events += [
            {
                "name": span.name,
                "cat": span.what,
                "ph": "X",
                "pid": number,
                "tid": resources.index(span.resource),
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
            for span in row.replay.spans
        ]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"kind": banner(found)},
    }
    path.write_text(json.dumps(document))


def _title(what: str, process: int, thread: int, name: str) -> dict:
    return {
        "name": f"{what}_name",
        "ph": "M",
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }


def write_plot(found: Findings, path: Path) -> None:
    """Timelines of the fastest schedules, one panel each; their spans as CSV beside it."""
    from matplotlib.figure import Figure  # an extra: imported only where it is asked for

    named = list(_named(found))
    longest = max(row.projected_s for _, row in named) * 1e3
    figure = Figure(figsize=(10, 1.3 * len(named) + 0.6), layout="constrained")
    panels = figure.subplots(len(named), 1, squeeze=False)[:, 0]
    for axis, (name, row) in zip(panels, named, strict=True):
        _draw(axis, row.replay, _resources(found))
        axis.set_xlim(0, longest)
        axis.set_title(f"{name}: {milliseconds(row.projected_s)} ms", loc="left", fontsize=8)
    panels[-1].set_xlabel(
        f"ms, projected for {found.study.topology}; nothing was measured. Core: blue products, "
        "orange copies; red waits; green transfers"
    )
    figure.savefig(path, dpi=120)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("schedule", "resource", "what", "name", "start_s", "end_s"))
        for name, row in named:
            for span in row.replay.spans:
                writer.writerow(
                    (name, span.resource, span.what, span.name, span.start_s, span.end_s)
                )


def _draw(axis, replay: Replay, resources: Sequence[str]) -> None:
    for place, resource in enumerate(resources):
        spans = [span for span in replay.spans if span.resource == resource]
        axis.broken_barh(
            [(span.start_s * 1e3, (span.end_s - span.start_s) * 1e3) for span in spans],
            (place - 0.4, 0.8),
            facecolors=[_COLOURS.get(span.what, "tab:green") for span in spans],
            edgecolor="white",
            linewidth=0.3,
        )
    axis.set_yticks(range(len(resources)), resources, fontsize=6)
    axis.invert_yaxis()
