"""`meshslice compile`: what it refuses, prints and writes, on recorded schedules."""

import importlib.util
import json
import runpy
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import meshslice_jax as ms
from meshslice_jax import models
from meshslice_jax.cli import compile as command
from meshslice_jax.cli.app import app
from meshslice_jax.compiled.candidates import OPTION_SETS
from meshslice_jax.compiled.jobs import Answer
from meshslice_jax.compiled.layout import lay_out
from meshslice_jax.compiled.topology import parse_topology
from meshslice_jax.mesh import parse_mesh_shape

DATA = Path(__file__).parent / "data"
BASE = ("--topology", "v4:4x4", "--mesh", "4x4", "--model", "gpt3-1.3b")
KEYS = {
    "layer", "pass", "algorithm", "dataflow", "slice_count", "form", "layout", "projected_s",
    "ideal_s", "hidden", "exposed_s", "copies_s", "sync_collectives", "async_collectives",
    "peak_bytes", "planned_bytes", "compile_s", "candidates_tried",
}  # fmt: skip


class Recorded:
    """Stands for the compiler: every job gets a recorded schedule, GSPMD's fail."""

    def __init__(self, topology, limit_s, cache):
        self.topology = topology

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def compile(self, job):
        if getattr(job, "gspmd", False):
            return Answer(error="XlaRuntimeError: no GSPMD today\nmore")
        ours = hasattr(job, "plan") and job.plan.algorithm == "meshslice"
        name = "v4_meshslice_os" if ours else "v4_collective_os"
        return Answer(hlo=(DATA / f"{name}.hlo").read_text(), peak_bytes=10**8, compile_s=2.0)


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(command, "require_libtpu", lambda: None)
    monkeypatch.setattr(command, "Compiler", Recorded)


def call(*arguments):
    return CliRunner().invoke(app, ["compile", *map(str, arguments)])


def test_without_libtpu_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = call(*BASE)
    assert found.exit_code == 2
    (line,) = found.stderr.strip().splitlines()
    assert "needs libtpu: pip install libtpu" in line


def test_tables_files_and_totals(recorded, tmp_path):
    paths = {name: tmp_path / name for name in ("a.json", "hlo", "t.json", "p.png")}
    found = call(
        *BASE, "--layers", "ff1", "--slices", 2, "--sensitivity", "--block",
        "--json", paths["a.json"], "--hlo", paths["hlo"],
        "--trace", paths["t.json"], "--plot", paths["p.png"],
    )  # fmt: skip
    assert found.exit_code == 0, found.stderr
    assert "nothing was measured" in found.stdout
    assert "half-rate links" in found.stdout
    assert "block as one program, meshslice:" in found.stdout
    assert "candidates did not compile" in found.stdout
    written = json.loads(paths["a.json"].read_text())
    products = written["products"]
    assert all(set(one) >= KEYS for one in products)
    assert {(p["pass"], p["algorithm"]) for p in products} == {
        (name, algorithm)
        for name in ("forward", "grad_lhs", "grad_rhs")
        for algorithm in ("meshslice", "wang", "collective")
    }
    tried = {p["algorithm"]: p["candidates_tried"] for p in products}
    assert tried == {"meshslice": 28, "wang": 20, "collective": 2}
    totals = {one["plan"]: one for one in written["totals"]}
    assert set(totals) == {"meshslice", "natural", "fixed", "tuned", "wang", "collective"}
    for one in products:
        if one["algorithm"] == "meshslice":
            assert one["hidden"] == pytest.approx(1 - one["exposed_s"] / one["communication_s"])
            assert totals["meshslice"]["projected_s"] == pytest.approx(3 * one["projected_s"])
    assert len(written["failed"]) == 3 * 6
    assert {block["plan"] for block in written["blocks"]} >= {"meshslice", "collective"}
    assert (paths["hlo"] / "ff1.forward.meshslice.hlo").read_text().startswith("HloModule")
    events = json.loads(paths["t.json"].read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"product", "copy", "wait", "all-gather"}
    assert paths["p.png"].stat().st_size > 10_000
    head, *lines = paths["p.png"].with_suffix(".csv").read_text().splitlines()
    assert head == "schedule,resource,what,name,start_s,end_s" and len(lines) == len(spans)


