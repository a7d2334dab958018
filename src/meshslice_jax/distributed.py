"""Several processes as one program: how a process joins, and what all of them agree on.

On more than one host every process runs the same program and holds some of the devices;
`jax.distributed` makes them one. A program that calls `initialize()` before it touches a
device runs unchanged

    under `meshslice launch`        which tells each process its place by environment variables
    under Slurm, Open MPI, GKE      which JAX recognises by itself, as it does the hosts of a
    or on the hosts of a TPU pod    TPU pod
    by hand                         with the same variables set as `meshslice launch` sets them
    alone                           as one process, with nothing to join

Processes that decide something each for itself, and differently, wait for each other for
ever. So text that decides (a plan, an error, a measured time) goes through `gather_text`
and `first_text`: over the coordinator's key-value store rather than through the devices, so
that it can't get between two products, and with an error after a time.
"""

import atexit
import dataclasses
import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import time

import jax

from meshslice_jax import compat

#: What `meshslice launch` sets, and what is to be set to start processes by hand.
COORDINATOR = "MESHSLICE_COORDINATOR"
NUM_PROCESSES = "MESHSLICE_NUM_PROCESSES"
PROCESS_ID = "MESHSLICE_PROCESS_ID"
DEVICES_PER_PROCESS = "MESHSLICE_DEVICES_PER_PROCESS"
JOIN_TIMEOUT_S = "MESHSLICE_JOIN_TIMEOUT_S"
#: An inherited file descriptor on which a process tells its launcher that it is well.
BEAT_FD = "MESHSLICE_BEAT_FD"

#: One-byte messages on it.
JOINING, JOINED, ALIVE, STEP, FAILED, LEAVING = b"j", b"J", b".", b"s", b"f", b"l"
BEAT_EVERY_S = 1.0
#: How long processes wait for text of each other: the longest compilation, and some.
AGREE_TIMEOUT_S = 600.0

# Keys must be new each time. All processes ask in the same order, so they count alike.
_turns = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a program, and this one's place among them.

    Attributes:
      process_id: 0 .. num_processes - 1; process 0 prints and writes.
      num_processes: how many there are.
      joined_by: "meshslice launch", the cluster that JAX found, or None for a single process.
    """

    process_id: int = 0
    num_processes: int = 1
    joined_by: str | None = None


def initialize() -> World:
    """Joins the other processes of this program, if there are any.

    Call it before anything touches a device. A second call changes nothing.

    Returns:
      This process's place.

    Raises:
      ValueError: variables of the launcher that are missing or make no sense.
      RuntimeError: JAX already runs, the coordinator's port is in use, or the coordinator
        can't be reached within MESHSLICE_JOIN_TIMEOUT_S (60) seconds.
    """
    if compat.has_joined():
        return World(
            process_id=compat.process_id(),
            num_processes=compat.num_processes(),
            joined_by=_launcher(),
        )
    launcher = _launcher()
    if launcher is None:
        return World()
    place = _place() if COORDINATOR in os.environ else None
    if compat.jax_has_started():
        raise RuntimeError(
            "JAX already holds its devices, so this process can't join the others; call "
            "meshslice_jax.distributed.initialize() before anything touches a device"
        )
    if place is None:
        jax.distributed.initialize()
    else:
        _join(place)
    return World(
        process_id=compat.process_id(), num_processes=compat.num_processes(), joined_by=launcher
    )


def _launcher() -> str | None:
    return "meshslice launch" if COORDINATOR in os.environ else compat.cluster_name()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """What the launcher's variables say."""

    coordinator: str
    num_processes: int
    process_id: int
    devices: int | None
    timeout_s: int
    beat_fd: int | None

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.coordinator.rsplit(":", 1)
        return host, int(port)


def _place() -> _Place:
    place = _Place(
        coordinator=os.environ[COORDINATOR],
        num_processes=_number(NUM_PROCESSES),
        process_id=_number(PROCESS_ID),
        devices=_number(DEVICES_PER_PROCESS, None),
        timeout_s=_number(JOIN_TIMEOUT_S, 60),
        beat_fd=_number(BEAT_FD, None),
    )
    host, _, port = place.coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{COORDINATOR}={place.coordinator!r} is not HOST:PORT")
    if not 0 <= place.process_id < place.num_processes:
        raise ValueError(
            f"{PROCESS_ID}={place.process_id} is not in 0 .. {NUM_PROCESSES} - 1 = "
            f"{place.num_processes - 1}"
        )
    return place


_MISSING = object()


def _number(name: str, default=_MISSING):
    text = os.environ.get(name)
    if text is None:
        if default is _MISSING:
            raise ValueError(f"{COORDINATOR} is set, but {name} is not")
        return default
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} is not a number")
    return int(text)


