#!/usr/bin/env python
"""Kills `meshslice train` again and again; every resume must continue the loss curve exactly.

    python scripts/kill_test.py --kills 20

First one run is left alone. Then the same run is started in a fresh folder, killed with
SIGKILL, resumed, killed, and so on; when it reaches its end a new one begins. Every other
kill waits for a checkpoint that is being written or removed, the others come at random moments,
before the first step too. After each kill

    every loss in the log equals, bit for bit, that of the run that was left alone
    the next run goes on at the newest checkpoint that was committed: only the steps since
    then are lost

and after some kills the newest checkpoint is truncated: it has to be passed over,
with a message, for the one before it. Exit code 1 if anything is otherwise.

What runs is a copy of the package made at the beginning: one that is edited meanwhile would fail
between two kills, or go on with another model.
"""

import argparse
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import meshslice_jax
from meshslice_jax.train.checkpoint import fault
from meshslice_jax.train.log import read_log

_MAIN = [sys.executable, "-c", "from meshslice_jax.cli import main; main()"]
_MODEL = "--mesh 2x4 --hidden 64 --heads 4 --layers 2 --batch 8 --seq-len 64".split()


@dataclasses.dataclass
class Trial:
    """One run in one folder.

    Attributes:
      folder: of its checkpoints and log.
      steps: of the run.
      every: steps between checkpoints.
      code: exit code of the last run that ended by itself.
    """

    folder: Path
    steps: int
    every: int
    code: int = 0

    def start(self) -> subprocess.Popen:
        """The training program, from its newest checkpoint; its output goes to a file."""
        run = ["--steps", str(self.steps), "--checkpoint-every", str(self.every)]
        where = ["--checkpoint-dir", str(self.folder), "--resume"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        cache = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(self.folder.parent / "source"),
        }
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / "output", "w") as output:
            return subprocess.Popen(
                [*_MAIN, "train", *_MODEL, *run, *where],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=kept | cache,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) in the order in which they were logged."""
        path = self.folder / "log.jsonl"
        return [(one["step"], one["loss"]) for one in read_log(path)] if path.exists() else []

    def committed(self) -> list[int]:
        """Steps of whole checkpoints, ascending."""
        folders = [path for path in self.folder.glob("step_*") if path.name[5:].isdecimal()]
        return sorted(int(path.name[5:]) for path in folders if fault(path) is None)

    def unfinished(self) -> set[str]:
        """Folders of checkpoints whose writing or removal goes on, or was killed."""
        return {path.name for path in self.folder.glob("step_*tmp*")}


def kill(trial: Trial, in_a_write: bool, latest_s: float, rng: random.Random) -> tuple[bool, str]:
    """Starts a run and kills it; whether it did, and what happened.

    Args:
      trial: the run.
      in_a_write: whether to wait for one of the next checkpoints to be written or removed.
      latest_s: otherwise, seconds from the start until the kill, at most.
      rng: draws the moment.
    """
    left = trial.unfinished()
    process, begin = trial.start(), time.monotonic()
    wait_s, writes, seen = rng.uniform(0.0, latest_s), rng.randint(1, 4), set()
    while process.poll() is None:
        seen |= trial.unfinished() - left
        if in_a_write and len(seen) == writes:
            time.sleep(rng.uniform(0.0, 0.1))
            break
        if not in_a_write and time.monotonic() - begin > wait_s:
            break
        time.sleep(0.001)
    if process.poll() is not None:
        trial.code = process.returncode
        return False, f"ended by itself with code {process.returncode}"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    where = ", in a checkpoint's write or removal" if trial.unfinished() - left else ""
    return True, f"killed after {time.monotonic() - begin:.1f} s{where}"


def truncate_newest(trial: Trial) -> int:
    """Cuts the largest file of the newest checkpoint in half; returns its step."""
    step = trial.committed()[-1]
    files = [path for path in (trial.folder / f"step_{step:08d}").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return step


def check(trial: Trial, exact: dict[int, float], before: int, expected: int) -> list[str]:
    """What is wrong with the steps that a run has logged since there were `before`."""
    new = trial.losses()[before:]
    wrong = [
        f"step {step}: loss {loss!r}, and {exact[step]!r} without kills"
        for step, loss in new
        if loss != exact[step]
    ]
    if new and [step for step, _ in new] != list(range(expected + 1, expected + 1 + len(new))):
        wrong.append(f"went on with step {new[0][0]}, and checkpoint {expected} was whole")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        return run(options, Path(scratch), rng)


def run(options: argparse.Namespace, scratch: Path, rng: random.Random) -> int:
    """All kills; the exit code."""
    package = Path(meshslice_jax.__file__).parent
    shutil.copytree(package, scratch / "source" / package.name)
    alone, again = (trial_of(options, scratch, name) for name in ("alone", "again"))
    if alone.start().wait():
        print(alone.output)
        return 1
    begin = time.monotonic()
    again.start().wait()  # its programs compiled, as those of runs that are resumed
    latest_s = time.monotonic() - begin
    exact = dict(alone.losses())
    print(f"left alone: {len(exact)} steps in {latest_s:.1f} s, last loss {exact[max(exact)]!r}")
    if again.losses() != alone.losses():
        print("WRONG: two runs that are left alone differ")
        return 1
    failures, kills, writes, trials, cut = 0, 0, 0, [], None
    while kills < options.kills:
        if not trials or options.steps in trials[-1].committed():
            trials.append(trial_of(options, scratch, f"trial{len(trials)}"))
            cut = None
        trial = trials[-1]
        whole = trial.committed()
        expected, before = (whole[-1] if whole else 0), len(trial.losses())
        begin = time.monotonic()
        killed, how = kill(trial, kills % 2 == 1, latest_s, rng)
        kills, writes = kills + killed, writes + ("write" in how)
        wrong = check(trial, exact, before, expected)
        if not killed and trial.code != 0:
            print(f"WRONG: a run failed with exit code {trial.code}:\n{trial.output}")
            return 1  # the next would fail as this one did
        elif not killed:
            latest_s = min(latest_s, time.monotonic() - begin)
        spoke = re.search(r"is passed over: .*", trial.output)
        steps = [step for step, _ in trial.losses()[before:]]
        if cut is not None and steps and spoke is None:
            wrong.append(f"nothing was said of the truncated checkpoint {cut}")
        did = f"steps {steps[0]}..{steps[-1]}" if steps else "no step"
        note = f" ({spoke.group()})" if spoke else ""
        print(f"kill {kills}: {how}; began at {expected}, {did}{note}", flush=True)
        for line in wrong:
            print(f"  WRONG: {line}")
        failures, cut = failures + bool(wrong), None
        if killed and kills % 5 == 2 and len(trial.committed()) > 1:
            cut = truncate_newest(trial)
            print(f"  truncated checkpoint {cut}")
    where = f"{writes} in a checkpoint's write or removal"
    print(f"{kills} kills ({where}), {failures} wrong, {len(trials)} runs")
    return 1 if failures else 0


def trial_of(options: argparse.Namespace, scratch: Path, name: str) -> Trial:
    """A run in a folder of its own."""
    return Trial(scratch / name, options.steps, options.checkpoint_every)


if __name__ == "__main__":
    sys.exit(main())
