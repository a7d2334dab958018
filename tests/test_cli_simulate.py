"""`meshslice simulate`: tables, traces, plots and JSON of a plan; wrong plans and faults."""

import csv
import json
import re

import pytest
from typer.testing import CliRunner

from meshslice_jax.autotune import tune
from meshslice_jax.cli import common
from meshslice_jax.cli.app import app
from meshslice_jax.model_plan import load_plan, save_plan
from meshslice_jax.plan_simulation import simulate_plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    save_plan(tune("gpt3-125m", 16, batch=8, mesh_shape=(4, 4), algorithm="meshslice"), path)
    return path


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_every_pass_is_printed_beside_its_closed_form_and_bounds(plan):
    result = simulate("--plan", plan, "--hardware", "tpu_v4_paper")
    assert result.exit_code == 0, result.output
    text = result.output
    assert "profile tpu_v4_paper (fitted: link_efficiency, " in text
    assert "times are simulated, nothing was measured" in text
    assert "plain order; no faults" in text
    found = simulate_plan(load_plan(plan), "tpu_v4_paper")
    for one in found.passes:
        (row,) = re.findall(rf"^{one.layer} +{one.name} .*$", text, flags=re.MULTILINE)
        times = [one.predicted.math_s, one.simulated_s, one.predicted.total_s]
        bounds = [one.predicted.lower_bound_s, one.predicted.upper_bound_s, one.exposed_s]
        cells = row.split()
        assert cells[5:8] == [f"{value * 1e3:.3f}" for value in times]
        assert cells[9:] == [f"{value * 1e3:.3f}" for value in bounds]
        assert float(cells[8]) == pytest.approx(times[1] / times[2], abs=1e-4)
    assert f"block: {found.total_s * 1e3:.3f} ms simulated" in text
    assert "4x4 mesh: all chips are done at" in text


def test_faults_are_told_and_the_slowest_chip_is_named(plan):
    arguments = ("--plan", plan, "--slow-chip", "2,1:1.5", "--slow-link", "0,0:row+:2")
    result = simulate(*arguments, "--jitter", 0.01, "--hop-jitter", 0.02, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert (
        "product_jitter=0.01, hop_jitter=0.02, slow_chips=((2, 1, 1.5),), "
        "slow_links=((0, 0, 'row+', 2.0),), seed=3"
    ) in result.output
    assert re.search(r"4x4 mesh: the last chip, \(\d, \d\), is done at", result.output)


def test_the_slowest_chip_is_the_slow_one(plan, tmp_path):
    path = tmp_path / "found.json"
    result = simulate("--plan", plan, "--slow-chip", "2,1:4", "--json", path)
    assert result.exit_code == 0, result.output
    assert "the slowest chip, (2, 1), multiplies for" in result.output
    (mesh,) = json.loads(path.read_text())["meshes"]
    assert mesh["slowest_chip"] == [2, 1]
    assert len(mesh["finish_s"]) == 4


def test_files_are_written(plan, tmp_path):
    trace, plot, found = (tmp_path / name for name in ("trace.json", "bars.png", "found.json"))
    result = simulate("--plan", plan, "--depth", 3, *("--trace", trace, "--plot", plot))
    assert result.exit_code == 0, result.output
    assert "buffer_depth=3; no faults" in result.output
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(16))
    assert plot.read_bytes().startswith(b"\x89PNG")
    drawn = list(csv.DictReader((tmp_path / "bars.csv").read_text().splitlines()))
    assert simulate("--plan", plan, "--depth", 3, "--json", found).exit_code == 0
    written = json.loads(found.read_text())
    expected = simulate_plan(load_plan(plan), buffer_depth=3)
    assert (written["kind"], written["hardware"]) == ("simulated", "tpu_v4")
    assert written["total_s"] == expected.total_s
    assert written["closed_form_s"] == expected.predicted_s
    assert written["block_schedule"]["buffer_depth"] == 3
    assert [one["simulated_s"] for one in written["passes"]] == [
        float(row["simulated_s"]) for row in drawn
    ]
    for one, row in zip(expected.passes, drawn, strict=True):
        assert (one.layer, one.name) == (row["layer"], row["pass"])
        assert one.predicted.upper_bound_s == float(row["upper_bound_s"])


