"""`meshslice reproduce`: the printed table, its files, and other forms and profiles."""

import csv
import json

import pytest
from typer.testing import CliRunner

from meshslice_jax import reproduce as reproduction
from meshslice_jax.cli import reproduce
from meshslice_jax.cli.app import app


def invoke(*arguments):
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduced")
    files = ("--json", folder / "rows.json", "--csv", folder / "rows.csv")
    return invoke(*files, "--plot", folder / "plots"), folder


def test_every_number_is_printed_with_its_kind_and_verdict(found):
    result, _ = found
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    rows = reproduction.compared(reproduction.reproduce())
    for row in rows:
        assert " ".join(cell for cell in row.cells() if cell) in lines
    text = result.output
    assert "profile tpu_v4_paper (fitted: link_efficiency, gather_hop_s, " in text
    counts = {kind: sum(row.kind == kind for row in rows) for kind in ("fitted", "predicted")}
    assert f"{counts['fitted']} fitted, {counts['predicted']} predicted, " in text
    missed = sum(row.verdict.startswith("missed") for row in rows)
    assert f", {missed} missed, " in text
    assert "fitted: the profile's constants were chosen to meet these numbers" in text


def test_files_are_written(found):
    _, folder = found
    rows = json.loads((folder / "rows.json").read_text())
    assert {tuple(row) for row in rows} == {
        ("id", "model", "chips", "published", "ours", "unit", "kind")
    }
    lines = (folder / "rows.csv").read_text().splitlines()
    assert len(list(csv.DictReader(lines))) == len(rows)
    names = {path.name for path in (folder / "plots").iterdir()}
    stems = ("utilisation", "sweep", "breakdown")
    assert names == {stem + end for stem in stems for end in (".png", ".csv")}


def test_the_profile_and_the_form_of_wang_can_be_others(monkeypatch):
    asked = []
    monkeypatch.setattr(reproduction, "reproduce", lambda *which: asked.append(which) or [])
    result = invoke("--hardware", "tpu_v4_paper_3", "--wang", "weights_ringed_unmerged_one_way")
    assert result.exit_code == 0, result.output
    ((spec, form),) = asked
    assert spec.name == "tpu_v4_paper_3"
    assert form == reproduction.WangForm(ring="row", merged=False, directions=1)


@pytest.mark.parametrize("ring", ["col", "row", "best", "prototype"])
@pytest.mark.parametrize("prologue", [True, False])
def test_every_form_of_wang_can_be_named(ring, prologue):
    form = reproduction.WangForm(ring=ring, prologue=prologue)
    assert reproduce.parse_wang(str(form)) == form


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--hardware", "tpu_v9"), "unknown hardware 'tpu_v9'"),
        (("--wang", "ringed"), "--wang 'ringed' is not of the form (activations|weights|best"),
        (("--json", "no/such/rows.json"), "there is no folder"),
        (("--csv", "no/such/rows.csv"), "there is no folder"),
    ],
)
def test_what_cannot_be_is_said_and_ends_with_exit_code_2(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output
