"""Tables that fit the terminal: expendable columns go, then cells fold; none is cut."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

#: Columns of words; all others are numbers and stand at the right.
_WORDS = frozenset(
    "algorithm check flow kind layer mesh model pass status unit verdict what".split()
)


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    expendable: Sequence[str] = (),
    styles: Sequence[str | None] | None = None,
) -> None:
    """Prints a table, without as many of its expendable columns as do not fit.

    Args:
      console: where to.
      columns: titles.
      rows: cells, one for each column.
      title: printed above it.
      expendable: columns that a narrow terminal does without, the first to go first.
      styles: of the rows.
    """
    styles = styles or [None] * len(rows)
    boundless = console.options.update(width=10_000)
    for count in range(len(expendable) + 1):
        kept = [name for name in columns if name not in expendable[:count]]
        table = _table(columns, rows, kept, title, styles)
        if console.measure(table, options=boundless).maximum <= console.width:
            break
    else:
        for column in table.columns:
            column.no_wrap, column.overflow = False, "fold"
    console.print(table)


def _table(columns, rows, kept, title, styles) -> Table:
    table = Table(
        title=None if title is None else escape(title),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for name in kept:
        justify = "left" if name in _WORDS else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for row, style in zip(rows, styles, strict=True):
        cells = dict(zip(columns, row, strict=True))
        table.add_row(*(escape(cells[name]) for name in kept), style=style)
    return table


def number(value: float | None, spec: str) -> str:
    """A number, or nothing where there is none."""
    return "" if value is None else format(value, spec)


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, to the microsecond."""
    return number(None if seconds is None else seconds * 1e3, ".3f")


def megabytes(count: float | None) -> str:
    """Bytes as MB (10^6)."""
    return number(None if count is None else count / 1e6, ".2f")
