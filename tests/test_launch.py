"""`meshslice launch`: exit codes, output, limits, and that nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from meshslice_jax import distributed
from meshslice_jax.cli.app import app
from meshslice_jax.launch import TIMED_OUT, Limits, launch

#: A program without JAX that speaks to the launcher as one that joins does.
PROGRAM = """
import os, signal, sys, time
me = int(os.environ["MESHSLICE_PROCESS_ID"])
signal.signal(signal.SIGUSR1, lambda *_: print("I am here", flush=True))
say = lambda *words: [os.write(int(os.environ["MESHSLICE_BEAT_FD"]), w) for w in words]
"""


def python(body):
    return [sys.executable, "-c", PROGRAM + body]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # a zombie is gone
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_every_process_knows_its_place_and_its_lines_carry_its_number(capsys):
    body = """
print("[Gloo] Rank 0 is connected to 1 peer ranks."); print("Expected connected peer ranks: 1")
print(me, os.environ["MESHSLICE_NUM_PROCESSES"], os.environ["MESHSLICE_DEVICES_PER_PROCESS"])
print("without an end", end="", file=sys.stderr)
"""
    outcome = launch(python(body), num_processes=2, devices_per_process=3)
    assert (outcome.exit_code, outcome.reason) == (0, None)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] 0 2 3", "[1] 1 2 3"]
    assert sorted(shown.err.splitlines()) == ["[0] without an end", "[1] without an end"]


@pytest.mark.parametrize(
    "end, code, words",
    [
        ("sys.exit(7)", 7, "rank 1 ended with exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was ended by SIGKILL"),
        # JAX would now wait for the others, so the process tells before it ends.
        ("say(b'f'); time.sleep(60)", 1, "rank 1 failed"),
    ],
)
def test_when_one_fails_all_are_ended_at_once(end, code, words):
    begin = time.monotonic()
    outcome = launch(python(f"if me == 1: {end}\ntime.sleep(60)"), num_processes=3)
    assert (outcome.exit_code, outcome.reason) == (code, words)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    "body, limits, words",
    [
        ("time.sleep(60)", {"timeout_s": 0.3}, "longer than 0.3 s; still running: rank 0, rank 1"),
        (
            "say(b'.'); os.kill(os.getpid(), signal.SIGSTOP) if me else None\n"
            "while True: say(b'.'); time.sleep(0.05)",
            {"heartbeat_s": 1.0},
            "rank 1 gave no sign of life for 1 s",
        ),
        (
            "say(b'j') if me == 0 else None\ntime.sleep(60)",
            {"join_s": 0.3},
            "rank 1 did not join the others within 0.3 s",
        ),
        (
            "say(*[b's'] * (3 - me))\ntime.sleep(60)",
            {"step_s": 0.5},
            "no process made a step for 0.5 s; furthest behind, with 2 steps: rank 1",
        ),
        (
            "say(b'l') if me == 0 else None\ntime.sleep(60)",
            {"leave_s": 0.3},
            "rank 0 reached the end of the program, and 0.3 s later rank 1 had not",
        ),
    ],
)
def test_what_hangs_is_named_and_ended_in_time(body, limits, words, capsys):
    begin = time.monotonic()
    outcome = launch(python(body), num_processes=2, limits=Limits(grace_s=1.0, **limits))
    assert outcome.exit_code == TIMED_OUT
    assert words in outcome.reason
    assert time.monotonic() - begin < 20
    if "step_s" in limits:  # who spoke to the launcher says where it is
        assert sorted(capsys.readouterr().out.splitlines()) == ["[0] I am here", "[1] I am here"]


def test_what_ignores_sigterm_is_killed_with_all_that_it_started(tmp_path, capsys):
    body = f"""
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path)!r} + f"/{{me}}", "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(60)
"""
    outcome = launch(python(body), num_processes=2, limits=Limits(timeout_s=1.5, grace_s=0.2))
    assert outcome.exit_code == TIMED_OUT
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
def test_nothing_is_left_when_the_launcher_itself_is_ended(number, tmp_path):
    body = f"""
