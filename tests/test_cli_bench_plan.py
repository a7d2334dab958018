"""`meshslice bench --plan`: a model's plan run as it is, scaled, and refused where it can't be."""

import dataclasses
import json
import re
import types

import pytest
from typer.testing import CliRunner

from meshslice_jax import cost
from meshslice_jax.algorithms import layer_problems, schedule, view
from meshslice_jax.autotune import tune
from meshslice_jax.bench import planned
from meshslice_jax.block import BlockSchedule
from meshslice_jax.cli.app import app
from meshslice_jax.hardware import hardware_spec
from meshslice_jax.model_plan import load_plan, save_plan
from meshslice_jax.models import fc_layers

PASSES = {"fwd": "forward", "dlhs": "grad_lhs", "drhs": "grad_rhs"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A plan with a twin, a 1D layer, and slice counts that differ between passes."""
    found = tune(
        "gpt3-125m",
        8,
        batch=4,
        seq_len=64,
        mesh_shape=(4, 2),
        overrides={
            "ff1": {"row_axis": "col", "algorithm": "meshslice", "slice_count": 2},
            "ff2": {"algorithm": "fsdp"},
            "out": {"algorithm": "meshslice"},
            "qkv": {"algorithm": "wang"},
        },
    )
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    save_plan(found, path)
    return path


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "--repeats", "1", *map(str, arguments)])


def test_a_prediction_that_was_edited_is_told_and_does_not_matter(path, tmp_path):
    edited = tmp_path / "edited.json"
    text = re.sub(r'"block_s": [^,]*', '"block_s": 0.5', path.read_text())
    edited.write_text(text)
    told = "not what the model gives for it on tpu_v4 (1 number: $.predicted.block_s is 0.5"
    for name, expected in ((edited, True), (path, False)):
        for command in (["simulate"], ["bench", "--repeats", "1", "--layers", "out"]):
            passes = ["--passes", "fwd"] if command[0] == "bench" else []
            result = CliRunner().invoke(app, [*command, "--plan", str(name), *passes])
            assert result.exit_code == 0, result.output
            assert (told in result.output) is expected


@pytest.mark.slow
def test_every_pass_runs_the_plans_own_product_and_is_right(path, tmp_path):
    rows_path = tmp_path / "rows.json"
    result = bench("--plan", path, "--scale", 2, "--json", rows_path)
    assert result.exit_code == 0, result.output
    plan, spec = load_plan(path), hardware_spec("tpu_v4")
    rows = [r for r in json.loads(rows_path.read_text()) if r["algorithm"] not in BASELINES]
    assert [(row["layer"], row["pass"]) for row in rows] == [
        (layer, name) for layer in plan.layers for name in PASSES
    ]
    problems = fc_layers(plan.model, plan.tokens // 2, plan.dtype)
    for row in rows:
        layer = plan.layers[row["layer"]]
        gemm = getattr(layer, PASSES[row["pass"]])
        problem = layer_problems(problems[row["layer"]], layer.forward)[PASSES[row["pass"]]]
        assert (row["m"], row["n"], row["k"]) == (problem.m, problem.n, problem.k)
        assert (row["algorithm"], row["slice_count"]) == (gemm.algorithm, gemm.slice_count)
        assert (row["dataflow"], row["mesh"]) == (gemm.dataflow, "4x2")
        assert (row["check"], row["status"], row["dtype"]) == ("pass", "ok", "bfloat16")
        expected = schedule(problem, gemm, view(gemm, plan.mesh_shape))
        axes = ("col", "row") if gemm.row_axis == "col" else ("row", "col")
        sent = [round(expected.bytes_along(axis)) for axis in axes]
        assert [row["bytes_row"], row["bytes_col"]] == sent
        predicted_ms = cost.seconds(expected, problem, spec).total_s * 1e3
        assert row["projected_ms"] == pytest.approx(predicted_ms)
        assert row["projected_hardware"] == "tpu_v4"


BASELINES = ("dense", "gspmd")


def test_what_runs_is_told(path):
    result = bench("--plan", path, "--scale", 4, "--layers", "ff1", "--passes", "fwd")
    assert result.exit_code == 0, result.output
    text = result.output
    assert "plan: gpt3-125m on 8 chips: mesh 4x2, batch 4 x 64 tokens, bfloat16" in text
    assert "SCALED: 64 tokens instead of 256 (m / 4); weights, mesh, dataflows and slice" in text
    assert "modelled ms is what the time model projects for this mesh of tpu_v4 chips" in text
    assert " twin " in text
    assert "3 rows: 3 ok" in text


def test_one_replica_runs_and_a_block_schedule_does_not(tmp_path):
    plan = tune("gpt3-125m", 8, batch=4, seq_len=64, data_parallel=2)
    plan = dataclasses.replace(plan, block_schedule=BlockSchedule(prefetch_weight=True))
    save_plan(plan, tmp_path / "plan.json")
    result = bench("--plan", tmp_path / "plan.json", "--layers", "out", "--passes", "fwd")
    assert result.exit_code == 0, result.output
    assert "one of 2 replicas runs; their all-reduce does not" in result.output
    assert "not run, the model knows it only: BlockSchedule(" in result.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--mesh", "2x2"), "so --mesh cannot be chosen; leave it out, or use --model instead"),
        (("--model", "gpt3-125m", "--slices", 2), "cannot be chosen; leave them out, or use"),
        (("--dtype", "float32"), "so --dtype cannot be chosen"),
        (("--layers", "ff3"), "the plan has no layer ff3; it has qkv, out, ff1, ff2"),
        (("--scale", 3), "scale 3 does not divide the plan's 256 tokens; 1, 2, 4, "),
        (("--scale", 256), "with 1 tokens (scale 256) the plan's layer qkv cannot run as planned"),
        (("--hardware", "tpu_v9"), "unknown hardware 'tpu_v9'"),
    ],
)
def test_what_cannot_be_is_said_and_ends_with_exit_code_2(path, arguments, words):
    result = bench("--plan", path, *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_a_scale_without_a_plan_is_refused():
    result = bench("--mkn", "8,8,8", "--mesh", "2x2", "--scale", 2)
    assert result.exit_code == 2
    assert "--scale divides the tokens of a --plan" in result.output


def test_a_dtype_that_the_profile_cannot_price_is_refused_only_where_it_was_asked_for():
    small = ("--mkn", "16,16,16", "--mesh", "2x2", "--dtype", "float16", "--passes", "fwd")
    result = bench(*small, "--algorithms", "collective")
    assert result.exit_code == 0, result.output
    assert "modelled ms is empty: the default profile has no FLOP/s for operands of float16" in (
        result.output
    )
    result = bench(*small, "--hardware", "tpu_v4")
    assert result.exit_code == 2
    assert "has no FLOP/s for operands of float16" in result.output


def cpu(count):
    return [types.SimpleNamespace(platform="cpu")] * count


def tpu(count, free=10**9):
    def stats():
        return {"bytes_limit": free + 5, "bytes_in_use": 5}

    fields = {"platform": "tpu", "device_kind": "TPU", "process_index": 0, "memory_stats": stats}
    return [types.SimpleNamespace(**fields)] * count


def test_a_plan_that_does_not_fit_the_machine_is_refused_with_both_numbers():
    plan = tune("gpt3-125m", 4, batch=4, seq_len=64, mesh_shape=(2, 2), algorithm="collective")
    options = planned.plan_options(plan, layers=("out",))
    # By hand: m = 256 tokens, n = k = 768, bfloat16: lhs and out 393,216 bytes, rhs 1,179,648.
    held, elements, largest = 2 * 393_216 + 1_179_648, 2 * 196_608 + 589_824, 1_179_648
    temporaries = [
        schedule(own, getattr(plan.layers["out"], part), plan.mesh_shape).temporary_bytes
        for part, own in layer_problems(plan.problems()["out"], plan.layers["out"].forward).items()
    ]
    needed = 3 * held + 4 * elements + 2 * largest + 4 * max(temporaries)
    free = {"machine": needed}
    assert planned.check_memory(options, plan, cpu(4), free) == options
    words = (
        f"needs at least {needed:,} bytes on this machine and {needed - 1:,} are free; --scale 2"
    )
    with pytest.raises(ValueError, match=words):
        planned.check_memory(options, plan, cpu(4), {"machine": needed - 1})
    with pytest.raises(ValueError, match="no scale fits, the weights are too large"):
        planned.check_memory(options, plan, cpu(4), {"machine": 1000})


def test_on_real_chips_shards_must_fit_each_and_the_dense_product_is_left_out_where_it_does_not():
    plan = tune("gpt3-125m", 4, batch=4, seq_len=64, mesh_shape=(2, 2), algorithm="collective")
    options = planned.plan_options(plan, layers=("out",))
    roomy = {"machine": 10**12, "chip": 10**12}
    assert planned.check_memory(options, plan, tpu(4), roomy).dense_reason is None
    tight = {"machine": 10**12, "chip": 1_900_000}
    reason = planned.check_memory(options, plan, tpu(4), tight).dense_reason
    assert reason == "its 1,966,080 bytes do not fit one chip, 1,900,000 are free"
    with pytest.raises(ValueError, match="bytes on every chip and 1,000 are free"):
        planned.check_memory(options, plan, tpu(4), {"machine": 10**12, "chip": 1000})


def test_free_bytes_are_those_that_the_devices_tell():
    assert planned.free_bytes(tpu(2, free=7))["chip"] == 7
    assert list(planned.free_bytes(cpu(2))) == ["machine"]
    silent = types.SimpleNamespace(
        platform="gpu", device_kind="GPU", process_index=0, memory_stats=lambda: None
    )
    with pytest.raises(RuntimeError, match="GPU does not tell how much memory is free"):
        planned.free_bytes([silent])


def test_free_bytes_of_the_machine_are_those_of_its_container(tmp_path):
    with pytest.raises(RuntimeError, match="the memory that is free is not known"):
        planned.machine_free_bytes(str(tmp_path))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:     2000 kB\n")
    assert planned.machine_free_bytes(str(tmp_path)) == 2000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("60000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    assert planned.machine_free_bytes(str(tmp_path)) == 2000 * 1024
    (group / "memory.max").write_text("100000\n")
    assert planned.machine_free_bytes(str(tmp_path)) == 40500


def test_a_dense_product_that_is_left_out_is_a_row_with_its_reason(path, monkeypatch, tmp_path):
    check = planned.check_memory

    def without_dense(options, plan, devices):
        return dataclasses.replace(check(options, plan, devices), dense_reason="no room")

    monkeypatch.setattr("meshslice_jax.bench.check_memory", without_dense)
    rows_path = tmp_path / "rows.json"
    result = bench("--plan", path, "--layers", "out", "--passes", "fwd", "--json", rows_path)
    assert result.exit_code == 0, result.output
    dense, *others = json.loads(rows_path.read_text())
    assert (dense["status"], dense["reason"], dense["median_ms"]) == ("skipped", "no room", None)
    assert all(row["ratio_to_dense"] is None and row["median_ms"] for row in others)
