"""Starts the measurement: a namespace and a process for each chip."""

import sys
from pathlib import Path

import msgspec

from meshslice_jax.bench.wire.namespaces import set_up
from meshslice_jax.bench.wire.options import WireOptions
from meshslice_jax.launch import Guard, Limits, Outcome, launch

#: Seconds without a step of any process: the largest compilation with its NumPy answer.
_STEP_S = 300.0


def run(options: WireOptions, results: Path) -> Outcome:
    """Measures in namespaces, which are removed however this ends.

    Args:
      options: what to measure.
      results: the file of records.

    Raises:
      RuntimeError: not root, or the network can't be made.
    """
    with Guard() as guard:
        network = set_up(options.shape.num_chips, guard)
        arguments = (msgspec.json.encode(options).decode(), str(results.absolute()))
        return launch(
            (sys.executable, "-m", "meshslice_jax.bench.wire.program", *arguments),
            num_processes=options.shape.num_chips,
            host=network[0].address,
            limits=Limits(step_s=_STEP_S),
            prefixes=[namespace.prefix for namespace in network],
            guard=guard,
        )