def test_a_plan_with_replicas_simulates_one_and_says_what_is_left_out(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(tune("gpt3-125m", 16, batch=8, data_parallel=4), path)
    result = simulate("--plan", path)
    assert result.exit_code == 0, result.output
    assert " x 4 replicas, batch 8" in result.output
    assert "not simulated, closed form: the gradients' all-reduce over 4 replicas" in result.output


def test_a_trace_of_two_meshes_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    fields = {"qkv": {"algorithm": "fsdp"}, "ff1": {"algorithm": "meshslice"}}
    fields |= {"out": {"algorithm": "fsdp"}, "ff2": {"algorithm": "meshslice"}}
    save_plan(tune("gpt3-125m", 8, batch=4, mesh_shape=(4, 2), overrides=fields), path)
    assert simulate("--plan", path).exit_code == 0
    result = simulate("--plan", path, "--trace", tmp_path / "trace.json")
    assert result.exit_code == 2
    assert "--trace shows one mesh, and this plan's layers are simulated on 8x1, 4x2" in (
        result.output
    )


def edited(plan, tmp_path, edit):
    path = tmp_path / "edited.json"
    path.write_text(edit(plan.read_text()))
    return path


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda text: text[: len(text) // 2], "edited.json: Input data was truncated"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "a newer meshslice_jax wrote"),
        (lambda text: text.replace('"num_chips": 16', '"num_chips": 12'), "not num_chips = 12"),
        (
            lambda text: text.replace('"algorithm": "meshslice"', '"algorithm": "cannon"').replace(
                '"mesh_shape": [\n    4,\n    4', '"mesh_shape": [\n    2,\n    8'
            ),
            "cannon",
        ),
        (lambda text: text.replace('"seq_len"', '"length"'), "unknown field `length`"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "bench"])
def test_plans_that_are_none_are_refused(plan, tmp_path, command, edit, words):
    path = edited(plan, tmp_path, edit)
    result = CliRunner().invoke(app, [command, "--plan", str(path)])
    assert result.exit_code == 2, result.output
    assert words in result.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--hardware", "tpu_v9"), "unknown hardware 'tpu_v9'"),
        (("--jitter", -1), "product_jitter is a mean delay"),
        (("--slow-chip", "2:1"), "--slow-chip '2:1' is not of the form ROW,COL:FACTOR"),
        (("--slow-chip", "9,0:2"), "chip (9, 0) is outside the simulated 4x4 mesh"),
        (("--slow-chip", "0,0:0.5"), "must be at least 1, got 0.5"),
        (("--slow-link", "0,0:2"), "--slow-link '0,0:2' is not of the form ROW,COL:LINK:FACTOR"),
        (("--slow-link", "0,0:up:2"), "link 'up' is not one of row+, row-, col+, col-"),
        (("--depth", 4), "buffer_depth must be 2 (gather one slice ahead) or 3 (two), got 4"),
        (("--trace", "no/such/trace.json"), "there is no folder"),
    ],
)
def test_what_cannot_be_is_said_and_ends_with_exit_code_2(plan, arguments, words):
    result = simulate("--plan", plan, *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_a_plan_that_is_not_there_is_named():
    result = simulate("--plan", "nowhere.json")
    assert result.exit_code == 2
    assert "plan nowhere.json cannot be read: No such file or directory" in result.output


def test_a_plot_without_matplotlib_is_refused_before_any_work(plan, monkeypatch):
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: None)
    result = simulate("--plan", plan, "--plot", "a.png")
    assert result.exit_code == 2
    assert "--plot needs matplotlib: pip install matplotlib" in result.output
