"""Replaying a compiled schedule on a HardwareSpec: how long it would take, and why.

Every time from here is a PROJECTION. The order of things and the cycles of most of them
are the compiler's; the links are a model of ours, with these assumptions:

- The core runs its work in the compiler's order, one at a time. Work with an estimate
  takes its cycles at the chip's clock, other work moves its operands and result through
  HBM. Copies that the compiler schedules as prefetches are free.
- Each dimension of the torus is a ring of links (a line where the profile says so); a mesh
  axis is one or several of them (`layout`). A collective over P chips is a ring algorithm
  on both directions: what one chip sends at the rate of two links, a latency for every hop
  to the farthest chip (P/2 on a ring, P - 1 on a line), and a launch; over several
  dimensions it is one ring through all of its chips, which holds the links of all of them.
  An all-to-all loads each link with n^2/8 shards on a ring, n^2/4 on a line.
- A permute is routed dimension by dimension, the short way, hop by hop; each link is held
  for what crosses it.
- A transfer waits until every link direction that it needs is free, first come first
  served. Both directions of all dimensions are separate: row and column traffic overlap.
- The links take nothing from HBM or the core, and starting an asynchronous transfer costs
  the core nothing.

"Hidden" is 1 - exposed / communication: the share of the transfers' time in which the
core had work. `sensitivity` has the variants under which a ranking should stand.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable

from meshslice_jax.compiled.layout import Layout, flat
from meshslice_jax.compiled.program import Move, Wait, Work
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape

_FIELDS = {
    "all-gather": "gather",
    "reduce-scatter": "scatter",
    "all-reduce": "scatter",
    "all-to-all": "permute",
    "collective-permute": "permute",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Something that took time: on "core", on "wait" (the core idle) or on a link direction."""

    name: str
    what: str  # "product", "copy", "wait", or the kind of a transfer
    resource: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay found; all times of one chip.

    Attributes:
      projected_s: from the first instruction to the last.
      product_s: local products.
      copies_s: all other work of the core.
      exposed_s: the core waiting for transfers.
      communication_s: durations of all transfers, waiting for links not counted.
      async_collectives: transfers that the core does not wait for at once.
      sync_collectives: the others.
      spans: everything, for traces and pictures.
    """

    projected_s: float
    product_s: float
    copies_s: float
    exposed_s: float
    communication_s: float
    async_collectives: int
    sync_collectives: int
    spans: tuple[Span, ...] = dataclasses.field(repr=False)

    @property
    def hidden(self) -> float:
        """1 - exposed / communication; 1 where nothing is sent."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The mesh and the rates of its links.

    Attributes:
      hardware: rates, latencies and which axes are rings.
      mesh_shape: (rows, cols).
      layout: where the chips stand; by default each mesh axis is a dimension of its own.
      collective_rate: fraction of the ring model's rate that gathers and reduce-scatters
        reach; permutes are not touched by it.
    """

    hardware: HardwareSpec
    mesh_shape: MeshShape
    layout: Layout | None = None
    collective_rate: float = 1.0

    @functools.cached_property
    def grid(self) -> Layout:
        """The layout, given or by default."""
        return self.layout or flat(self.mesh_shape)


def sensitivity(links: Links) -> dict[str, Links]:
    """Variants of the assumptions, by name."""
    hardware = links.hardware
    launches = {f"{kind}_launch_s": 10e-6 for kind in ("gather", "scatter", "permute")}
    hops = {f"{kind}_hop_s": 2e-6 for kind in ("gather", "scatter", "permute")}
    changes = {
        "half-rate links": {"link_bytes_per_s": hardware.link_bytes_per_s / 2},
        "35 GB/s links": {"link_bytes_per_s": 35e9},
        "10 us launch": launches,
        "2 us hop": hops,
    }
    found = {
        name: dataclasses.replace(links, hardware=dataclasses.replace(hardware, **change))
        for name, change in changes.items()
    }
    return found | {"half-rate collectives": dataclasses.replace(links, collective_rate=0.5)}


def replay(events: Iterable[Work | Move | Wait], links: Links, clock_hz: float) -> Replay:
    """Runs a schedule.

    Args:
      events: of `program.events`.
      links: mesh and rates.
      clock_hz: cycles per second.
    """
    now, free, ends, spans = 0.0, Counter(), {}, []
    totals, counts = Counter(), Counter()

    def wait_until(end_s: float, name: str):
        nonlocal now
        if end_s > now:
            spans.append(Span(name=name, what="wait", resource="wait", start_s=now, end_s=end_s))
            totals["exposed"] += end_s - now
            now = end_s

    for event in events:
        if isinstance(event, Work):
            took = work_s(event, links.hardware, clock_hz)
            what = "product" if event.is_product else "copy"
            spans.append(
                Span(name=event.name, what=what, resource="core", start_s=now, end_s=now + took)
            )
            totals[what] += took
            now += took
        elif isinstance(event, Wait):
            wait_until(ends.pop(event.key), event.key)
        else:
            holds, latency_s = transfer_s(event, links)
            if not holds:
                continue
            begin = max(now, *(free[resource] for resource in holds))
            end = begin + max(holds.values()) + latency_s
            for resource, hold_s in holds.items():
                free[resource] = begin + hold_s + latency_s
                spans.append(
                    Span(
                        name=event.label or event.kind,
                        what=event.kind,
                        resource=resource,
                        start_s=begin,
                        end_s=free[resource],
                    )
                )
            totals["communication"] += end - begin
            counts["sync" if event.key is None else "async"] += 1
            if event.key is None:
                wait_until(end, event.label or event.kind)
            else:
                ends[event.key] = end
    return Replay(
        projected_s=now,
        product_s=totals["product"],
        copies_s=totals["copy"],
        exposed_s=totals["exposed"],
        communication_s=totals["communication"],
        async_collectives=counts["async"],
        sync_collectives=counts["sync"],
        spans=tuple(spans),
    )


def work_s(work: Work, hardware: HardwareSpec, clock_hz: float) -> float:
    """Seconds of a piece of work: its cycles, or its bytes through HBM."""
    if work.cycles is not None:
        return work.cycles / clock_hz
    return work.bytes / hardware.hbm_bytes_per_s


def transfer_s(move: Move, links: Links) -> tuple[dict[str, float], float]:
    """How long a transfer holds each link direction ("row+", "col-", ...), and its latency.

    An empty dict means that nothing is sent. The transfer is over when the last link is
    free and the latency has passed.
    """
    hardware, prefix = links.hardware, _FIELDS[move.kind]
    launch_s = getattr(hardware, f"{prefix}_launch_s")
    hop_s = getattr(hardware, f"{prefix}_hop_s")
    overlapped = move.key is not None
    if move.kind == "collective-permute":
        loads, hops = _route(move.pairs, links)
        one_link = hardware.axis_bytes_per_s(2, overlapped=overlapped, directions=1)
        holds = {resource: load * move.bytes / one_link for resource, load in loads.items()}
        return holds, launch_s + hops * hop_s
    grid, ring = links.grid, len(move.groups[0])
    axes = [grid.names[d] for d in grid.spanned(move.groups[0])]
    closed = hardware.is_ring(ring)
    hops = ring // 2 if closed else ring - 1
    if move.kind == "all-to-all":
        shards = ring**2 / (8 if closed else 4)
        one_link = hardware.axis_bytes_per_s(ring, overlapped=overlapped, directions=1)
        hold_s = shards * move.bytes / (ring - 1) / one_link
    else:
        rate = hardware.axis_bytes_per_s(ring, overlapped=overlapped) * links.collective_rate
        hold_s = move.bytes / rate
        hops *= 2 if move.kind == "all-reduce" else 1
    holds = {f"{axis}{direction}": hold_s for axis in axes for direction in "+-"}
    return holds, launch_s + hops * hop_s


def _route(pairs: tuple[tuple[int, int], ...], links: Links) -> tuple[dict[str, int], int]:
    """The load of the busiest link of each direction, in messages, and the longest way."""
    grid, loads, longest = links.grid, Counter(), 0
    for source, target in pairs:
        here, there, hops = list(grid.places[source]), grid.places[target], 0
        for i, (name, size) in enumerate(zip(grid.names, grid.sizes, strict=True)):
            by, steps = _way(here[i], there[i], size, links.hardware.is_ring(size))
            for _ in range(steps):
                loads[f"{name}{'+' if by > 0 else '-'}", tuple(here)] += 1
                here[i] = (here[i] + by) % size
            hops += steps
        longest = max(longest, hops)
    busiest = {}
    for (resource, _), load in loads.items():
        busiest[resource] = max(busiest.get(resource, 0), load)
    return busiest, longest


def _way(start: int, end: int, length: int, closed: bool) -> tuple[int, int]:
    """Direction and number of hops from one place of an axis to another."""
    forward = (end - start) % length
    if not closed:
        return (1, end - start) if end >= start else (-1, start - end)
    return (1, forward) if forward <= length - forward else (-1, length - forward)
