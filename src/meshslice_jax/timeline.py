"""What a simulation found, and its trace.

A `Timeline` has the times of every chip. A trace is a JSON file in Chrome's format, as
Perfetto (ui.perfetto.dev) and chrome://tracing open it: one process per chip, one track
for the MXU and one for each link direction along each axis.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

#: What a chip has: its MXU and its links to both neighbours along each axis.
RESOURCES = ("mxu", "row+", "row-", "col+", "col-")
#: Chips that a trace shows unless it is told which.
TRACED_CHIPS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """One task on all chips.

    Attributes:
      name: layer and pass.
      what: "product", or the kind and role of a transfer ("all_gather rhs").
      step: which local product of its pass it is, feeds or follows.
      resources: the MXU or the links that it occupies.
      start_s: when each chip starts it, shape (rows, cols).
      end_s: when it is over on each chip.
    """

    name: str
    what: str
    step: int
    resources: tuple[str, ...]
    start_s: np.ndarray
    end_s: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """The times of one simulation; per-chip arrays have shape (rows, cols).

    Attributes:
      hardware: name of the profile.
      mesh_shape: (rows, cols) of the simulated mesh; P x 1 for a 1D algorithm.
      total_s: when the last chip is done.
      math_s: all products of one chip, undisturbed and without faults.
      exposed_s: total_s - math_s: communication, stalls and waiting not hidden.
      finish_s: when each chip is done.
      busy_s: resource -> seconds that each chip's resource is in use. For a link that
        includes waiting for neighbours inside a collective.
      part_s: (name, seconds) of each product: from the end of the one before it to its
        own end, both on the last chip.
      peak_temporary_bytes: gathered slices, partial results and accumulators of chip
        (0, 0) that are alive at once, at most. Shards are not in it.
      spans: every task on every chip, if they were recorded.
    """

    hardware: str
    mesh_shape: tuple[int, int]
    total_s: float
    math_s: float
    exposed_s: float
    finish_s: np.ndarray
    busy_s: dict[str, np.ndarray]
    part_s: tuple[tuple[str, float], ...]
    peak_temporary_bytes: int
    spans: tuple[Span, ...] = ()

    def utilisation(self, flops: float, peak_flops_per_s: float) -> float:
        """Fraction of the mesh's peak that `flops` (of all chips) reach in total_s."""
        rows, cols = self.mesh_shape
        return flops / (rows * cols * peak_flops_per_s * self.total_s)


def trace_events(
    timeline: Timeline, chips: Sequence[tuple[int, int]] | None = None
) -> Iterable[dict]:
    """The events of a trace in Chrome's format, times in microseconds.

    Args:
      timeline: of a simulation that recorded its spans.
      chips: (row, col) of the chips to show; None is the first TRACED_CHIPS.

    Raises:
      ValueError: spans were not recorded, or a chip outside the mesh.
    """
    if not timeline.spans:
        raise ValueError("this timeline has no spans to trace; simulate with record=True")
    rows, cols = timeline.mesh_shape
    if chips is None:
        chips = [(i // cols, i % cols) for i in range(min(rows * cols, TRACED_CHIPS))]
    for row, col in chips:
        if not (0 <= row < rows and 0 <= col < cols):
            raise ValueError(f"chip ({row}, {col}) to trace is outside the {rows}x{cols} mesh")
        process = row * cols + col
        yield _name("process", process, 0, f"chip ({row}, {col})")
        for thread, resource in enumerate(RESOURCES):
            yield _name("thread", process, thread, resource)
    for span in timeline.spans:
        for row, col in chips:
            start, end = span.start_s[row, col], span.end_s[row, col]
            for resource in span.resources:
                yield {
                    "name": f"{span.name} {span.what} {span.step}",
                    "cat": span.what,
                    "ph": "X",
                    "pid": row * cols + col,
                    "tid": RESOURCES.index(resource),
                    "ts": float(start * 1e6),
                    "dur": float((end - start) * 1e6),
                }


def _name(what: str, process: int, thread: int, name: str) -> dict:
    return {
        "name": f"{what}_name",
        "ph": "M",
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }


def write_trace(
    timeline: Timeline,
    path: str | pathlib.Path,
    chips: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Writes a trace that Perfetto and chrome://tracing open.

    Args and Raises: as for `trace_events`; `path` is the JSON file.
    """
    rows, cols = timeline.mesh_shape
    document = {
        "traceEvents": list(trace_events(timeline, chips)),
        "displayTimeUnit": "ms",
        "otherData": {
            "hardware": timeline.hardware,
            "mesh": f"{rows}x{cols}",
            "kind": "simulated, not measured",
            "chips left out": rows * cols
            - (min(rows * cols, TRACED_CHIPS) if chips is None else len(chips)),
        },
    }
    pathlib.Path(path).write_text(json.dumps(document))
