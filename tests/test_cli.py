"""The commands, in this process where JAX already runs and in new ones where it doesn't."""

import csv
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import meshslice_jax
from meshslice_jax import gemm
from meshslice_jax.cli import common, doctor, report
from meshslice_jax.cli.app import app

SMALL = ["bench", "--mesh", "2x2", "--mkn", "32,16,64", "--repeats", "1", "--passes", "fwd"]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def command(*arguments, **environment):
    """`meshslice` in a process of its own, so that it starts JAX itself."""
    call = [sys.executable, "-c", "from meshslice_jax.cli import main; main()", *arguments]
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return subprocess.run(call, capture_output=True, text=True, env=kept | environment, timeout=120)


def test_bench_prints_a_checked_table_under_a_banner():
    result = invoke(*SMALL, "--algorithms", "meshslice,collective", "--slices", "1,2")
    assert result.exit_code == 0, result.output
    text = result.output
    assert f"meshslice-jax {meshslice_jax.__version__}, jax " in text
    assert "do not predict hardware" in text
    assert f"share {common.num_threads()} CPU threads" in text
    assert "32,16,64 fwd: A[m=32,k=16] B[k=16,n=64], float32" in text
    assert "skipped collective os S=2: collective has no slices" in text
    assert "6 rows: 5 ok, 1 skipped, 0 failed; 0 wrong answers" in text
    assert "fastest of each pass, measured" in text
    assert "/gspmd and /dense are medians of the ratios within each round" in text


def test_bench_writes_rows_bars_and_the_data_of_the_bars(tmp_path):
    files = {name: tmp_path / name for name in ("rows.json", "rows.jsonl", "bars.png")}
    result = invoke(*SMALL, "--json", files["rows.json"], "--plot", files["bars.png"])
    assert result.exit_code == 0, result.output
    rows = json.loads(files["rows.json"].read_text())
    assert [row["algorithm"] for row in rows][-7:] == list(meshslice_jax.ALGORITHMS)
    assert {(row["layer"], row["pass"], row["m"], row["n"], row["k"]) for row in rows} == {
        ("32,16,64", "fwd", 32, 64, 16)
    }
    assert files["bars.png"].read_bytes().startswith(b"\x89PNG")
    drawn = list(csv.DictReader((tmp_path / "bars.csv").read_text().splitlines()))
    assert [row["algorithm"] for row in drawn] == [row["algorithm"] for row in rows]
    invoke(*SMALL, "--algorithms", "wang", "--json", files["rows.jsonl"])
    lines = files["rows.jsonl"].read_text().splitlines()
    assert [json.loads(line)["algorithm"] for line in lines] == ["dense", "gspmd", "wang"]


def test_a_narrow_terminal_leaves_out_columns_and_never_cuts_a_cell(monkeypatch):
    wide = invoke(*SMALL, "--algorithms", "meshslice")
    assert all(name in wide.output for name in report.COLUMNS)
    monkeypatch.setattr(common, "PLAIN_WIDTH", 80)
    narrow = invoke(*SMALL, "--algorithms", "meshslice").output
    assert "median ms" in narrow
    assert "/gspmd" in narrow
    assert "min-max ms" not in narrow
    assert "…" not in narrow


def test_a_wrong_answer_is_said_and_ends_with_exit_code_1(monkeypatch, tmp_path):
    contract = gemm.contract
    monkeypatch.setattr(gemm, "contract", lambda *args, **fields: -contract(*args, **fields))
    path = tmp_path / "rows.json"
    result = invoke(*SMALL, "--algorithms", "meshslice", "--json", path)
    assert result.exit_code == 1
    assert "failed meshslice os S=4" in result.output
    assert "1 wrong answers" in result.output
    row = json.loads(path.read_text())[-1]
    assert (row["check"], row["status"], row["median_ms"]) == ("FAILED", "failed", None)


