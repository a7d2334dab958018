"""A slow network within one machine: namespaces on a bridge, their links shaped.

Each process of a program runs in a network namespace of its own, with one interface, a
virtual pair whose other end is on a bridge. Nothing leads out of the bridge, so addresses
clash with nobody's. What a namespace sends goes through a token bucket (`tc tbf`): the rate
of a chip's link. Gloo binds to the address of the host's name, so a namespace has a hosts
file of its own (`ip netns exec` puts it in the place of /etc/hosts).

Needs root and the programs ip and tc. All that is made is kept by a `Guard`, which removes
it however the owner ends.
"""

import dataclasses
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from meshslice_jax.launch.guard import Guard

INTERFACE = "eth0"
_HOSTS = Path("/etc/netns")
#: A bucket of this size lets a rate be kept to within a few per cent.
_BURST, _LIMIT = "128kb", "8mb"


@dataclasses.dataclass(frozen=True)
class Namespace:
    """One network namespace: its name, and the address of its only interface."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What goes before a command that is to run in it."""
        return ("ip", "netns", "exec", self.name)


def lacking() -> str | None:
    """Why namespaces can't be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces and traffic shaping need root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"the programs {', '.join(missing)} are missing (iproute2)"
    return None


def set_up(count: int, guard: Guard) -> tuple[Namespace, ...]:
    """Makes namespaces that reach each other over a bridge.

    Args:
      count: how many, up to 200.
      guard: removes them.

    Raises:
      RuntimeError: not root, no ip or tc, or one of their commands fails.
    """
    if (reason := lacking()) is not None:
        raise RuntimeError(reason)
    mark = f"ms{os.getpid()}"
    guard.command("ip", "link", "del", mark)
    _call("ip", "link", "add", mark, "type", "bridge")
    _call("ip", "link", "set", mark, "up")
    made = tuple(Namespace(f"{mark}-{i}", f"10.77.0.{10 + i}") for i in range(count))
    for i, namespace in enumerate(made):
        _add(namespace, f"{mark}v{i}", mark, guard)
    return made


def _add(namespace: Namespace, pair: str, bridge: str, guard: Guard) -> None:
    name, hosts = namespace.name, _HOSTS / namespace.name
    guard.command("ip", "netns", "del", name)
    guard.command("ip", "link", "del", pair)
    guard.command("rm", "-rf", str(hosts))
    hosts.mkdir(parents=True)
    names = f"127.0.0.1 localhost\n{namespace.address} {socket.gethostname()}\n"
    (hosts / "hosts").write_text(names)
    _call("ip", "netns", "add", name)
    _call("ip", "link", "add", pair, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _call("ip", "link", "set", pair, "master", bridge, "up")
    _call("ip", "-n", name, "addr", "add", f"{namespace.address}/24", "dev", INTERFACE)
    _call("ip", "-n", name, "link", "set", INTERFACE, "up")
    _call("ip", "-n", name, "link", "set", "lo", "up")


def shape(bits_per_s: float | None) -> None:
    """Sets the rate at which this process's own namespace sends; None is no limit.

    Raises:
      RuntimeError: tc fails.
    """
    if bits_per_s is None:
        command = ("tc", "qdisc", "del", "dev", INTERFACE, "root")
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)  # there may be none
        return
    rate = f"{round(bits_per_s)}bit"
    bucket = ("rate", rate, "burst", _BURST, "limit", _LIMIT)
    _call("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *bucket)


def _call(*command: str) -> None:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise RuntimeError(f"{_shown(command)} fails: {found.stderr.strip()}")


def _shown(command: Sequence[str]) -> str:
    return " ".join(command)
