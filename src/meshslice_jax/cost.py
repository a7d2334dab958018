"""From bytes, hops and FLOPs to seconds: the closed-form time of a schedule.

A schedule is a sequence of steps; what is inside a step runs at the same time. With
one price per transfer and one per product, a step takes

    step = max(transfers along row, transfers along col, product + stall + waits)

and the steps follow one another. That is all: the paper's prologue, steady state and
epilogue (MeshSlice, ISCA 2025, section 3.4), the collective that overlaps with
nothing, Wang's ring and SUMMA's pipeline are different schedules under one rule.

Prices (P chips along the axis, b bytes that one chip sends, r its rate):

    all-gather, reduce-scatter   launch + (P-1) hop + b / r
    neighbour send over h hops   launch + h (hop + b / r)          a shift: h = 1
    all-to-all                   launch + P/2 hop + P^2/8 shard / one-way r      on a ring
    chain of P-1 sends, D pieces launch + (P-1 + D-1) (hop + panel / (D r))
    product                      max(FLOPs of whole tiles / rate, bytes / HBM) + launch
    stall                        contention x HBM bytes of the step's transfers / HBM

The stall is what links take from a product's memory time when both run; waits are the
transfers beside which the hardware computes nothing (`HardwareSpec.synchronous`). A rate is that
of both ring directions together, of one for one-way transfers and on a line. Bounds:
no schedule of these transfers and products beats the busiest resource, and none is
slower than everything in turn. (The same words as the JAX scaling book's.)
"""

import dataclasses
import functools

from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.problem import GemmProblem, itemsize, promoted_dtype
from meshslice_jax.schedule import Product, Schedule, Step, Transfer


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostBreakdown:
    """Where the time of one chip goes, in seconds.

    Attributes:
      total_s: the whole schedule; prologue_s + steady_s + epilogue_s.
      math_s: all local products, alone.
      comm_row_s: all transfers along "row", alone.
      comm_col_s: all transfers along "col", alone.
      stall_s: what the links' HBM traffic adds to products that run beside it.
      exposed_s: total_s - math_s, communication that is not hidden.
      prologue_s: steps before the first in which a product and a transfer overlap; if
        none does, steps before the first product.
      steady_s: from the first such step to the last.
      epilogue_s: the rest.
      lower_bound_s: the busiest of math, row and col; no overlap beats it.
      upper_bound_s: math + row + col + stall; nothing overlaps.
    """

    total_s: float
    math_s: float
    comm_row_s: float
    comm_col_s: float
    stall_s: float
    exposed_s: float
    prologue_s: float
    steady_s: float
    epilogue_s: float
    lower_bound_s: float
    upper_bound_s: float


def seconds(schedule: Schedule, problem: GemmProblem, hardware: HardwareSpec) -> CostBreakdown:
    """The time of a schedule on one machine.

    Args:
      schedule: what one chip sends and computes, from `algorithms.schedule`.
      problem: the product; its dtypes price the local products.
      hardware: rates and latencies, from `hardware_spec("tpu_v4")`.

    Raises:
      ValueError: the hardware has no FLOP/s for the operands' dtype.
    """
    phases = [0.0, 0.0, 0.0]
    math = row = col = stalls = 0.0
    first, last = _overlap(schedule.steps)
    for index, (step, repeats) in enumerate(schedule.steps):
        step_row, step_col, product, stall, waits = step_parts(step, problem, hardware)
        taken = repeats * max(step_row, step_col, product + stall + waits)
        phases[0 if index < first else 1 if index <= last else 2] += taken
        math += repeats * product
        row += repeats * step_row
        col += repeats * step_col
        stalls += repeats * stall
    total = sum(phases)
    return CostBreakdown(
        total_s=total,
        math_s=math,
        comm_row_s=row,
        comm_col_s=col,
        stall_s=stalls,
        exposed_s=total - math,
        prologue_s=phases[0],
        steady_s=phases[1],
        epilogue_s=phases[2],
        lower_bound_s=max(math, row, col),
        upper_bound_s=math + row + col + stalls,
    )


def _overlap(steps: tuple[tuple[Step, int], ...]) -> tuple[int, int]:
    """Places of the first and the last step that overlaps; (first product, -1) if none."""
    both = [i for i, (step, _) in enumerate(steps) if step.product and step.transfers]
    if both:
        return both[0], both[-1]
    products = [i for i, (step, _) in enumerate(steps) if step.product]
    return (products[0] if products else len(steps)), -1