def test_rows_measured_before_an_interruption_are_kept(monkeypatch, tmp_path):
    contract, calls = gemm.contract, []

    def interrupted(*args, **fields):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return contract(*args, **fields)

    monkeypatch.setattr(gemm, "contract", interrupted)
    path = tmp_path / "rows.json"
    invoke(*SMALL, "--passes", "fwd,dlhs", "--algorithms", "wang", "--json", path)
    assert {row["pass"] for row in json.loads(path.read_text())} == {"fwd"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--mkn", "8,8,8", "--mesh", "4by4"], "mesh '4by4' is not of the form ROWSxCOLS"),
        (["--mkn", "8,8,8", "--mesh", "4x8"], "already runs with 16 CPU devices and 32 are needed"),
        (["--mkn", "8,8,8", "--devices", "8"], "a 4x4 mesh needs 16 devices, got 8"),
        (["--mkn", "8,8"], "--mkn '8,8' is not three extents M,K,N"),
        (["--mkn", "8,8,-8"], "is not a list of positive integers"),
        ([], "give either --model NAME or --mkn M,K,N"),
        (["--mkn", "8,8,8", "--model", "gpt3-125m"], "give either --model NAME or --mkn M,K,N"),
        (["--model", "gpt9"], "unknown model 'gpt9': no such file, and not one of gpt3-125m"),
        (["--model", "gpt3-125m", "--layers", "ff3"], "no layer ff3; it has qkv, out, ff1, ff2"),
        (["--mkn", "8,8,8", "--algorithms", "warp"], "unknown algorithm 'warp'; there are"),
        (["--mkn", "8,8,8", "--algorithms", "a,,b"], "is not a list such as a,b"),
        (["--mkn", "8,8,8", "--dataflows", "ws"], "unknown dataflow ws; there are os, ls, rs"),
        (["--mkn", "8,8,8", "--slices", "0"], "--slices '0' is not a list of positive integers"),
        (["--mkn", "8,8,8", "--dtype", "float8"], "dtype 'float8' is not one of float32"),
        (["--mkn", "8,8,8", "--passes", "back"], "unknown pass back"),
        (["--mkn", "8,8,8", "--repeats", "0"], "repeats must be at least 1"),
        (["--mkn", "8,8,8", "--platform", "npu"], "platform 'npu' is not one of cpu, tpu, gpu"),
        (["--mkn", "8,8,8", "--platform", "tpu"], "no tpu is visible to JAX"),
        (["--mkn", "8,8,8", "--platform", "gpu", "--devices", "4"], "emulated on cpu only"),
        (["--mkn", "8,8,8", "--json", "no/such/a.json"], "there is no folder"),
        (["--mkn", "8,8,8", "--json", "."], "is a folder; name a file in it"),
        (["--mkn", "8,8,8", "--json", "/dev/full/a.json"], "there is no folder"),
    ],
)
def test_usage_errors_say_what_is_wrong_and_end_with_exit_code_2(arguments, words):
    result = invoke("bench", *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_a_plot_without_matplotlib_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: None)
    result = invoke(*SMALL, "--plot", "a.png")
    assert result.exit_code == 2
    assert "--plot needs matplotlib: pip install matplotlib" in result.output


def test_doctor_names_versions_devices_flags_and_what_is_missing(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--some_flag=1")
    found = common.version_of
    monkeypatch.setattr(
        common, "version_of", lambda name: None if name == "matplotlib" else found(name)
    )
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert f"meshslice-jax {meshslice_jax.__version__} jax {found('jax')}" in text
    assert "devices: 16 x cpu (platform cpu, process 0 of 1)" in text
    assert "LIBTPU_INIT_ARGS=--some_flag=1" in text
    assert "bench ready" in text
    assert "bench --plot missing matplotlib pip install matplotlib bench --platform" in text


def test_doctor_fails_where_a_product_cannot_run(monkeypatch):
    monkeypatch.setattr(doctor, "find_platform", lambda platform: "no backend")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "devices: none (no backend)" in result.output


def test_version_is_the_packages():
    assert invoke("--version").output.strip() == f"meshslice-jax {meshslice_jax.__version__}"


def test_bench_emulates_its_devices_and_keeps_the_users_flags():
    flags = "--xla_cpu_enable_fast_math=false"
    result = command(*SMALL, "--devices", "6", "--algorithms", "wang", XLA_FLAGS=flags)
    assert result.returncode == 0, result.stderr
    assert "| 6 x cpu |" in result.stdout
    assert f"XLA_FLAGS='{flags}'" in result.stdout


def test_bench_in_float64_checks_in_float64(tmp_path):
    path = tmp_path / "rows.json"
    result = command(*SMALL, "--dtype", "float64", "--algorithms", "meshslice", "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert {(row["dtype"], row["check"]) for row in json.loads(path.read_text())} == {
        ("float64", "pass")
    }


def test_bench_of_nothing_that_fits_is_no_success():
    result = invoke(
        "bench", "--mkn", "7,7,7", "--mesh", "2x2", "--devices", "16", "--passes", "fwd",
        "--algorithms", "meshslice,cannon", "--repeats", "1",
    )  # fmt: skip
    assert result.exit_code == 1
    assert "; no plan ran" in result.output
