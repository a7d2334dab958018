#!/usr/bin/env python
"""Kills one process of a program of several again and again; nothing may hang or be left.

    python scripts/kill_rank.py --program train --kills 10
    python scripts/kill_rank.py --program bench --kills 10
    python scripts/kill_rank.py --program wire --kills 3     # needs root

The program is started by `meshslice launch` (the wire benchmark starts itself). At a random
moment a random one of its processes gets SIGKILL, or with --freeze SIGSTOP, which only shows
by its silence. Then

    the launcher ends within --within seconds, names that process and passes its code on
    no process of the program, and no network namespace, is left
    training goes on at the newest whole checkpoint: only the steps since then are lost

Exit code 1 if anything is otherwise.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshslice_jax import distributed
from meshslice_jax.train.checkpoint import fault
from meshslice_jax.train.log import read_log

_MAIN = [sys.executable, "-c", "from meshslice_jax.cli import main; main()"]
_LAUNCH = "launch -n 2 --devices-per-process 2 --heartbeat-timeout 5 --join-timeout 12 --".split()
_TRAIN = "train --mesh 2x2 --hidden 64 --heads 4 --layers 1 --batch 4 --seq-len 32".split()
_BENCH = "bench --mesh 2x2 --mkn 256,256,256 --passes fwd --repeats 50".split()
_WIRE = "bench --wire 1000 --mesh 1x2 --mkn 512,512,512 --passes fwd --repeats 50".split()
#: Steps of training between checkpoints, and in all: more than any trial makes.
_EVERY, _STEPS = 5, 100_000


def command(program: str, folder: Path) -> list[str]:
    """The command line of a program."""
    if program == "wire":
        return [*_MAIN, *_WIRE]
    if program == "bench":
        return [*_MAIN, *_LAUNCH, *_MAIN, *_BENCH]
    run = ["--steps", str(_STEPS), "--checkpoint-every", str(_EVERY)]
    where = ["--checkpoint-dir", str(folder / "run"), "--resume"]
    return [*_MAIN, *_LAUNCH, *_MAIN, *_TRAIN, *run, *where]


def ranks(launcher: int) -> dict[int, int]:
    """Process id in the program -> process, of a launcher's children."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher:
                variables = (folder / "environ").read_bytes().split(b"\0")
                name = f"{distributed.PROCESS_ID}=".encode()
                for variable in variables:
                    if variable.startswith(name):
                        found[int(variable.removeprefix(name))] = int(folder.name)
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
    return found


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def newest(folder: Path) -> int:
    """The step of the newest whole checkpoint, or 0."""
    found = [path for path in (folder / "run").glob("step_*") if path.name[5:].isdecimal()]
    return max((int(path.name[5:]) for path in found if fault(path) is None), default=0)


def steps(folder: Path) -> list[int]:
    """The steps in the log of training, in the order in which they were made."""
    path = folder / "run" / "log.jsonl"
    return [one["step"] for one in read_log(path)] if path.exists() else []


def trial(program: str, folder: Path, wait_s: float, number: int, within_s: float) -> list[str]:
    """Starts the program and ends one of its processes.

    Returns:
      What is wrong.
    """
    before, made = newest(folder), len(steps(folder))
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with open(folder / "output", "w+") as output:
        launcher = subprocess.Popen(
            command(program, folder), stdout=output, stderr=output, env=os.environ | cache
        )
        while len(ranks(launcher.pid)) < 2 and launcher.poll() is None:
            time.sleep(0.02)
        everyone = ranks(launcher.pid)
        time.sleep(wait_s)
        if launcher.poll() is not None:
            return [f"it ended by itself with {launcher.returncode}:\n{_text(folder)}"]
        victim = random.choice(sorted(everyone))
        os.kill(everyone[victim], number)
        begin = time.monotonic()
        try:
            code = launcher.wait(within_s)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
            return [f"it did not end within {within_s:g} s"]
    took_s, text, wrong = time.monotonic() - begin, _text(folder), []
    if number == signal.SIGKILL and code != 128 + number:
        wrong.append(f"its code is {code}")
    if f"rank {victim} " not in text:
        wrong.append(f"it does not name rank {victim}:\n{text}")
    if left := [pid for pid in everyone.values() if alive(pid)]:
        wrong.append(f"processes {left} are left")
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout
    if f"ms{launcher.pid}-" in names:
        wrong.append(f"namespaces are left: {names.split()}")
    ours = steps(folder)[made:]
    if ours and ours[0] != before + 1:  # a checkpoint of step n was saved after step n
        wrong.append(f"it went on at step {ours[0]} after a checkpoint of step {before}")
    done = f"steps {ours[0]}-{ours[-1]}, " if ours else ""
    print(f"rank {victim} after {wait_s:.1f} s: {done}ended {took_s:.1f} s later", flush=True)
    return wrong


def _text(folder: Path) -> str:
    return (folder / "output").read_text()[-2000:]


def main() -> None:
    """Runs the trials."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", choices=("train", "bench", "wire"), default="train")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--latest", type=float, default=15.0, help="seconds until a kill, at most")
    parser.add_argument("--within", type=float, default=25.0, help="seconds until all has ended")
    parser.add_argument("--freeze", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    random.seed(chosen.seed)
    number, failed = signal.SIGSTOP if chosen.freeze else signal.SIGKILL, 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(chosen.kills):
            wait_s = random.uniform(0.0, chosen.latest)
            wrong = trial(chosen.program, Path(folder), wait_s, number, chosen.within)
            failed += bool(wrong)
            print(*(f"WRONG: {text}" for text in wrong), sep="\n", end="", flush=True)
    print(f"{chosen.kills} kills of {chosen.program}: {failed} wrong")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
