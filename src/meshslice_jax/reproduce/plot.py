"""Plots of the reproduced numbers: PNGs, each with its data as CSV beside it.

Drawn from rows alone, so a plot shows nothing that the JSON does not hold. Figures are
made without pyplot and so need no display.
"""

import importlib
import os
import pathlib
from collections.abc import Callable, Iterable

from meshslice_jax.reproduce.row import Row, write_csv

_TITLES = {"weak_scaling": "batch = chips / 2", "strong_scaling": "batch = 32"}
_CLIP = 8.0  # bars of 1D tensor parallelism end above it; their height is written there


def write_plots(rows: Iterable[Row], directory: str | os.PathLike, profile: str) -> list[str]:
    """Writes utilisation, sweep and breakdown plots.

    Args:
      rows: from `reproduce`.
      directory: made if it is not there.
      profile: name of the hardware profile, for the titles.

    Returns:
      The paths written, PNG and CSV in turn.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "plots need matplotlib: pip install matplotlib, or leave the plot option out"
        ) from None
    rows, folder = list(rows), pathlib.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (prefixes, draw) in _PLOTS.items():
        chosen = [row for row in rows if row.id.partition("/")[0] in prefixes]
        models = sorted({row.model for row in chosen})
        canvas = figure.Figure(figsize=(7 * len(models), 4 * len(prefixes)), layout="constrained")
        axes = canvas.subplots(len(prefixes), len(models), squeeze=False)
        for prefix, line in zip(prefixes, axes, strict=True):
            for model, ax in zip(models, line, strict=True):
                ax.set_title(f"{model}: {_TITLES.get(prefix, prefix.replace('_', ' '))}")
                draw(ax, [r for r in chosen if r.model == model and r.id.startswith(prefix + "/")])
        canvas.suptitle(f"modelled on {profile}; nothing was measured")
        png, table = folder / f"{name}.png", folder / f"{name}.csv"
        canvas.savefig(png, dpi=120)
        write_csv(chosen, table)
        written += [str(png), str(table)]
    return written


def _label(row: Row) -> str:
    return row.id.split("/")[1]


def _utilisation(ax, rows: list[Row]) -> None:
    """Groups of bars: one group per chip count, one bar per algorithm."""
    chips = sorted({row.chips for row in rows})
    names = list(dict.fromkeys(_label(row) for row in rows))
    found = {(_label(row), row.chips): row.ours for row in rows}
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        positions = [group + (place - len(names) / 2) * width for group in range(len(chips))]
        ax.bar(positions, [found[name, count] for count in chips], width, label=name, align="edge")
    ax.set_xticks(range(len(chips)), [str(count) for count in chips])
    ax.set_xlabel("chips")
    ax.set_ylabel("FC utilisation (%)")
    ax.set_ylim(0, 120)
    ax.set_yticks(range(0, 101, 20))
    ax.legend(fontsize="small", ncols=4, loc="upper center")


def _sweep(ax, rows: list[Row]) -> None:
    """A curve over the swept settings."""
    labels = [_label(row) for row in rows]
    ax.plot(range(len(rows)), [row.ours for row in rows], marker="o")
    ax.set_xticks(range(len(rows)), labels)
    ax.set_ylabel("FC utilisation (%)")
    ax.set_ylim(0, 100)
    ax.grid(alpha=0.3)


def _breakdown(ax, rows: list[Row]) -> None:
    """Per algorithm, in units of its products' time: exposed time on top, and each axis alone."""
    found = {tuple(row.id.split("/")[1:]): row.ours for row in rows}
    names = list(dict.fromkeys(name for name, _ in found))
    bars = {
        "products": (0, [1.0] * len(names), None),
        "exposed communication": (0, _relative(found, names, "exposed"), [1.0] * len(names)),
        "row transfers alone": (1, _relative(found, names, "comm_row"), None),
        "col transfers alone": (2, _relative(found, names, "comm_col"), None),
    }
    for label, (place, heights, bottom) in bars.items():
        positions = [group + (place - 1.5) * 0.27 for group in range(len(names))]
        ax.bar(positions, heights, 0.27, bottom=bottom, label=label, align="edge")
    for group, name in enumerate(names):
        total = 1 + found[name, "exposed"] / found[name, "math"]
        if total > _CLIP:
            ax.text(group - 0.4, _CLIP, f"{total:.1f}", va="bottom", ha="center", fontsize="small")
    ax.set_ylim(0, _CLIP)
    ax.set_xticks(range(len(names)), names)
    ax.set_ylabel("time / time of the products")
    ax.legend(fontsize="small", loc="upper left")


def _relative(found: dict, names: list[str], part: str) -> list[float]:
    return [found[name, part] / found[name, "math"] for name in names]


_PLOTS: dict[str, tuple[tuple[str, ...], Callable]] = {
    "utilisation": (("weak_scaling", "strong_scaling"), _utilisation),
    "sweep": (("mesh_shape", "slice_count_at_32x8"), _sweep),
    "breakdown": (("breakdown",), _breakdown),
}
