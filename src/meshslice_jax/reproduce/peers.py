"""MODEL-ONLY schedules of Wang and SUMMA, as the paper's comparison needs them.

The paper lets its peers merge their steps into as many as MeshSlice has slices. On a
ring of P chips that is P / S sends per product, which is rarely whole (6 slices on a
ring of 8). No kernel can run a third of a send, so the schedules of `algorithms`
refuse such slice counts; here, and only here, counts and repeats may be fractions.
Nothing in this module runs, and the tuner does not see it.

`WangForm` holds what the paper leaves open about Wang's algorithm. Its two ratios
move by up to 18 points with these choices, so every claim over Wang names its form.
(MeshSlice, ISCA 2025, sections 2.3 and 4.)
"""

import dataclasses
import functools
import math

from meshslice_jax import algorithms
from meshslice_jax.algorithms.base import collective, local_product, shard_bytes, transfers
from meshslice_jax.dataflow import Dataflow, Mover
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule, Step, Transfer, sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class WangForm:
    """How Wang's algorithm is modelled.

    Attributes:
      ring: the axis whose collective becomes a ring of sends: "col" (in the paper's
        placements the activations, or their gradients), "row" (the weights),
        "best" (the faster of the two for each product) or "prototype" (row for OS and
        LS, col for RS, as the authors' code does).
      merged: whether the ring's steps are merged into MeshSlice's slice count.
      prologue: whether the first product waits for all sends of its merged step.
      directions: 2 if a send uses both ring directions, 1 if only one.
    """

    ring: str = "col"
    merged: bool = True
    prologue: bool = True
    directions: int = 2

    def __str__(self) -> str:
        ring = {"col": "activations", "row": "weights"}.get(self.ring, self.ring)
        words = [f"{ring}_ringed", "merged" if self.merged else "unmerged"]
        words += [] if self.prologue else ["no_prologue"]
        words += [] if self.directions == 2 else ["one_way"]
        return "_".join(words)


#: Activations ringed, both directions, merged to MeshSlice's slices.
DEFAULT_WANG = WangForm()


def plan_of(algorithm: str, dataflow: Dataflow, slice_count: int = 1, **fields) -> GemmPlan:
    """A plan whose reductions carry the output's dtype, as on the paper's machine."""
    return GemmPlan(
        algorithm=algorithm,
        dataflow=dataflow,
        slice_count=slice_count,
        reduce_dtype="output",
        **fields,
    )


@functools.lru_cache(maxsize=1 << 16)
def runtime_schedule(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> Schedule:
    """`algorithms.schedule`, remembered: sweeps of constants ask again and again."""
    return algorithms.schedule(problem, plan, shape)


@functools.lru_cache(maxsize=1 << 16)
def wang_schedule(
    problem: GemmProblem,
    dataflow: Dataflow,
    shape: MeshShape,
    slice_count: int,
    ring_axis: str,
    form: WangForm,
) -> Schedule:
    """Wang with its ring merged into at most `slice_count` steps (model-only).

    Args:
      problem: the product.
      dataflow: which matrix stays put.
      shape: the mesh.
      slice_count: steps asked for; more than the ring has chips are cut to that.
      ring_axis: "row" or "col", the axis that is ringed.
      form: the other choices; its `ring` has been resolved into `ring_axis`.
    """
    plan = plan_of("wang", dataflow, ring=ring_axis)
    ring = shape.size(ring_axis)
    steps = min(slice_count, ring) if form.merged else ring
    sends = ring / steps
    ringed, blocked = sorted(plan.contraction.movers, key=lambda mover: mover.axis != ring_axis)
    send = Transfer(
        kind="permute",
        role=ringed.role,
        axis=ring_axis,
        ring=ring,
        bytes=shard_bytes(problem, plan, ringed.role, shape),
        hops=1,
        directions=form.directions,
    )
    block = (Step(transfers=transfers(collective(problem, plan, blocked, shape))), 1)
    alone = (Step(transfers=(send,)), sends - 1 if form.prologue and ring > 1 else 0)
    product = local_product(problem, plan, shape, steps)
    beside = dataclasses.replace(send, count=sends)
    both = (Step(transfers=(beside,), product=product), steps - 1)
    last = (Step(product=product), 1)
    # A reducing ring is a gathering ring in reverse.
    inner = (alone, both, last) if ringed.is_input else (last, both, alone)
    outer = (block, *inner) if blocked.is_input else (*inner, block)
    return dataclasses.replace(runtime_schedule(problem, plan, shape), steps=sequence(*outer))


def summa_schedule(
    problem: GemmProblem,
    dataflow: Dataflow,
    shape: MeshShape,
    slice_count: int,
    hardware: HardwareSpec,
) -> Schedule:
    """SUMMA merged into at most `slice_count` steps, with the best packet count (model-only).

    A panel passes P + D - 1 stages: the owner's own read counts as one, and D is the
    number of packets that makes the chain shortest on this hardware.
    """
    plan = plan_of("summa", dataflow)
    panels = math.lcm(*shape)
    steps = min(slice_count, panels)
    count = panels / steps
    ahead, behind = [], []
    for mover in plan.contraction.movers:
        if shape.size(mover.axis) > 1:
            chain = _chain(problem, plan, mover, shape, panels, hardware)
            (ahead if mover.is_input else behind).append(dataclasses.replace(chain, count=count))
    product = local_product(problem, plan, shape, steps)
    steady = Step(transfers=(*ahead, *behind), product=product)
    steps_ = sequence(
        (Step(transfers=tuple(ahead)), 1),
        (steady, steps - 1),
        (Step(product=product), 1),
        (Step(transfers=tuple(behind)), 1),
    )
    return dataclasses.replace(runtime_schedule(problem, plan, shape), steps=steps_)


def _chain(
    problem: GemmProblem,
    plan: GemmPlan,
    mover: Mover,
    shape: MeshShape,
    panels: int,
    hardware: HardwareSpec,
) -> Transfer:
    ring = shape.size(mover.axis)
    panel = shard_bytes(problem, plan, mover.role, shape) * ring / panels
    rate = hardware.axis_bytes_per_s(ring, overlapped=True)
    # d/dD of (P + D - 1)(hop + panel / (D rate)) vanishes here.
    packets = math.sqrt((ring - 1) * panel / rate / max(hardware.permute_hop_s, 1e-9))
    return Transfer(
        kind="broadcast" if mover.is_input else "reduce",
        role=mover.role,
        axis=mover.axis,
        ring=ring,
        bytes=panel * (ring - 1) / ring,
        hops=ring,
        packets=max(1, round(packets)),
    )
