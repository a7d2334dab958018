"""Starts a program as several processes on this machine, and sees that none is left.

    launch(("python", "train.py"), num_processes=4, devices_per_process=2)

Each process gets its place by environment variables, which `distributed.initialize` reads;
devices are emulated on the CPU and their collectives go through gloo over TCP, which is what
JAX itself uses between CPU hosts. On a cluster the cluster's launcher does this part and the
program stays as it is.

    rank        one process: its pipes, its group, its end
    supervisor  what ends a program, and when
    guard       what must not outlive this process
    watchdog    does what is left when this process is killed
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator, Sequence

from meshslice_jax import distributed
from meshslice_jax.launch.guard import Guard as Guard
from meshslice_jax.launch.rank import start
from meshslice_jax.launch.supervisor import TIMED_OUT as TIMED_OUT
from meshslice_jax.launch.supervisor import Limits as Limits
from meshslice_jax.launch.supervisor import Outcome as Outcome
from meshslice_jax.launch.supervisor import watch


def launch(
    command: Sequence[str],
    *,
    num_processes: int,
    devices_per_process: int = 1,
    host: str = "127.0.0.1",
    port: int | None = None,
    limits: Limits | None = None,
    prefixes: Sequence[Sequence[str]] | None = None,
    guard: Guard | None = None,
) -> Outcome:
    """Runs a command as several processes of one program, and shows their output.

    Args:
      command: the program and its arguments, the same in every process.
      num_processes: how many.
      devices_per_process: CPU devices that each of them emulates.
      host: where process 0 is found by the others.
      port: of process 0; None takes one that is free.
      limits: when to end it; None takes the defaults.
      prefixes: words before the command, for each process (to enter a namespace).
      guard: keeps the processes; None makes one.

    Returns:
      Exit code 0, or that of the first process that failed and why all were ended.

    Raises:
      ValueError: numbers that make no sense, or a command that can't be started.
      RuntimeError: the port is in use.
    """
    if not command:
        raise ValueError("there is no command to launch; write it after --")
    for name, value in (
        ("num_processes", num_processes),
        ("devices_per_process", devices_per_process),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    limits = limits or Limits()
    port = free_port() if port is None else checked_port(port)
    shared = {
        distributed.COORDINATOR: f"{host}:{port}",
        distributed.NUM_PROCESSES: str(num_processes),
        distributed.DEVICES_PER_PROCESS: str(devices_per_process),
        # The supervisor's own limit comes first, and its message names who is missing.
        distributed.JOIN_TIMEOUT_S: str(round(2 * limits.join_s + 1)),
    }
    prefixes = prefixes or ((),) * num_processes
    with _signals_as_exceptions(), contextlib.ExitStack() as stack:
        guard = guard or stack.enter_context(Guard())
        ranks = []
        try:
            for number in range(num_processes):
                own = shared | {distributed.PROCESS_ID: str(number)}
                ranks.append(start(number, [*prefixes[number], *command], own, guard))
        except ValueError:
            for rank in ranks:
                rank.finish(guard)
                rank.close()
            raise
        return watch(ranks, limits, guard)


def free_port() -> int:
    """A TCP port that nothing listens on at the moment."""
    with socket.socket() as trial:
        trial.bind(("", 0))
        return trial.getsockname()[1]


def checked_port(port: int) -> int:
    """The port, if a process can listen on it.

    Raises:
      RuntimeError: it can't.
    """
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except (OSError, OverflowError) as error:
            raise RuntimeError(
                f"port {port} can't be listened on ({error}); choose another, or leave it out for "
                "one that is free"
            ) from error
    return port


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as Ctrl-C does: by the way of `finally`."""
    if threading.current_thread() is not threading.main_thread():  # signals are not ours
        yield
        return

    def stop(number, _):
        raise SystemExit(128 + number)

    ours = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