def test_a_plan_is_compiled_as_it_is(recorded, tmp_path):
    plan = tmp_path / "plan.json"
    ms.save_plan(ms.tune("gpt3-1.3b", 16, mesh_shape=(4, 4), algorithm="meshslice"), plan)
    found = call("--topology", "v4:4x4", "--plan", plan, "--json", tmp_path / "a.json")
    assert found.exit_code == 0, found.stderr
    products = json.loads((tmp_path / "a.json").read_text())["products"]
    assert len(products) == 12
    assert {one["algorithm"] for one in products} == {"meshslice"}
    found = call("--topology", "v4:4x4", "--plan", plan, "--mesh", "4x4")
    assert found.exit_code == 2 and "--mesh cannot be chosen" in found.stderr
    found = call("--topology", "v4:2x8", "--plan", plan)
    assert found.exit_code == 2 and "does not lie on a 2x8x1 torus" in found.stderr


@pytest.mark.parametrize(
    "arguments, telling",
    [
        (("--topology", "v4:4x4"), "give --model NAME and --mesh ROWSxCOLS, or --plan FILE"),
        ((*BASE, "--layers", "mlp"), "there is no layer mlp; there are qkv"),
        ((*BASE, "--passes", "fwd"), "unknown pass fwd; there are forward"),
        ((*BASE, "--options", "tuned", "--options", "a=1"), "mixes tuned with KEY=VALUE"),
        ((*BASE, "--options", "fast"), "unknown option set 'fast'"),
        ((*BASE, "--algorithms", "systolic"), "unknown algorithm 'systolic'"),
        ((*BASE, "--block", "--passes", "forward"), "--block needs all passes"),
        ((*BASE, "--json", "/no/such/folder/a.json"), "there is no folder"),
    ],
)
def test_what_cannot_be_run_as_given(recorded, arguments, telling):
    found = call(*arguments)
    assert found.exit_code == 2
    assert telling in found.stderr


def test_options_are_checked_before_anything_is_compiled(recorded, monkeypatch):
    monkeypatch.setattr(command, "probe_options", lambda *_: {"xla_x": "No such option"})
    found = call(*BASE, "--options", "xla_x=true")
    assert found.exit_code == 2
    assert "option xla_x: No such option" in found.stderr


def test_options_keep_their_types():
    assert command.parse_options(["a=true", "b=2", "c=0.5", "d=post_spmd"]) == (
        OPTION_SETS,
        {"a": True, "b": 2, "c": 0.5, "d": "post_spmd"},
    )
    assert command.parse_options(["tuned"]) == (("tuned",), None)


def test_nothing_that_compiles_is_an_exit_code(recorded):
    found = call(*BASE, "--layers", "ff1", "--algorithms", "gspmd")
    assert found.exit_code == 1
    assert "did not compile" in found.stdout


def test_the_tables_of_the_docs_can_be_asked_for():
    root = Path(__file__).parent.parent
    script = runpy.run_path(str(root / "scripts" / "compiled_schedules.py"))
    page = (root / "docs" / "compiled_schedules.md").read_text()
    parser = typer.main.get_command(app).commands["compile"]
    for name, options in [*script["TABLES"].items(), *script["FEW"].items()]:
        told = parser.make_context("compile", options.split()).params
        lay_out(parse_topology(told["topology"]).dims, parse_mesh_shape(told["mesh"]))
        layers = models.model_layers(told["model"], batch=16, seq_len=2048, dtype="bfloat16")
        assert told["layers"] == "all" or set(told["layers"].split(",")) <= set(layers)
        assert f"<!-- {name} -->" in page and f"<!-- end of {name} -->" in page