def _join(place: _Place) -> None:
    if place.beat_fd is not None:
        # A launcher that gives up first asks every process where it is.
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        threading.Thread(target=_beat, args=(place.beat_fd,), daemon=True).start()
        _tell(JOINING)
        # The launcher ends processes; a notifier that survives SIGTERM would be in its way.
        jax.config.update("jax_enable_preemption_service", False)
    if place.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", place.devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _check_coordinator(place)
    jax.distributed.initialize(
        coordinator_address=place.coordinator,
        num_processes=place.num_processes,
        process_id=place.process_id,
        cluster_detection_method="deactivate",
        initialization_timeout=place.timeout_s,
    )
    _tell(JOINED)
    if place.beat_fd is not None:
        _tell_the_end()


def _tell_the_end() -> None:
    """JAX makes a process that ends wait for the others, so the launcher must be told."""
    print_error = sys.excepthook

    def hook(*error):
        print_error(*error)
        fail()

    sys.excepthook = hook
    atexit.register(_tell, LEAVING)  # before JAX's own handler, which was registered earlier


def _check_coordinator(place: _Place) -> None:
    """Finds out here what JAX would answer with an abort of the process."""
    host, port = place.address
    if place.process_id == 0:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", port))
            except OSError as error:
                raise RuntimeError(
                    f"process 0 can't listen on port {port}: {error.strerror}; choose another "
                    "port, or end what uses it"
                ) from error
        return
    deadline = time.monotonic() + place.timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"process {place.process_id} can't reach the coordinator (process 0) at "
                    f"{place.coordinator} within {place.timeout_s} s: {error}"
                ) from error
            time.sleep(0.05)


def _beat(fd: int) -> None:
    """Tells the launcher once a second that this process is not frozen."""
    while True:
        try:
            os.write(fd, ALIVE)
        except OSError:  # nobody listens any more
            return
        time.sleep(BEAT_EVERY_S)


def _tell(message: bytes) -> None:
    fd = os.environ.get(BEAT_FD)
    if fd is not None:
        os.write(int(fd), message)


def step() -> None:
    """Tells `meshslice launch` that this process goes on; call it once a step of a loop.

    When no process makes a step for the launcher's `--step-timeout`, the launcher names
    those that are furthest behind and ends the program. Without a launcher it does nothing.
    """
    if compat.has_joined():  # a child of such a process has its variables, but not its pipe
        _tell(STEP)


def fail() -> None:
    """Tells `meshslice launch` that this process fails, before it ends.

    An exception that nobody catches does so by itself. A program that ends with an exit code
    by `sys.exit` calls it before: at its end JAX waits for the other processes, and those
    may never come. Without a launcher it does nothing.
    """
    if compat.has_joined():
        _tell(FAILED)


def is_first() -> bool:
    """Whether this is process 0, the one that prints and writes. Starts no device."""
    return compat.process_id() == 0


def barrier(*, timeout_s: float = AGREE_TIMEOUT_S) -> None:
    """Waits until every process is here.

    Raises:
      RuntimeError: some process does not come in time; the message names it.
    """
    if compat.num_processes() > 1:
        compat.wait_at_barrier(f"meshslice/barrier/{next(_turns)}", timeout_s)


def gather_text(text: str, *, timeout_s: float = AGREE_TIMEOUT_S) -> tuple[str, ...]:
    """What every process says, by process; all of them must ask in the same order.

    Raises:
      RuntimeError: some process does not answer in time; the message names it.
    """
    if compat.num_processes() == 1:
        return (text,)
    key = f"meshslice/text/{next(_turns)}"
    compat.put_text(f"{key}/{compat.process_id()}", text)
    ids = range(compat.num_processes())
    return tuple(_said(f"{key}/{other}", other, timeout_s) for other in ids)


def first_text(text: str, *, timeout_s: float = AGREE_TIMEOUT_S) -> str:
    """What process 0 says, on every process: for decisions that all must share.

    Raises:
      RuntimeError: process 0 does not answer in time.
    """
    if compat.num_processes() == 1:
        return text
    key = f"meshslice/first/{next(_turns)}"
    if is_first():
        compat.put_text(key, text)
        return text
    return _said(key, 0, timeout_s)


def _said(key: str, process: int, timeout_s: float) -> str:
    try:
        return compat.get_text(key, timeout_s)
    except RuntimeError as error:
        raise RuntimeError(
            f"process {process} did not answer process {compat.process_id()} within "
            f"{timeout_s:.0f} s: {error}"
        ) from error
