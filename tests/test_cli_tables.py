"""Tables of the commands: what goes and what folds where a terminal is narrow."""

import io

import pytest
from rich.console import Console

from meshslice_jax.cli.tables import megabytes, milliseconds, number, print_table


def printed(width, **fields):
    console = Console(file=io.StringIO(), width=width, emoji=False)
    rows = [["qkv", "12 34 56", "1.250"], ["out:link:", "[red]", "10.000"]]
    print_table(console, ("layer", "m n k", "total ms"), rows, **fields)
    return console.file.getvalue()


def test_words_stand_left_and_numbers_right_and_text_stays_as_it_is():
    lines = [line.rstrip() for line in printed(80, title="a [b]").splitlines()]
    assert lines == [
        "a [b]",
        "layer         m n k  total ms",
        "qkv        12 34 56     1.250",
        "out:link:     [red]    10.000",
    ]


def test_expendable_columns_go_one_by_one_where_there_is_no_room():
    gone = {"expendable": ("m n k", "total ms")}
    assert "m n k" in printed(30, **gone)
    narrow = printed(20, **gone)
    assert "m n k" not in narrow
    assert "total ms" in narrow
    assert printed(10, **gone).split() == ["layer", "qkv", "out:link:"]


def test_cells_fold_where_all_else_fails():
    text = printed(12)
    assert "…" not in text
    assert "".join(text.split()).count("2") == 2  # of 12 34 56 and 1.250


@pytest.mark.parametrize(
    "shown, text",
    [
        (milliseconds(0.0012345), "1.234"),
        (megabytes(1_234_567), "1.23"),
        (number(7, "d"), "7"),
        (milliseconds(None), ""),
        (megabytes(None), ""),
        (number(None, ".1f"), ""),
    ],
)
def test_numbers_have_their_units_and_none_is_empty(shown, text):
    assert shown == text
