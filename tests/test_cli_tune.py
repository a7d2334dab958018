"""`meshslice tune`: what it prints and writes, and everything that it refuses."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from meshslice_jax.autotune import tune_report
from meshslice_jax.cli import plan_report
from meshslice_jax.cli.app import app
from meshslice_jax.cli.tune import parse_bytes, parse_overrides
from meshslice_jax.hardware import hardware_spec, spec_to_json
from meshslice_jax.model_plan import load_plan, plan_to_json

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}
GPT2 |= {"n_positions": 1024}


def tune(*arguments):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def test_the_main_plan_is_printed_with_its_profile_rows_and_losers():
    result = tune("--model", "gpt3-175b", "--chips", 256)
    assert result.exit_code == 0, result.output
    text = result.output
    found = tune_report("gpt3-175b", 256)
    plan = found.plan
    assert "profile tpu_v4 (no constant was fitted); times are modelled, nothing was" in text
    assert f"gpt3-175b on 256 chips: mesh {plan.mesh_shape}, batch 128 x 2048 tokens" in text
    for layer in ("qkv", "out", "ff1", "ff2"):
        for part in ("forward", "grad_lhs", "grad_rhs"):
            (row,) = re.findall(rf"^{layer} +{part} .*$", text, flags=re.MULTILINE)
            predicted = plan.predicted.layers[layer][part]
            own = getattr(plan.layers[layer], part)
            cells = row.split()
            assert cells[8:11] == [own.dataflow.value, own.algorithm, str(own.slice_count)]
            seconds = [predicted.math_s, predicted.comm_row_s, predicted.comm_col_s]
            seconds += [predicted.exposed_s, predicted.total_s]
            assert cells[11:16] == [f"{value * 1e3:.3f}" for value in seconds]
            amounts = [predicted.bytes_row, predicted.bytes_col, predicted.peak_bytes]
            assert cells[16:] == [f"{value / 1e6:.2f}" for value in amounts]
    assert f"one block, forward and backward: {plan.predicted.block_s * 1e3:.3f} ms" in text
    assert "memory of a chip (fc_block): " in text
    for mesh in found.runners_up:
        assert f"  {mesh.mesh_shape}: " in text
        assert mesh.reason in text


def test_the_plan_and_the_report_are_written(tmp_path):
    plan_path, report_path = tmp_path / "plan.json", tmp_path / "report.json"
    result = tune(
        *("--model", "gpt3-125m", "--chips", 16, "--data-parallel", "auto", "--batch", 8),
        *("--memory", "training", "--out", plan_path, "--json", report_path),
    )
    assert result.exit_code == 0, result.output
    expected = tune_report("gpt3-125m", 16, data_parallel="auto", batch=8, memory="training")
    assert load_plan(plan_path) == expected.plan
    written = json.loads(report_path.read_text())
    assert list(written) == ["search", "memory_limit_bytes", "plan", "meshes"]
    assert written["plan"] == json.loads(plan_to_json(expected.plan))
    assert len(written["meshes"]) == len(expected.meshes)
    fields = ["mesh_shape", "data_parallel", "status", "block_s", "memory_bytes", "reason"]
    assert all(list(mesh) == fields for mesh in written["meshes"])
    assert f"plan written to {plan_path}" in result.output.replace("\n", "")
    more = len(expected.runners_up) - plan_report.SHOWN_MESHES
    assert more > 0
    assert f"  and {more} more; --json FILE has them all" in result.output


def test_rejected_meshes_are_printed_with_their_reasons():
    result = tune("--model", "gpt3-125m", "--chips", 16, "--algorithm", "cannon")
    assert result.exit_code == 0, result.output
    _, rejected = result.output.split("rejected:")
    assert "  1x16: qkv: " in rejected
    assert "  16x1: qkv: " in rejected


def test_one_chip_needs_no_communication():
    result = tune("--model", "gpt3-125m", "--chips", 1)
    assert result.exit_code == 0, result.output
    assert "on 1 chip: mesh 1x1" in result.output
    assert "partial sums travel in bfloat16 (reduce_dtype output)" in result.output
    assert "runners-up" not in result.output


def test_pins_reach_the_plan_and_twins_are_shown(tmp_path):
    path = tmp_path / "plan.json"
    result = tune(
        *("--model", "gpt3-125m", "--chips", 8, "--mesh", "2x4", "--batch", 4),
        *("--override", "ff1:row_axis=col,algorithm=collective", "--out", path),
    )
    assert result.exit_code == 0, result.output
    plan = load_plan(path)
    assert tuple(plan.mesh_shape) == (2, 4)
    assert (plan.layers["ff1"].forward.row_axis, plan.layers["ff1"].forward.algorithm) == (
        "col",
        "collective",
    )
    (row,) = re.findall(r"^ff1 +forward .*$", result.output, flags=re.MULTILINE)
    assert " twin " in row


def test_model_only_plans_say_so(tmp_path):
    result = tune("--model", "gpt3-125m", "--chips", 4, "--allow-modelled")
    assert result.exit_code == 0, result.output
    assert "MODEL-ONLY: BlockSchedule(" in result.output
    assert "no runtime executes this order yet" in result.output


def test_a_config_file_and_a_hardware_file_are_read(tmp_path):
    config, machine = tmp_path / "config.json", tmp_path / "mine.json"
    config.write_text(json.dumps(GPT2))
    text = spec_to_json(hardware_spec("tpu_v5e")).replace('"tpu_v5e"', '"mine"')
    machine.write_text(text)
    result = tune("--config", config, "--chips", 4, "--hardware", machine)
    assert result.exit_code == 0, result.output
    assert "profile mine (" in result.output


def config(tmp_path, **fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in (GPT2 | fields).items() if v is not None}))
    return path


def test_the_default_sequence_is_no_longer_than_a_models_positions(tmp_path):
    found = ("--config", config(tmp_path), "--chips", 4)
    assert "batch 2 x 1024 tokens" in tune(*found).output
    result = tune(*found, "--seq-len", 2048)
    assert result.exit_code == 2
    assert "seq_len 2048 is more than the 1024 positions" in result.output


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model_type": "mamba"}, "unknown architecture model_type='mamba'"),
        ({"model_type": None}, "unknown architecture model_type=None"),
        ({"n_embd": None}, "field 'n_embd' is missing (gpt2 needs it)"),
        ({"n_head": "12"}, "field 'n_head' must be a positive integer, got '12'"),
    ],
)
def test_configs_that_cannot_be_read_are_refused(tmp_path, fields, words):
    result = tune("--config", config(tmp_path, **fields), "--chips", 4)
    assert result.exit_code == 2
    assert words in result.output


GPT3 = ("--model", "gpt3-175b", "--chips", 256)
SMALL = ("--model", "gpt3-125m", "--chips", 4)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--chips", 4), "give either --model NAME or --config config.json"),
        ((*SMALL, "--config", "c.json"), "give either --model NAME or --config config.json"),
        (("--model", "gpt9", "--chips", 4), "unknown model 'gpt9': no such file, and not one of"),
        (("--config", "no.json", "--chips", 4), "error: model 'no.json': no such file"),
        (("--config", "nothing", "--chips", 4), "error: model 'nothing': no such file"),
        (("--model", "no.json", "--chips", 4), "error: model 'no.json': no such file"),
        (("--model", "gpt3-175b", "--chips", 251), "tune: no mesh of 251 chips runs gpt3-175b"),
        (("--model", "gpt3-175b", "--chips", 0), "num_chips must be a positive integer, got 0"),
        ((*SMALL, "--memory-limit", "1MiB"), "over the limit of 1,048,576"),
        ((*GPT3, "--memory-limit", "lots"), "memory limit 'lots' is not a whole number of bytes"),
        ((*SMALL, "--memory", "cache"), "memory='cache' is not one of fc_block, training"),
        ((*SMALL, "--hardware", "tpu_v9"), "unknown hardware 'tpu_v9'"),
        ((*SMALL, "--hardware", "no.json"), "hardware file 'no.json' does not exist"),
        ((*SMALL, "--dtype", "float64"), "has no FLOP/s for operands of float64"),
        ((*SMALL, "--dtype", "real"), "dtype 'real' is not a dtype"),
        ((*SMALL, "--reduce-dtype", "int8"), "reduce_dtype='int8' is not one of"),
        ((*SMALL, "--search", "lucky"), "search='lucky' is not one of exact, paper"),
        ((*SMALL, "--algorithm", "warp"), "unknown algorithm 'warp'; there are meshslice"),
        ((*SMALL, "--mesh", "4by1"), "mesh '4by1' is not of the form ROWSxCOLS"),
        ((*SMALL, "--mesh", "3x1"), "mesh_shape (3, 1) with data_parallel 1 does not make 4 chips"),
        ((*SMALL, "--batch", 0), "batch must be a positive integer, got 0"),
        ((*SMALL, "--data-parallel", "many"), "'many' is neither a number of replicas nor auto"),
        ((*SMALL, "--data-parallel", 3), "data_parallel 3 must divide num_chips 4"),
        ((*SMALL, "--override", "qkv"), "--override 'qkv' is not of the form LAYER:FIELD=VALUE"),
        ((*SMALL, "--override", "qkv:slice_count=x"), "slice_count must be a whole number"),
        ((*SMALL, "--override", "qkv:speed=9"), "unknown fields speed; GemmPlan has algorithm"),
        ((*SMALL, "--override", "head:slice_count=2"), "overrides for unknown layers head"),
        ((*SMALL, "--out", "no/such/plan.json"), "there is no folder"),
        ((*SMALL, "--out", "."), "is a folder; name a file in it"),
        ((*SMALL, "--override", "qkv:batch_axes=d"), "batch_axes must be a tuple"),
    ],
)
def test_what_cannot_be_is_said_and_ends_with_exit_code_2(arguments, words):
    result = tune(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_a_prime_number_of_chips_is_explained_mesh_by_mesh():
    text = tune("--model", "gpt3-175b", "--chips", 251).output
    assert "  1x251: " in text
    assert "  251x1: " in text
    assert "ways out: 192 chips; or 256 chips; or data_parallel 251 with batch 251" in text


@pytest.mark.parametrize(
    "text, count",
    [
        ("1000", 1000),
        ("16GiB", 16 * 2**30),
        ("5 GB", 5 * 10**9),
        ("3MiB", 3 * 2**20),
        ("1,048,576", 2**20),
    ],
)
def test_bytes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-4", "1.5GiB", "4TB", "1,5"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match="is not a whole number of bytes, or of one of GB, GiB"):
        parse_bytes(text)


def test_overrides_are_read():
    texts = ["qkv:dataflow=ls,slice_count=4", "qkv:block_size=none", "ff1:ring=row"]
    assert parse_overrides(texts) == {
        "qkv": {"dataflow": "ls", "slice_count": 4, "block_size": None},
        "ff1": {"ring": "row"},
    }


def test_no_device_is_touched():
    code = """
import sys
from typer.testing import CliRunner
from meshslice_jax import compat
from meshslice_jax.cli.app import app
result = CliRunner().invoke(app, ["tune", "--model", "gpt3-125m", "--chips", "4"])
print(result.exit_code, compat.jax_has_started(), "matplotlib" in sys.modules)
"""
    call = [sys.executable, "-c", code]
    found = subprocess.run(call, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "0 False False", found.stderr


def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    from meshslice_jax.cli import common

    monkeypatch.setattr(common.os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"plan\.json cannot be written"):
        common.check_outputs(tmp_path / "plan.json")
