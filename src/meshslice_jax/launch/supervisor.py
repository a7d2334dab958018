"""Watches over the processes of a program until all have ended, or one must not go on.

What ends all of them, and within which time:

    one fails, or is killed                  at once
    one is done while others are not         `leave_s`
    one does not join while another does     `join_s` after the first began
    one is frozen (it tells nothing)         `heartbeat_s`
    none makes a step                        `step_s`; those furthest behind are named
    the whole takes too long                 `timeout_s`

The others first get SIGTERM and `grace_s`, then SIGKILL with everything that they started.
Before a program that hangs is ended each process prints where it is.
"""

import dataclasses
import selectors
import signal
import time
from collections.abc import Sequence

from meshslice_jax.launch.guard import Guard
from meshslice_jax.launch.rank import Rank, describe_end

#: The exit code of a program that took too long, as of the command `timeout`.
TIMED_OUT = 124
_POLL_S = 0.05
#: How long the cause of a failure is looked for.
_CAUSE_S = 1.0
#: What a process that hangs may take to print where it is.
_TELL_S = 0.5
#: How long the output of processes that have ended is waited for.
_DRAIN_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds after which a program is ended.

    Attributes:
      timeout_s: of the whole program; None is no limit.
      join_s: between the first process that joins and the last.
      heartbeat_s: without a sign of life of a process that has given one.
      step_s: without a step of any process, once there was one.
      leave_s: between the first process whose program is over and the last. (JAX makes it
        wait, so that its exit code is not known before.)
      grace_s: between SIGTERM and SIGKILL.
    """

    timeout_s: float | None = None
    join_s: float = 60.0
    heartbeat_s: float = 30.0
    step_s: float = 600.0
    leave_s: float = 120.0
    grace_s: float = 5.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"{field.name} must be more than 0 seconds, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended: its exit code, and why it was ended, or None."""

    exit_code: int
    reason: str | None = None


def watch(ranks: Sequence[Rank], limits: Limits, guard: Guard) -> Outcome:
    """Shows output until every process has ended.

    Returns:
      The first failure, or exit code 0.
    """
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            for fd in rank.pipes:
                selector.register(fd, selectors.EVENT_READ, rank)
        try:
            return _until_the_end(ranks, limits, guard, selector)
        finally:
            _end(ranks, limits, guard, selector)


def _until_the_end(ranks, limits, guard, selector) -> Outcome:
    begin = time.monotonic()
    steps, step_at, running = 0, None, list(ranks)
    while running:
        _show(selector, _POLL_S)
        ended = [rank for rank in running if rank.has_ended()]
        running = [rank for rank in running if rank not in ended]
        codes = {rank.number: rank.finish(guard) for rank in ended}
        failed = {number: code for number, code in codes.items() if code}
        told = [rank.number for rank in running if rank.failed]
        if failed or told:
            return _blame(failed, told, running, guard, selector)
        now, total = time.monotonic(), sum(rank.steps for rank in ranks)
        if total > steps:
            steps, step_at = total, now
        reason = _too_long(ranks, running, limits, now, begin, step_at)
        if reason is not None and running:
            for rank in running:
                if rank.heard_at is not None:  # others would be ended by the signal
                    rank.signal(signal.SIGUSR1)
            _drain(selector, _TELL_S)
            return Outcome(exit_code=TIMED_OUT, reason=reason)
    return Outcome(exit_code=0)


def _blame(failed: dict[int, int], told: list[int], running, guard, selector) -> Outcome:
    """The first failure, unless a process was killed: that is the cause of others' errors.

    A killed process is gone only when its memory is, and others see its connections close
    before, so it is waited for a little.
    """
    deadline = time.monotonic() + _CAUSE_S
    while time.monotonic() < deadline and not _killed(failed):
        _show(selector, _POLL_S)
        for rank in [rank for rank in running if rank.has_ended()]:
            running.remove(rank)
            if code := rank.finish(guard):
                failed[rank.number] = code
    killed = _killed(failed)
    if told and not killed:
        return Outcome(exit_code=1, reason=f"{_names(told[:1])} failed")
    number = (killed or list(failed))[0]
    reason = f"rank {number} {describe_end(failed[number])}"
    return Outcome(exit_code=failed[number], reason=reason)


def _killed(failed: dict[int, int]) -> list[int]:
    """Those that a signal ended. JAX aborts a process whose peers are gone: that is none."""
    return [n for n, code in failed.items() if code > 128 and code != 128 + signal.SIGABRT]


def _too_long(ranks, running, limits: Limits, now, begin, step_at) -> str | None:
    """Which limit is passed, and by whom."""
    for rank in running:
        if rank.heard_at is not None and now - rank.heard_at > limits.heartbeat_s:
            return f"rank {rank.number} gave no sign of life for {limits.heartbeat_s:g} s"
    joining = [rank.joining_at for rank in ranks if rank.joining_at and not rank.joined]
    if joining and now - min(joining) > limits.join_s:
        absent = [rank.number for rank in ranks if rank.joining_at is None]
        return (
            f"{_names(absent or [rank.number for rank in ranks if not rank.joined])} did not join "
            f"the others within {limits.join_s:g} s (meshslice_jax.distributed.initialize())"
        )
    leaving = [rank for rank in running if rank.leaving_at is not None]
    late = [rank.number for rank in running if rank.leaving_at is None]
    if leaving and late and now - min(rank.leaving_at for rank in leaving) > limits.leave_s:
        return (
            f"{_names([rank.number for rank in leaving])} reached the end of the program, and "
            f"{limits.leave_s:g} s later {_names(late)} had not"
        )
    if step_at is not None and now - step_at > limits.step_s:
        fewest = min(rank.steps for rank in running)
        behind = [rank.number for rank in running if rank.steps == fewest]
        return (
            f"no process made a step for {limits.step_s:g} s; furthest behind, with {fewest} "
            f"steps: {_names(behind)}"
        )
    if limits.timeout_s is not None and now - begin > limits.timeout_s:
        return (
            f"the program took longer than {limits.timeout_s:g} s; still running: "
            f"{_names([rank.number for rank in running])}"
        )
    return None


def _names(numbers: Sequence[int]) -> str:
    return ", ".join(f"rank {number}" for number in numbers)


def _show(selector, timeout_s: float) -> None:
    """Shows what the processes print within a time."""
    if not selector.get_map():
        time.sleep(timeout_s)
        return
    for key, _ in selector.select(timeout_s):
        if not key.data.read(key.fd):
            selector.unregister(key.fd)


def _drain(selector, timeout_s: float) -> None:
    """Shows what is printed until all pipes are closed, or a time is over."""
    deadline = time.monotonic() + timeout_s
    while selector.get_map() and time.monotonic() < deadline:
        _show(selector, _POLL_S)


def _end(ranks, limits: Limits, guard: Guard, selector) -> None:
    """Ends what still runs, and shows the last of its output."""
    deadline = time.monotonic() + limits.grace_s
    for rank in ranks:
        rank.signal(signal.SIGTERM)
        rank.signal(signal.SIGCONT)  # a stopped process takes the first one only now
    while time.monotonic() < deadline and not all(rank.has_ended() for rank in ranks):
        _show(selector, _POLL_S)
    for rank in ranks:
        rank.finish(guard)
    _drain(selector, _DRAIN_S)
    for rank in ranks:
        rank.close()
