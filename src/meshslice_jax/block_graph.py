"""The data-flow graph of a block's training step.

Between two products stands a border: in the paper's order nothing of the next product
starts before the last one is complete. `BlockSchedule` opens these borders as far as
data, links and buffers allow. What a product truly needs:

    forward     its activation: all of the product before it
    dX          the cotangent: all of dX of the layer after it (or of the last forward)
    dW          the same cotangent, and the activation saved by its forward product

Weights and saved activations are there from the start. (Beyond the paper; MeshSlice,
ISCA 2025, section 3.4 closes every border.)
"""

from collections.abc import Mapping, Sequence

from meshslice_jax import algorithms
from meshslice_jax.block import BlockSchedule
from meshslice_jax.plan import LayerPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule
from meshslice_jax.task_graph import (
    FORWARD,
    GRAD_LHS,
    GRAD_RHS,
    Draft,
    Graph,
    Part,
    Placed,
    place,
    product_part,
)


def block_parts(
    layers: Mapping[str, tuple[GemmProblem, LayerPlan]],
    mesh_shape: tuple[int, int],
    block: BlockSchedule,
) -> tuple[Part, ...]:
    """The products of a block's training step in program order.

    Args:
      layers: name -> (forward problem, plan), in forward order.
      mesh_shape: (rows, cols).
      block: order of the gradients.

    Raises:
      ValueError: a product that cannot run as planned.
    """
    backward = (GRAD_LHS, GRAD_RHS) if block.grad_lhs_first else (GRAD_RHS, GRAD_LHS)
    order = [(name, FORWARD) for name in layers]
    order += [(name, kind) for name in reversed(layers) for kind in backward]
    return tuple(_part(name, *layers[name], kind, mesh_shape) for name, kind in order)


def _part(
    layer: str, problem: GemmProblem, plan: LayerPlan, kind: str, mesh_shape: tuple[int, int]
) -> Part:
    sources = ("lhs", "rhs")
    if kind != FORWARD:
        wrt = kind.removeprefix("grad_")
        sources = plan.forward.contraction.gradient(wrt).operands
    own = algorithms.layer_problems(problem, plan.forward)[kind]
    return product_part(
        own, getattr(plan, kind), mesh_shape, layer=layer, kind=kind, sources=sources
    )


def block_graph(parts: Sequence[Part], block: BlockSchedule) -> Graph:
    """The graph of a block's products, with the borders that `block` leaves.

    Args:
      parts: from `block_parts` with the same `block`.
      block: which borders are open.
    """
    draft = Draft(depth=block.buffer_depth)
    activation: tuple[int, ...] = ()
    cotangent = next_cotangent = ()
    before: Part | None = None
    placed: Placed | None = None
    for index, part in enumerate(parts):
        if part.kind == FORWARD or before.kind == FORWARD:
            # The loss's cotangent follows the last forward product.
            activation = next_cotangent = placed.tail if placed else ()
        if before is None or before.layer != part.layer or before.kind == FORWARD:
            cotangent = next_cotangent
        known = {"ct": cotangent, "rhs": (), "lhs": activation if part.kind == FORWARD else ()}
        border = _border(before, placed, part, block)
        early = _early_roles(part, block)
        waits = {
            role: known[part.source(role)] + (() if role in early else border)
            for role in ("lhs", "rhs")
        }
        waits["product"] = border + known[part.sources[0]] + known[part.sources[1]]
        crossing = early if border else ("lhs", "rhs") if index else ()
        if index + 1 < len(parts) and _is_open(part, parts[index + 1], block):
            crossing = (*crossing, "out")
        reuse = _shared(before, placed, part, block)
        placed = place(draft, part, waits=waits, crossing=crossing, reuse=reuse)
        if part.kind == GRAD_LHS:
            next_cotangent = placed.tail
        before = part
    return draft.graph()


def _is_open(before: Part, part: Part, block: BlockSchedule) -> bool:
    """Whether `part` may start while the outputs of `before` are still on their way."""
    if before.kind == GRAD_RHS:
        return block.overlap_grad_rhs
    return before.kind == GRAD_LHS and part.kind == GRAD_RHS and before.layer == part.layer


def _border(
    before: Part | None, placed: Placed | None, part: Part, block: BlockSchedule
) -> tuple[int, ...]:
    """What of the product before must be complete, whether or not its data is needed."""
    if placed is None:
        return ()
    if not _is_open(before, part, block):
        return placed.tail
    # dW needs nothing of dX, but without prefetching it starts after dX's last product.
    return () if before.kind == GRAD_RHS or block.prefetch_saved else placed.tail[:1]


def _early_roles(part: Part, block: BlockSchedule) -> tuple[str, ...]:
    """Operands of `part` that may be gathered ahead of the border."""
    if part.kind == GRAD_RHS:
        return ("lhs", "rhs") if block.prefetch_saved else ()
    weights = tuple(role for role in ("lhs", "rhs") if part.source(role) == "rhs")
    return weights if block.prefetch_weight else ()


def _shared(
    before: Part | None, placed: Placed | None, part: Part, block: BlockSchedule
) -> dict[str, list[list[int]]]:
    """Role -> gathers of the product before that `part` uses instead of its own."""
    gradients = {GRAD_LHS, GRAD_RHS}
    if not block.share_cotangent or before is None or before.layer != part.layer:
        return {}
    if {before.kind, part.kind} != gradients or "ct" not in part.sources:
        return {}
    mine = ("lhs", "rhs")[part.sources.index("ct")]
    theirs = ("lhs", "rhs")[before.sources.index("ct")]
    axes = [_gather_axis(p.schedule, role) for p, role in ((before, theirs), (part, mine))]
    return {mine: placed.gathers[theirs]} if axes[0] and axes[0] == axes[1] else {}


def _gather_axis(schedule: Schedule, role: str) -> str | None:
    """The axis along which all-gathers bring the operand in `role`, None if none do."""
    found = {
        transfer.axis
        for step, _ in schedule.steps
        for transfer in step.transfers
        if transfer.role == role and transfer.kind == "all_gather"
    }
    return found.pop() if found else None
