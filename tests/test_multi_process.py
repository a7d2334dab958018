"""Products, the benchmark and what is decided, in several processes that JAX has joined."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshslice_jax import distributed
from meshslice_jax.algorithms import ALGORITHMS
from meshslice_jax.launch import Limits, launch
from meshslice_jax.train.log import read_log

TESTS = Path(__file__).parent
LIMITS = Limits(timeout_s=500, step_s=120)
PROGRAM = [sys.executable, str(TESTS / "multi_process_program.py")]
MESHSLICE = [sys.executable, "-c", "from meshslice_jax.cli import main; main()"]


def run(command, num_processes, devices_per_process, capsys, limits=LIMITS):
    """The outcome, and the lines of standard output."""
    outcome = launch(
        command,
        num_processes=num_processes,
        devices_per_process=devices_per_process,
        limits=limits,
    )
    shown = capsys.readouterr()
    return outcome, shown.out.splitlines(), shown.err


def check_table(count, num_processes, devices_per_process, capsys):
    outcome, lines, errors = run([*PROGRAM, str(count)], num_processes, devices_per_process, capsys)
    assert outcome.exit_code == 0, errors
    lines = [line for line in lines if "cases" in line]
    assert len(lines) == num_processes
    found = {int(line.split()[3]) for line in lines}
    assert len(found) == 1
    assert all(line.endswith(f"{devices_per_process} devices") for line in lines)
    return found.pop()


@pytest.mark.slow
def test_products_and_gradients_in_two_processes_of_four_devices(capsys):
    count = check_table(1, 2, 4, capsys)
    assert count == len(ALGORITHMS) - 1  # Cannon needs a square mesh


@pytest.mark.slow
def test_more_products_in_two_processes_of_four_devices(capsys):
    assert check_table(3, 2, 4, capsys) == 3 * (len(ALGORITHMS) - 1)


@pytest.mark.slow
def test_products_and_gradients_in_four_processes_of_one_device(capsys):
    assert check_table(2, 4, 1, capsys) == 2 * len(ALGORITHMS)


BENCH = "bench --mesh 2x2 --mkn 16,32,16 --passes fwd --algorithms meshslice --repeats 1".split()


def test_the_benchmark_prints_and_writes_once_and_decides_together(tmp_path, capsys):
    path = tmp_path / "rows.json"
    outcome, lines, errors = run([*MESHSLICE, *BENCH, "--json", str(path)], 2, 2, capsys)
    assert outcome.exit_code == 0, errors
    assert sum("4 x cpu in 2 processes" in line for line in lines) == 1
    assert sum("2 ok, 1 skipped" in line for line in lines) == 1
    rows = {row["algorithm"]: row for row in json.loads(path.read_text())}
    assert "one device, which is not every process's" in rows["dense"]["reason"]
    for name in ("gspmd", "meshslice"):
        assert (rows[name]["check"], rows[name]["status"]) == ("pass", "ok")
        assert rows[name]["median_ms"] > 0


#: Patches the kernel of process 1 alone, so that only its shards are wrong.
WRONG = """
import dataclasses, sys
from meshslice_jax import algorithms, distributed
world = distributed.initialize()
true = algorithms.ALGORITHMS["meshslice"]
if world.process_id == 1:
    wrong = dataclasses.replace(true, kernel=lambda *job: true.kernel(*job) + 1)
    algorithms.ALGORITHMS = dict(algorithms.ALGORITHMS) | {"meshslice": wrong}
from meshslice_jax.cli import main
sys.argv[0] = "meshslice"
main()
"""


@pytest.mark.slow
def test_an_answer_that_is_wrong_on_one_process_is_wrong(tmp_path, capsys):
    path = tmp_path / "rows.json"
    command = [sys.executable, "-c", WRONG, *BENCH, "--json", str(path)]
    outcome, _, _ = run(command, 2, 2, capsys)
    assert outcome.exit_code == 1
    row = json.loads(path.read_text())[-1]
    assert (row["algorithm"], row["check"]) == ("meshslice", "FAILED")
    assert row["reason"].startswith("process 1: 64 of 64 elements on ")
    assert row["median_ms"] is None


DECISIONS = """
import sys, time
import meshslice_jax as ms
from meshslice_jax import distributed
from meshslice_jax.shared_plan import shared_plan
me = distributed.initialize().process_id
hardware = ("tpu_v4", "tpu_v5e")[me]  # each would decide for itself
plan = shared_plan(ms.tune("gpt3-125m", 4, hardware=hardware))
texts = distributed.gather_text(str(me))
print(plan.hardware, *texts, flush=True)
distributed.barrier()
if me == 1:
    raise ValueError("rank one is broken")
time.sleep(60)
"""


def test_decisions_are_those_of_process_0_and_an_exception_ends_all(capsys):
    outcome, lines, errors = run([sys.executable, "-c", DECISIONS], 2, 1, capsys)
    assert sorted(line for line in lines if "tpu" in line) == ["[0] tpu_v4 0 1", "[1] tpu_v4 0 1"]
    assert (outcome.exit_code, outcome.reason) == (1, "rank 1 failed")
    assert "[1] ValueError: rank one is broken" in errors


@pytest.mark.slow
def test_a_mesh_that_the_processes_cannot_fill_names_the_way_out(capsys):
    outcome, _, errors = run([*MESHSLICE, *BENCH], 2, 1, capsys)
    assert outcome.exit_code in (1, 2)  # told before it ends, or ended
    assert "a 2x2 mesh needs 4 devices and there are 2 (cpu); use --devices-per-process 2" in errors


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train", "bench"])
def test_a_rank_that_is_killed_leaves_nothing_and_hangs_nothing(program):
    """Two of the kills that scripts/kill_rank.py makes by the dozen."""
    script = TESTS.parent / "scripts" / "kill_rank.py"
    words = ["--program", program, "--kills", "1", "--latest", "8", "--within", "60"]
    found = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"1 kills of {program}: 0 wrong" in found.stdout


@pytest.mark.slow
def test_training_in_two_processes_has_the_losses_of_one(tmp_path, capsys):
    words = "train --mesh 2x2 --hidden 32 --heads 4 --layers 1 --batch 4 --seq-len 16 --steps 3"
    logs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    kept = {name: value for name, value in os.environ.items() if name != distributed.COORDINATOR}
    command = [*MESHSLICE, *words.split(), "--log"]
    subprocess.run([*command, str(logs[0])], env=kept, check=True, capture_output=True, timeout=200)
    outcome, _, errors = run([*command, str(logs[1])], 2, 2, capsys)
    assert outcome.exit_code == 0, errors
    one, two = ([entry["loss"] for entry in read_log(log)] for log in logs)
    assert len(one) == 3
    assert two == pytest.approx(one, rel=1e-5)  # sums in another order: gloo's, not XLA's own
