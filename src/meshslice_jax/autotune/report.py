"""What the tuner found out about every mesh, and why all but one lost."""

import dataclasses
import math
from typing import Literal

from meshslice_jax import algorithms
from meshslice_jax.algorithms import layer_problems
from meshslice_jax.autotune.relayout import placement
from meshslice_jax.cost import CostBreakdown, seconds
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.model_plan import ModelPlan, PassPrediction, Prediction
from meshslice_jax.plan import LayerPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshReport:
    """One mesh that was considered.

    Attributes:
      mesh_shape: of one replica.
      data_parallel: number of replicas.
      status: "chosen"; "slower" (its best plan was found and is slower); "bounded" (its
        busiest resource alone takes longer than the chosen block); "rejected" (nothing
        runs there, or nothing fits).
      block_s: seconds of its best block; for "bounded", of a floor under it; None where
        rejected.
      memory_bytes: bytes of one chip under its best plan, None where there is none.
      reason: why it lost, or was rejected.
    """

    mesh_shape: MeshShape
    data_parallel: int
    status: Literal["chosen", "slower", "bounded", "rejected"]
    block_s: float | None
    memory_bytes: int | None
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneReport:
    """A plan with everything that it was chosen from.

    Attributes:
      plan: the chosen plan.
      search: "exact" or "paper".
      memory_limit_bytes: the limit that held.
      meshes: every mesh considered: the chosen one, then by ascending block_s, then the
        rejected ones.
    """

    plan: ModelPlan
    search: str
    memory_limit_bytes: int
    meshes: tuple[MeshReport, ...]

    @property
    def runners_up(self) -> tuple[MeshReport, ...]:
        """The meshes that run and lost, the best first."""
        return tuple(one for one in self.meshes if one.status in ("slower", "bounded"))

    @property
    def notes(self) -> list[str]:
        """What a user of the plan should know that no number of it says."""
        return [*_too_long(self.plan), *_not_local(self.plan)]

    @property
    def rejected(self) -> tuple[MeshReport, ...]:
        """The meshes on which nothing runs."""
        return tuple(one for one in self.meshes if one.status == "rejected")


def _too_long(plan: ModelPlan) -> list[str]:
    """Whether sequences are longer than those that the model was trained with."""
    if plan.seq_len <= plan.model.seq_len:
        return []
    return [
        f"seq_len {plan.seq_len} is more than the {plan.model.seq_len} tokens that "
        f"{plan.model.name} was made for; its {plan.model.positions} positions go on, how well is "
        "not the plan's"
    ]


def _not_local(plan: ModelPlan) -> list[str]:
    """Whether attention would need more than what a chip has of qkv's output."""
    tokens, features = (
        math.prod(plan.mesh_shape.size(axis) for axis in axes)
        for axes in placement(plan.layers["qkv"].forward, "out", plan.mesh_shape)
    )
    wanted = (
        ("kv_heads", plan.model.kv_heads, features),
        ("batch of a replica", plan.batch // plan.data_parallel, tokens),
    )
    faults = [
        f"{name} = {extent} is not divisible by the {chips} chips over which it would lie"
        for name, extent, chips in wanted
        if extent % chips
    ]
    if not faults:
        return []
    return [
        f"attention is not local to a chip: {'; '.join(faults)}; moving q, k and v is not priced, "
        "and nn.GPT refuses such a plan"
    ]


def counted(number: int, noun: str) -> str:
    """A number of things: "1 chip", "4 chips"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def predict_layer(
    problem: GemmProblem, plan: LayerPlan, shape: MeshShape, hardware: HardwareSpec
) -> dict[str, PassPrediction]:
    """What the closed form predicts for each product of a layer by itself."""
    found = {}
    for part, own in layer_problems(problem, plan.forward).items():
        sizes = algorithms.view(getattr(plan, part), shape)
        schedule = algorithms.schedule(own, getattr(plan, part), sizes)
        found[part] = _pass(schedule, seconds(schedule, own, hardware))
    return found


def _pass(schedule: Schedule, cost: CostBreakdown) -> PassPrediction:
    return PassPrediction(
        math_s=cost.math_s,
        comm_row_s=cost.comm_row_s,
        comm_col_s=cost.comm_col_s,
        exposed_s=cost.exposed_s,
        total_s=cost.total_s,
        bytes_row=schedule.bytes_along("row"),
        bytes_col=schedule.bytes_along("col"),
        peak_bytes=schedule.peak_bytes,
    )


def why_slower(loser: Prediction, winner: Prediction) -> str:
    """Where a slower block loses its time, in words."""
    gaps = {
        "compute": _summed(loser, "math_s") - _summed(winner, "math_s"),
        "exposed communication": _summed(loser, "exposed_s") - _summed(winner, "exposed_s"),
        "relayouts": loser.relayout_s - winner.relayout_s,
        "gradients' all-reduce": loser.data_parallel_s - winner.data_parallel_s,
    }
    ratio = loser.block_s / winner.block_s - 1
    if ratio == 0:
        return "equally fast; the tie goes to fewer twins, then fewer replicas, then fewer rows"
    parts = [f"{name} {gap * 1e3:+.3f} ms" for name, gap in gaps.items() if abs(gap) >= 5e-7]
    worst = max(_exposed(loser), key=lambda one: one[0])
    return (
        f"{ratio:+.1%}: {', '.join(parts)}; most exposed: {worst[1]} {worst[2]} "
        f"({worst[0] * 1e3:.3f} ms)"
    )


def _summed(prediction: Prediction, field: str) -> float:
    return sum(
        getattr(one, field) for passes in prediction.layers.values() for one in passes.values()
    )


def _exposed(prediction: Prediction) -> list[tuple[float, str, str]]:
    return [
        (one.exposed_s, layer, name)
        for layer, passes in prediction.layers.items()
        for name, one in passes.items()
    ]
