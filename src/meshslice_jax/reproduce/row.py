"""One reproduced number, and how it is written out."""

import csv
import dataclasses
import json
import os
from collections.abc import Iterable

from meshslice_jax.reproduce.published import ACCEPT, LIMITS, lookup

#: Titles of what `Row.cells` gives.
COLUMNS = ("what", "model", "chips", "published", "ours", "difference", "kind", "verdict")
_FIELDS = ("id", "model", "chips", "published", "ours", "unit", "kind")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One number.

    Attributes:
      id: what it is.
      model: whose layers; "both" pools GPT-3 and Megatron-NLG.
      chips: chips of the cluster.
      published: as the paper prints it, or None.
      ours: as the model gives it; None where only hardware could.
      unit: "percent", "points", "ratio", "ms", "count", "rows" or "true".
      kind: "fitted", "predicted" or "reported".
    """

    id: str
    model: str
    chips: int
    published: float | None
    ours: float | None
    unit: str
    kind: str

    @property
    def difference(self) -> float | None:
        """Ours minus published."""
        if self.published is None or self.ours is None:
            return None
        return self.ours - self.published

    @property
    def verdict(self) -> str:
        """ "met", "missed" with the tolerance, or "" where none is set."""
        if self.ours is None:
            return "needs hardware"
        if (limit := lookup(LIMITS, self.id, self.model)) is not None:
            return f"{'met' if self.ours <= limit else 'missed'} (at most {limit:g})"
        accept = lookup(ACCEPT, self.id, self.model)
        if accept is None or self.difference is None:
            return ""
        return f"{'met' if abs(self.difference) <= accept else 'missed'} (within {accept:g})"

    def record(self) -> dict:
        """The seven fields, for JSON."""
        return {field: getattr(self, field) for field in _FIELDS}

    def cells(self) -> list[str]:
        """The row as text, in the order of `COLUMNS`."""
        difference = "" if self.difference is None else f"{self.difference:+.2f}"
        ours = f"{_shown(self.ours)} {self.unit}"
        return [
            *(self.id, self.model, str(self.chips), _shown(self.published), ours),
            *(difference, self.kind, self.verdict),
        ]


def comparison_table(rows: Iterable[Row]) -> str:
    """Markdown of the rows that have a published number or a verdict."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in compared(rows):
        lines.append(f"| {' | '.join(row.cells())} |")
    return "\n".join(lines) + "\n"


def compared(rows: Iterable[Row]) -> list[Row]:
    """The rows that have a published number or a verdict."""
    return [row for row in rows if row.published is not None or row.verdict]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def write_json(rows: Iterable[Row], path: str | os.PathLike) -> None:
    """Writes a list of the rows' seven fields."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump([row.record() for row in rows], file, indent=1)
        file.write("\n")


def write_csv(rows: Iterable[Row], path: str | os.PathLike) -> None:
    """Writes the rows with their difference and verdict."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*_FIELDS, "difference", "verdict"], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            extra = {"difference": row.difference, "verdict": row.verdict}
            writer.writerow(row.record() | extra)