def step_parts(
    step: Step, problem: GemmProblem, hardware: HardwareSpec
) -> tuple[float, float, float, float, float]:
    """Seconds of a step's row transfers, col transfers, product, its stall, and its waits."""
    along = {"row": 0.0, "col": 0.0}
    hbm_bytes = waits = 0.0
    for transfer in step.transfers:
        waited = transfer.kind in hardware.synchronous
        overlapped = step.product is not None and not waited
        taken = transfer_s(transfer, hardware, overlapped=overlapped)
        along[transfer.axis] += taken
        waits += taken if waited else 0.0
        hbm_bytes += transfer_hbm_bytes(transfer, hardware) if overlapped else 0.0
    if step.product is None:
        return along["row"], along["col"], 0.0, 0.0, waits
    stall = hardware.contention * hbm_bytes / hardware.hbm_bytes_per_s
    return along["row"], along["col"], product_s(step.product, problem, hardware), stall, waits


def transfer_s(transfer: Transfer, hardware: HardwareSpec, *, overlapped: bool) -> float:
    """Seconds of a transfer entry (all `count` of its collectives), alone on its axis.

    Args:
      transfer: one entry of a step.
      hardware: rates and latencies.
      overlapped: whether a product runs at the same time.
    """
    ring = transfer.ring
    rate = hardware.axis_bytes_per_s(ring, overlapped=overlapped, directions=transfer.directions)
    if transfer.kind == "all_gather":
        one = hardware.gather_launch_s + transfer.hops * hardware.gather_hop_s
        return transfer.count * (one + transfer.bytes / rate)
    if transfer.kind == "reduce_scatter":
        one = hardware.scatter_launch_s + transfer.hops * hardware.scatter_hop_s
        return transfer.count * (one + transfer.bytes / rate)
    if transfer.kind == "all_to_all":
        # The busiest link carries P^2/8 shards on a ring, P^2/4 on a line.
        shard, closed = transfer.bytes / (ring - 1), hardware.is_ring(ring)
        link = hardware.axis_bytes_per_s(ring, overlapped=overlapped, directions=1)
        latency = (ring // 2 if closed else ring - 1) * hardware.permute_hop_s
        carried = ring**2 / (8 if closed else 4) * shard
        return transfer.count * (hardware.permute_launch_s + latency + carried / link)
    hop = hardware.permute_hop_s
    if transfer.kind == "permute":
        # On a line what wraps around travels back past all other chips.
        latency = (transfer.hops if hardware.is_ring(ring) else ring - 1) * hop
        one = latency + transfer.hops * transfer.bytes / rate
    else:
        piece = panel_bytes(transfer) / transfer.packets
        one = (transfer.hops + transfer.packets - 1) * (hop + piece / rate)
    return transfer.count * (hardware.permute_launch_s + one)


def panel_bytes(transfer: Transfer) -> float:
    """Bytes of the panel of a broadcast or reduce: what all chips but one send on."""
    return transfer.bytes * transfer.ring / (transfer.ring - 1)


def transfer_hbm_bytes(transfer: Transfer, hardware: HardwareSpec) -> float:
    """HBM bytes that the links of one chip read and write for a transfer entry.

    In a chain of sends the chips inside it count: they receive and send a whole panel.
    """
    chain = transfer.kind in ("broadcast", "reduce")
    sent = panel_bytes(transfer) if chain else transfer.bytes
    return hardware.hbm_bytes_per_link_byte * transfer.count * sent


def product_s(product: Product, problem: GemmProblem, hardware: HardwareSpec) -> float:
    """Seconds of a step's local products, alone: whole MXU tiles or HBM, and their launches.

    The HBM floor counts each of the three local matrices once, in its own dtype; a product
    that accumulates reads and writes its result in the accumulation dtype instead, where
    the hardware says so.
    """
    m, n, k = product.m, product.n, product.k
    tile_m, tile_n, tile_k = hardware.mxu_tile
    padded = -(-m // tile_m) * tile_m * (-(-n // tile_n) * tile_n) * (-(-k // tile_k) * tile_k)
    dtype, lhs, rhs, out = _operands(problem.lhs_dtype, problem.rhs_dtype, problem.out_dtype)
    math = 2 * padded / (hardware.flops_per_s(dtype) * hardware.mxu_efficiency)
    if product.accumulates and hardware.accumulates_in_hbm:
        out = 2 * itemsize(problem.accum_dtype)
    memory = (m * k * lhs + k * n * rhs + m * n * out) / hardware.hbm_bytes_per_s
    return product.count * (max(math, memory) + hardware.product_launch_s)


@functools.lru_cache(maxsize=256)
def _operands(lhs: str, rhs: str, out: str) -> tuple[str, int, int, int]:
    """The dtype in which operands meet, and the bytes of one element of each matrix."""
    return promoted_dtype(lhs, rhs), itemsize(lhs), itemsize(rhs), itemsize(out)
