"""One process of a launched program: how it starts, what it says, how it ends.

It leads a process group of its own, so that whatever it starts ends with it. Its output
comes through pipes and is shown line by line under its number. On a third pipe it tells
that it is alive and that it makes steps; see `distributed`.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

from meshslice_jax import distributed
from meshslice_jax.launch.guard import Guard, kill_group

#: Lines for every group of devices that gloo connects are left out; its threads write them
#: in pieces, so that one may begin within another.
CHATTER = (b"[Gloo] Rank ", b"connected peer ranks")


@dataclasses.dataclass
class Rank:
    """A process that was started, and what is known of it.

    Attributes:
      number: its process id in the program.
      process: the operating system's process.
      pipes: read ends of its pipes, and where what they carry goes.
      rest: output without a line's end yet, by pipe.
      joining_at: when it began to join the others, on the monotonic clock.
      joined: whether it is done with that.
      heard_at: when it last told that it is alive; None before it ever did.
      steps: how many steps it has made.
      failed: whether it has told that it fails.
      leaving_at: when it told that its program is over.
    """

    number: int
    process: subprocess.Popen
    pipes: dict[int, BinaryIO | None]
    rest: dict[int, bytes] = dataclasses.field(default_factory=dict)
    joining_at: float | None = None
    joined: bool = False
    heard_at: float | None = None
    steps: int = 0
    failed: bool = False
    leaving_at: float | None = None

    def read(self, fd: int) -> bool:
        """Takes what a pipe has; False at its end."""
        data = os.read(fd, 1 << 16)
        target = self.pipes[fd]
        if target is None:
            self._hear(data)
        else:
            self._show(fd, data, target)
        return bool(data)

    def _hear(self, data: bytes) -> None:
        now = time.monotonic()
        if data:
            self.heard_at = now
        if distributed.JOINING in data:
            self.joining_at = now
        if distributed.JOINED in data:
            self.joined = True
        if distributed.FAILED in data:
            self.failed = True
        if distributed.LEAVING in data:
            self.leaving_at = now
        self.steps += data.count(distributed.STEP)

    def _show(self, fd: int, data: bytes, target: BinaryIO) -> None:
        lines = (self.rest.get(fd, b"") + data).split(b"\n")
        self.rest[fd] = lines.pop()
        if not data and self.rest[fd]:  # the last line had no end
            lines.append(self.rest.pop(fd))
        for line in lines:
            if not any(words in line for words in CHATTER):
                target.write(b"[%d] %s\n" % (self.number, line))
        target.flush()

    def has_ended(self) -> bool:
        """Whether it has ended; it is not waited for, so that its group stays its own."""
        if self.process.returncode is not None:
            return True
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, ended) is not None

    def finish(self, guard: Guard) -> int:
        """Ends its group and waits for it.

        Returns:
          Its exit code; 128 and the signal's number if a signal ended it.
        """
        if self.process.returncode is None:
            kill_group(self.process.pid)
            self.process.wait()
            guard.release(self.process.pid)
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def signal(self, number: int) -> None:
        """Sends a signal to its group."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Closes its pipes."""
        for fd in self.pipes:
            os.close(fd)


def start(number: int, command: Sequence[str], environment: dict[str, str], guard: Guard) -> Rank:
    """Starts one process.

    Args:
      number: its process id in the program.
      command: the program and its arguments.
      environment: added to this process's own.
      guard: keeps its group.

    Raises:
      ValueError: the command can't be started.
    """
    pipes = [os.pipe() for _ in range(3)]
    (out, out_fd), (err, err_fd), (beats, beat_fd) = pipes
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out_fd,
            stderr=err_fd,
            env=os.environ
            | {"PYTHONUNBUFFERED": "1"}
            | environment
            | {distributed.BEAT_FD: str(beat_fd)},
            pass_fds=(beat_fd,),
            start_new_session=True,
        )
    except OSError as error:
        for read_end, _ in pipes:
            os.close(read_end)
        raise ValueError(f"{command[0]!r} can't be started: {error.strerror}") from error
    finally:
        for _, write_end in pipes:
            os.close(write_end)
    guard.group(process.pid)
    targets = {out: sys.stdout.buffer, err: sys.stderr.buffer, beats: None}
    return Rank(number=number, process=process, pipes=targets)


def describe_end(code: int) -> str:
    """An exit code in words."""
    if code <= 128:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with exit code {code}"
