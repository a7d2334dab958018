"""A TPU compiler to ask: a child process that is started, limited in time, and replaced.

One child compiles one job after the other, so that libtpu loads once. Where it exceeds
the time limit or dies, the job has failed with that reason and the next one gets a new
child.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from meshslice_jax.compiled.jobs import Answer, Job
from meshslice_jax.compiled.topology import Topology, environment, require_libtpu


def default_cache() -> Path:
    """The user's folder for compiled schedules: $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "meshslice_jax" / "compiled"


class Compiler:
    """Compiles jobs for one topology; use it in a `with`.

    Args:
      topology: what to compile for.
      limit_s: seconds that one job may take.
      cache: a folder in which answers are kept from run to run, or None.

    Raises:
      RuntimeError: libtpu is not installed.
      ValueError: a limit that is not above 0.
    """

    def __init__(self, topology: Topology, limit_s: float = 300.0, cache: Path | None = None):
        require_libtpu()
        if not limit_s > 0:
            raise ValueError(f"the time limit of a compilation must be above 0 s, got {limit_s}")
        self.topology, self.limit_s, self.cache = topology, limit_s, cache
        self._child, self._log = None, None
        self._known: dict[bytes, Answer] = {}

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_) -> None:
        self._stop()

    def compile(self, job: Job) -> Answer:
        """What came of a job; equal jobs are compiled once.

        Raises:
          ValueError: the job is for another topology.
        """
        if job.topology != str(self.topology):
            raise ValueError(f"this compiler is for {self.topology}, the job for {job.topology}")
        key = msgspec.json.encode(job)
        if key not in self._known:
            self._known[key] = self._ask(key)
        return self._known[key]

    def _ask(self, line: bytes) -> Answer:
        if self._child is None:
            self._start()
        child, late = self._child, threading.Event()

        def give_up():
            late.set()
            child.kill()

        timer = threading.Timer(self.limit_s, give_up)
        timer.start()
        try:
            child.stdin.write(line + b"\n")
            child.stdin.flush()
            reply = child.stdout.readline()
        except BrokenPipeError:
            reply = b""
        finally:
            timer.cancel()
        if reply.endswith(b"\n"):
            return msgspec.json.decode(reply, type=Answer)
        code = child.wait()
        said = self._last_words()
        self._stop()
        if late.is_set():
            return Answer(error=f"compilation took longer than {self.limit_s:g} s")
        return Answer(error=f"the compiler ended with exit code {code}: {said}")

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as the child
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "meshslice_jax.compiled.child"),
                *([] if self.cache is None else [str(self.cache)]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | environment(self.topology),
        )

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        telling = [line.strip() for line in lines if line.strip().startswith(("F0", "F1", "E0"))]
        return (telling or [line.strip() for line in lines if line.strip()] or ["no word"])[0][:300]

    def _stop(self) -> None:
        if self._child is None:
            return
        with contextlib.suppress(BrokenPipeError):  # a job that a dead child never read
            self._child.stdin.close()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()
        self._log.close()
        self._child = self._log = None
