#!/usr/bin/env python3
"""Makes the tables and pictures of docs/compiled_schedules.md anew.

    python scripts/compiled_schedules.py [--folder found] [NAME ...]

Each table is one `meshslice compile` (needs libtpu; minutes to half an hour on two cores). Its
JSON is kept in the folder, and a table whose JSON is there is only written again; schedules
that were compiled before are in the cache of `meshslice compile`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "compiled_schedules.md"
PICTURES = DOCS / "schedules"

_GPT3 = "--model gpt3-175b"
_ONCE = "--slices 6 --options tuned --sensitivity"
#: Name -> what is compiled.
TABLES = {
    "v4_16": f"--topology v4:4x4 --mesh 4x4 {_GPT3} {_ONCE} --block",
    "v4_256": f"--topology v4:4x8x8 --mesh 32x8 {_GPT3} {_ONCE} --layers ff1,out --limit 150",
    "megatron_16": f"--topology v4:4x4 --mesh 4x4 --model megatron-530b {_ONCE} --layouts sliced",
    "megatron_256": f"--topology v4:4x8x8 --mesh 32x8 --model megatron-530b {_ONCE} "
    "--layouts sliced --limit 150",
    "v5e_16": f"--topology v5e:4x4 --mesh 4x4 {_GPT3} {_ONCE} --layouts sliced",
    "v5e_256": f"--topology v5e:16x16 --mesh 16x16 {_GPT3} {_ONCE} --layouts sliced --limit 150",
    "v6e_16": f"--topology v6e:4x4 --mesh 4x4 {_GPT3} {_ONCE} --layouts sliced",
    "v6e_256": f"--topology v6e:16x16 --mesh 16x16 {_GPT3} {_ONCE} --layouts sliced --limit 150",
}
#: Name -> a picture of few products.
FEW = {
    "v4_16": f"--topology v4:4x4 --mesh 4x4 {_GPT3} --slices 6 --options tuned --layers ff1 "
    "--algorithms meshslice,wang,collective",
}
_OURS = ("meshslice", "natural", "fixed", "tuned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(TABLES)}; by default all")
    parser.add_argument("--folder", type=Path, default=Path("found"), help="where JSON is kept")
    told = parser.parse_args()
    if unknown := [name for name in told.names if name not in TABLES]:
        parser.error(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    told.folder.mkdir(parents=True, exist_ok=True)
    for name in told.names or TABLES:
        path = told.folder / f"{name}.json"
        if not path.exists():
            compile_(TABLES[name], "--json", path)
        write(name, table(json.loads(path.read_text())))
        if name in FEW:
            PICTURES.mkdir(exist_ok=True)
            compile_(FEW[name], "--plot", PICTURES / f"{name}.png")
            (PICTURES / f"{name}.csv").unlink()


def compile_(options: str, *more: object) -> None:
    """Runs `meshslice compile`."""
    program = "from meshslice_jax.cli import main; main()"
    words = [sys.executable, "-c", program, "compile", *options.split()]
    subprocess.run([*words, *map(str, more)], check=True)


def write(name: str, text: str) -> None:
    """Puts a table between its markers."""
    page = PAGE.read_text()
    before, begin, rest = page.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not (begin and end):
        raise SystemExit(f"{PAGE} has no place for {name}: <!-- {name} --> ... is missing")
    PAGE.write_text(f"{before}{begin}{text}{end}{after}")


def table(found: dict) -> str:
    """Two tables in Markdown: a row for each product, and the totals."""
    rows = {}
    for one in found["products"]:
        rows.setdefault((one["layer"], one["pass"]), {})[one["algorithm"]] = one
    lines = [
        "| product | flow | MeshSlice ms | S, form | of pure FLOPs | products | copies | exposed "
        "| hidden | peak MB | planned | Wang | its form | gspmd | Collective | its peak MB "
        "| of best peer |",
        "|" + "---|" * 17,
    ]
    for (layer, pass_), by in rows.items():
        ours, wang = by["meshslice"], by["wang"]
        peer = min(one["projected_s"] for name, one in by.items() if name != "meshslice")
        cells = [
            f"{layer} {pass_}",
            ours["dataflow"],
            f"**{_ms(ours['projected_s'])}**",
            f"{ours['slice_count']}, {ours['form']}",
            f"{ours['projected_s'] / ours['ideal_s']:.2f}",
            *(_ms(ours[key]) for key in ("products_s", "copies_s", "exposed_s")),
            f"{ours['hidden']:.2f}",
            _mb(ours["peak_bytes"]),
            _mb(ours["planned_bytes"]),
            _ms(wang["projected_s"]),
            f"{wang['form']}, S={wang['slice_count']}",
            _ms(by["gspmd"]["projected_s"]),
            _ms(by["collective"]["projected_s"]),
            _mb(by["collective"]["peak_bytes"]),
            f"{ours['projected_s'] / peer:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    tried = {}
    for one in found["products"]:
        tried.setdefault(one["algorithm"], []).append(one["candidates_tried"])
    counts = ", ".join(f"{name} {sum(some)}" for name, some in tried.items())
    lines += ["", f"Candidates that were compiled: {counts}.", "", *_totals(found)]
    for block in found["blocks"]:
        if "reason" in block:
            lines.append(f"- block, {block['plan']}: {block['reason']}")
            continue
        parts = next(t for t in found["totals"] if t["plan"] == block["plan"])["projected_s"]
        lines.append(
            f"- block as one program, {block['plan']}: {_ms(block['projected_s'])} ms, "
            f"{block['projected_s'] / parts:.3f} of its products one by one, "
            f"{block['projected_s'] / block['ideal_s']:.2f} of pure FLOPs, hidden "
            f"{block['hidden']:.2f}, peak {_mb(block['peak_bytes'])} MB"
        )
    return "\n".join(lines) + "\n"


def _totals(found: dict) -> list[str]:
    totals = found["totals"]
    names = list(totals[0]["variants"])
    best = min(one["projected_s"] for one in totals if one["plan"] not in _OURS)
    lines = [
        f"| all products | ms | of pure FLOPs | of best peer | {' | '.join(names)} |",
        "|" + "---|" * (4 + len(names)),
    ]
    for one in totals:
        cells = [
            one["plan"],
            _ms(one["projected_s"]),
            f"{one['projected_s'] / one['ideal_s']:.2f}",
            f"{one['projected_s'] / best:.3f}",
            *(_ms(one["variants"][name]) for name in names),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _mb(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.0f}"


if __name__ == "__main__":
    main()
