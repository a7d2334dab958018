"""Slices whose collectives are in one line, each tied to the one before it.

XLA:CPU runs collectives one after the other, in the order of its own schedule, whatever
they depend on: in a free order all gathers of one operand may come first, or a scatter may
stand before the next gather, and the product of that gather waits for both. Here the order
is a chain of data dependences, which no compiler drops:

    "tied"      G0 G1 S0 G2 S1 G3 ..   a slice is gathered while the one before is multiplied,
                                       and its scatter runs beside the next product
    "serial"    G0 S0 G1 S1 G2 ..      and each gather waits for the product before it, too:
                                       the same slices with nothing side by side

G gathers the moving inputs of a slice, S scatters its result (output-stationary: none).
Nothing changes a bit of any result: see `collectives.tie`.

What a product still reads must not lie where the next slice is gathered to, or the gather
waits for it. The compiler thinks in the order of its schedule, in which a product stands
before the next gather, and gives that gather its buffer. So each collective is tied to the
last four of the line, not to one: what a slice gathered then lives until all of the next
one is there; and a scatter to the partial product before, so that two buffers take turns.
"""

from collections.abc import Sequence

import jax

from meshslice_jax import collectives
from meshslice_jax.algorithms.base import Job
from meshslice_jax.plan import GemmPlan

#: Values of `GemmPlan.gather_order` that are run here.
ORDERS = ("tied", "serial")
#: How many collectives back one is tied to.
_REACH = 4


def products(
    pieces: Sequence[dict[str, jax.Array]], operands: dict[str, jax.Array], job: Job
) -> list[jax.Array]:
    """The products of all slices, scattered where the output moves.

    Args:
      pieces: of each slice, what is gathered for it, by role.
      operands: "lhs" and "rhs" as the chip has them, for what does not move.
      job: what runs.
    """
    serial, out = job.plan.gather_order == "serial", job.output()
    line, partials, results = [], [], []  # in the order in which they are to be computed
    ahead = _gathered(pieces[0], line, job, 0)
    for index in range(len(pieces)):
        current, last = ahead, index + 1 == len(pieces)
        if not last and not serial:
            ahead = _gathered(pieces[index + 1], line, job, index + 1)
        with jax.named_scope(f"slice{index}"):
            result = job.dot(**(operands | current))
            if out is not None:
                partials.append(result)
                tied = collectives.tie(result, *line[: -_REACH - 1 : -1], *partials[-2:-1])
                result = job.scatter(tied, out)
        results.append(result)
        if serial or out is not None:
            line.append(result)
        if not last and serial:
            ahead = _gathered(pieces[index + 1], line, job, index + 1)
    return results


def _gathered(
    pieces: dict[str, jax.Array], line: list[jax.Array], job: Job, index: int
) -> dict[str, jax.Array]:
    """What a slice gathers, at the end of the line, which grows by it."""
    moved = {}
    with jax.named_scope(f"slice{index}"):
        for mover in job.inputs():
            piece = collectives.tie(pieces[mover.role], *line[: -_REACH - 1 : -1])
            moved[mover.role] = job.gather(piece, mover)
            line.append(moved[mover.role])
    return moved


def faults(plan: GemmPlan) -> list[str]:
    """What can't be combined with an order that is run here."""
    if plan.gather_order not in ORDERS:
        return []
    found = []
    if plan.loop == "rolled":
        found.append(f"gather_order={plan.gather_order!r} is unrolled; loop='rolled' cannot run it")
    if plan.reduce_scatter != "native" and plan.contraction.stationary != "out":
        found.append(
            f"gather_order={plan.gather_order!r} orders reduce_scatter='native' only, not "
            f"{plan.reduce_scatter!r}"
        )
    return found
