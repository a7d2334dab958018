"""What must not outlive this process: process groups, and whatever a command undoes.

A `Guard` holds a watchdog process by a pipe. The normal way out does everything itself and
takes the orders back; if this process is killed instead, the watchdog does what is left.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class Guard:
    """A context in which process groups and clean-up commands are kept.

    Leaving it kills every group that is left and runs every command, the last one first.
    """

    def __init__(self):
        self._orders = []
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("watchdog.py"))],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, *_) -> None:
        for order in self._orders[::-1]:
            self._do(order)
        self._watchdog.stdin.close()
        self._watchdog.wait()

    def group(self, pgid: int) -> None:
        """Keeps a process group, to be killed at the end."""
        self._add(["kill", pgid])

    def command(self, *words: str) -> None:
        """Keeps a command, to be run at the end; that it fails is no error."""
        self._add(["run", *words])

    def release(self, pgid: int) -> None:
        """Forgets a process group whose last process has been waited for."""
        self._drop(["kill", pgid])

    def _add(self, order: list) -> None:
        self._orders.append(order)
        self._say(order)

    def _drop(self, order: list) -> None:
        self._orders.remove(order)
        self._say(["drop", order])

    def _say(self, order: list) -> None:
        self._watchdog.stdin.write(json.dumps(order) + "\n")
        self._watchdog.stdin.flush()

    def _do(self, order: list) -> None:
        kind, *arguments = order
        if kind == "kill":
            kill_group(arguments[0])
        else:
            subprocess.run(arguments, stderr=subprocess.DEVNULL, check=False)
        self._drop(order)


def kill_group(pgid: int) -> None:
    """Kills a process group, of which nothing may be left."""
    # PermissionError: macOS, where only zombies are left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)
