"""Finalists of the tuner, ranked by schedules that come from files instead of a compiler."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

import meshslice_jax as ms
from meshslice_jax.autotune import finalists
from meshslice_jax.cli.app import app
from meshslice_jax.compiled.jobs import Answer
from meshslice_jax.compiled.topology import parse_topology

DATA = Path(__file__).parent / "data"
V4 = parse_topology("v4:4x4")
MODEL = dataclasses.replace(ms.MODELS["gpt3-125m"], name="small", layers=2)


class Recorded:
    """A compiler whose schedules are fast for one mesh and form, and slow for all others."""

    def __init__(self, fast_mesh, fast_form):
        self.fast_mesh, self.fast_form, self.jobs = fast_mesh, fast_form, []

    def compile(self, job):
        self.jobs.append(job)
        plan = job.plan
        fast = job.mesh_shape == self.fast_mesh and (
            plan.dataflow is ms.Dataflow.OS or plan.reduce_scatter == self.fast_form
        )
        name = "v4_meshslice_os" if fast else "v4_collective_os"
        return Answer(hlo=(DATA / f"{name}.hlo").read_text(), peak_bytes=7, compile_s=2.0)


def rank(compiler, count=3, **arguments):
    return finalists.rank(
        MODEL, 16, topology=V4, count=count, compiler=compiler, slice_counts=(2,), batch=8,
        **arguments,
    )  # fmt: skip


def test_the_mesh_and_the_forms_that_compile_fastest_win():
    report = ms.tune_report(MODEL, 16, batch=8)
    shapes = [one.mesh_shape for one in report.meshes if one.status != "rejected"]
    lying = [shape for shape in shapes if sorted(shape) in ([4, 4], [1, 16])]
    last = lying[2]  # the closed form likes two others more
    found = rank(Recorded(tuple(last), "ring"))
    assert found[0].plan.mesh_shape == last
    assert {one.plan.mesh_shape for one in found} == set(lying[:3])
    times = [one.projected_s for one in found]
    assert times == sorted(times)
    best = found[0].plan
    assert best.predicted.block_s > 0 and best.predicted.memory_bytes > 0
    scattered = [
        own
        for layer in best.layers.values()
        for own in vars(layer).values()
        if own.dataflow is not ms.Dataflow.OS and own.algorithm == "meshslice"
    ]
    assert scattered and all(own.reduce_scatter == "ring" for own in scattered)
    # Dataflows and axes are the tuner's.
    tuned = ms.tune(MODEL, 16, batch=8, mesh_shape=last)
    for name, layer in best.layers.items():
        assert layer.forward.dataflow is tuned.layers[name].forward.dataflow
        assert layer.forward.row_axis == tuned.layers[name].forward.row_axis


def test_a_plan_of_finalists_is_a_plan(tmp_path):
    (one,) = rank(Recorded((4, 4), "ring"), count=1, mesh_shape=(4, 4))
    ms.save_plan(one.plan, tmp_path / "plan.json")
    assert ms.load_plan(tmp_path / "plan.json") == one.plan


def test_what_the_tuner_was_told_to_keep_is_kept():
    override = {"out": ms.GemmPlan(algorithm="wang", ring="row")}
    (one,) = rank(
        Recorded((4, 4), "ring"), count=1, mesh_shape=(4, 4), algorithm="meshslice",
        overrides=override,
    )  # fmt: skip
    for name, layer in one.plan.layers.items():
        expected = "wang" if name == "out" else "meshslice"
        assert {own.algorithm for own in vars(layer).values()} == {expected}
    assert one.plan.layers["out"].forward.ring == "row"


@pytest.mark.parametrize("algorithm", ["fsdp", "tp1d"])
def test_rings_over_all_chips_are_compiled_in_all_their_forms(algorithm):
    compiler = Recorded((4, 4), "ring")
    (one,) = rank(compiler, count=1, mesh_shape=(4, 4), algorithm=algorithm)
    assert {
        own.algorithm for layer in one.plan.layers.values() for own in vars(layer).values()
    } == {algorithm}
    assert {job.plan.ring_form for job in compiler.jobs} == {"joined", "halves", "whole", "one_way"}
    assert {job.plan.slice_count for job in compiler.jobs} >= {1, 4, 8}
    tuned = ms.tune(MODEL, 16, batch=8, mesh_shape=(4, 4), algorithm=algorithm)
    for layer in tuned.layers.values():
        assert set(vars(layer).values()) <= {job.plan for job in compiler.jobs}


def test_topologies_that_do_not_fit_are_refused():
    compiler = Recorded((4, 4), "ring")
    with pytest.raises(ValueError, match=r"topology v4:4x4x1 has 16 chips, but a replica has 8"):
        finalists.rank(MODEL, 8, topology=V4, count=1, compiler=compiler)
    with pytest.raises(ValueError, match=r"none of the meshes that fit \(2x8\) lies on v4:4x4x1"):
        rank(compiler, mesh_shape=(2, 8))
    with pytest.raises(ValueError, match="finalists must be at least 1, got 0"):
        rank(compiler, count=0)
    assert compiler.jobs == []


def test_the_command_prints_the_finalists_and_writes_the_best(monkeypatch, tmp_path):
    class Compiler(Recorded):
        def __init__(self, topology, limit_s, cache):
            super().__init__((4, 4), "ring")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("meshslice_jax.cli.tune.Compiler", Compiler)
    out = tmp_path / "plan.json"
    arguments = f"tune --model gpt3-125m --chips 16 --mesh 4x4 --out {out}".split()
    found = CliRunner().invoke(
        app, [*arguments, "--finalists", "1", "--topology", "v4:4x4", "--slices", "2"]
    )
    assert found.exit_code == 0, found.output
    assert "compiled for v4:4x4x1" in found.output and "nothing was measured" in found.output
    assert ms.load_plan(out).mesh_shape == (4, 4)
    alone = CliRunner().invoke(app, [*arguments, "--finalists", "1"])
    assert alone.exit_code == 2
    assert "--finalists N and --topology NAME go together" in alone.output