open({str(tmp_path)!r} + f"/{{me}}", "w").write(str(os.getpid()))
time.sleep(60)
"""
    # A job in the background ignores SIGINT, and so would what it starts.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"from meshslice_jax.launch import launch; launch({python(body)!r}, num_processes=2)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    files = [tmp_path / "0", tmp_path / "1"]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in files), 30)
    pids = [int(file.read_text()) for file in files]
    launcher.send_signal(number)
    launcher.wait(20)
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_the_command_passes_the_exit_code_on_and_says_why():
    runner = CliRunner()
    command = ["launch", "-n", "2", "--", *python("sys.exit(me * 5)")]
    found = runner.invoke(app, command)
    assert found.exit_code == 5
    assert "meshslice launch: rank 1 ended with exit code 5; all processes were ended" in (
        found.output
    )
    assert runner.invoke(app, [*command[:4], "true"]).exit_code == 0


def test_usage_errors():
    runner = CliRunner()
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = runner.invoke(app, ["launch", "-n", "2", "--port", port, "--", "true"])
    assert found.exit_code == 2
    assert f"port {port} can't be listened on" in found.output
    found = runner.invoke(app, ["launch", "-n", "2", "--", "/no/such/program"])
    assert found.exit_code == 2
    assert "'/no/such/program' can't be started: No such file or directory" in found.output
    with pytest.raises(ValueError, match="num_processes must be at least 1, got 0"):
        launch(["true"], num_processes=0)
    with pytest.raises(ValueError, match="there is no command to launch"):
        launch([], num_processes=1)
    with pytest.raises(ValueError, match="grace_s must be more than 0 seconds, got 0"):
        Limits(grace_s=0)


def test_alone_there_is_nothing_to_join(monkeypatch):
    assert distributed.initialize() == distributed.World()
    distributed.step()
    distributed.fail()
    distributed.barrier()
    assert distributed.is_first()
    assert distributed.gather_text("a") == ("a",)
    assert distributed.first_text("a") == "a"


@pytest.mark.parametrize(
    "variables, words",
    [
        ({}, "MESHSLICE_NUM_PROCESSES is not"),
        ({"NUM_PROCESSES": "two"}, "MESHSLICE_NUM_PROCESSES='two' is not a number"),
        ({"NUM_PROCESSES": "2", "PROCESS_ID": "2"}, "MESHSLICE_PROCESS_ID=2 is not in 0 .."),
        ({"NUM_PROCESSES": "2", "PROCESS_ID": "1", "COORDINATOR": "here"}, "is not HOST:PORT"),
    ],
)
def test_variables_that_make_no_sense(variables, words, monkeypatch):
    for name, value in ({"COORDINATOR": "127.0.0.1:1"} | variables).items():
        monkeypatch.setenv(f"MESHSLICE_{name}", value)
    with pytest.raises(ValueError, match=words):
        distributed.initialize()


def test_devices_must_not_be_held_before_joining(monkeypatch):
    values = {"COORDINATOR": "127.0.0.1:1", "NUM_PROCESSES": "2", "PROCESS_ID": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"MESHSLICE_{name}", value)
    with pytest.raises(RuntimeError, match="before anything touches a device"):
        distributed.initialize()


def join(process, port, timeout_s):
    """A process that only tries to join; its error output."""
    variables = {
        distributed.COORDINATOR: f"127.0.0.1:{port}",
        distributed.NUM_PROCESSES: "2",
        distributed.PROCESS_ID: str(process),
        distributed.JOIN_TIMEOUT_S: str(timeout_s),
    }
    code = "from meshslice_jax import distributed; distributed.initialize()"
    kept = {key: value for key, value in os.environ.items() if key != distributed.BEAT_FD}
    found = subprocess.run(
        [sys.executable, "-c", code], env=kept | variables, capture_output=True, timeout=60
    )
    assert found.returncode == 1
    return found.stderr.decode()


def test_a_coordinator_out_of_reach_and_a_port_in_use_are_named_in_time():
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        assert (
            f"process 1 can't reach the coordinator (process 0) at 127.0.0.1:{port} within 1 s"
            in join(1, port, 1)
        )
        taken.listen()
        assert f"process 0 can't listen on port {port}: Address already in use" in join(0, port, 1)
