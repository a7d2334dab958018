"""A whole plan in the simulator, beside what the closed form predicts for it.

The products of one block run on the mesh of one replica under the plan's own block
schedule. What the simulator leaves out stays closed form: relayouts between layers, and
the gradients' all-reduce over replicas, which all chips of the other replicas share.

1D algorithms see the mesh as one ring, P x 1, and no simulation spans two views of the
chips. A plan that mixes them is simulated in runs of neighbouring layers; each ends before
the next starts, which in the plain order adds up to the same.
"""

import dataclasses
import itertools
import os

from meshslice_jax import algorithms
from meshslice_jax.algorithms import layer_problems
from meshslice_jax.autotune.replicas import all_reduce_s
from meshslice_jax.block import BlockSchedule
from meshslice_jax.cost import CostBreakdown, seconds
from meshslice_jax.faults import NO_FAULTS, Faults
from meshslice_jax.hardware import HARDWARE, HardwareSpec, hardware_spec
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.simulate import simulate_block
from meshslice_jax.timeline import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedPass:
    """One product of a block.

    Attributes:
      layer: name of the layer.
      name: "forward", "grad_lhs" or "grad_rhs".
      simulated_s: from the end of the product before it to its own end, both on the last
        chip; where the block schedule opens borders, what it adds to the block.
      predicted: the closed form of the product by itself.
    """

    layer: str
    name: str
    simulated_s: float
    predicted: CostBreakdown

    @property
    def exposed_s(self) -> float:
        """Simulated time beyond its products."""
        return self.simulated_s - self.predicted.math_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSimulation:
    """A simulated block of a plan.

    Attributes:
      plan: what was simulated.
      hardware: on what.
      block: the block schedule that was followed.
      faults: with what.
      passes: the products, in the order in which they run.
      timelines: what the simulator found, one for each run of layers that see the same
        mesh; almost always one.
      data_parallel_s: closed form of the gradients' all-reduce; not simulated.
    """

    plan: ModelPlan
    hardware: HardwareSpec
    block: BlockSchedule
    faults: Faults
    passes: tuple[SimulatedPass, ...]
    timelines: tuple[Timeline, ...]
    data_parallel_s: float

    @property
    def total_s(self) -> float:
        """When the last chip is done with the products."""
        return sum(timeline.total_s for timeline in self.timelines)

    @property
    def math_s(self) -> float:
        """All products of one chip, undisturbed."""
        return sum(timeline.math_s for timeline in self.timelines)

    @property
    def exposed_s(self) -> float:
        """Time of the block beyond its products."""
        return self.total_s - self.math_s

    @property
    def predicted_s(self) -> float:
        """The closed form of all products, one after the other."""
        return sum(one.predicted.total_s for one in self.passes)

    @property
    def utilisation(self) -> float:
        """Fraction of the peak that the products reach."""
        flops = sum(3 * problem.flops for problem in self.plan.problems().values())
        peak = self.hardware.flops_per_s(self.plan.dtype) * self.plan.mesh_shape.num_chips
        return flops / (peak * self.total_s)


def plan_hardware(
    plan: ModelPlan, hardware: str | os.PathLike | HardwareSpec | None = None
) -> HardwareSpec:
    """The profile that was asked for, or the one that the plan names.

    Args:
      plan: the plan.
      hardware: a profile, as for `hardware_spec`, or None.

    Raises:
      ValueError: unknown hardware, or a plan made for a profile that does not ship.
    """
    if hardware is None and plan.hardware not in HARDWARE:
        raise ValueError(
            f"the plan was made for hardware {plan.hardware!r}, which is none of "
            f"{', '.join(HARDWARE)}; name the JSON file of that profile as hardware"
        )
    return hardware_spec(plan.hardware if hardware is None else hardware)


def simulate_plan(
    plan: ModelPlan,
    hardware: str | os.PathLike | HardwareSpec | None = None,
    *,
    faults: Faults = NO_FAULTS,
    buffer_depth: int | None = None,
    record: bool = False,
) -> PlanSimulation:
    """Simulates the block of a plan on one replica's mesh.

    Args:
      plan: the plan; its block schedule is followed.
      hardware: a profile; None is the one that the plan names.
      faults: jitter, slow chips and slow links.
      buffer_depth: gathered slices held at once; None is the block schedule's.
      record: whether the timelines keep every task's times, for `write_trace`.

    Raises:
      ValueError: a profile that is not there, a fault outside the mesh, or a slow chip or
        link in a plan that mixes 1D and 2D algorithms.
    """
    spec = plan_hardware(plan, hardware)
    block = plan.block_schedule
    if buffer_depth is not None:
        block = dataclasses.replace(block, buffer_depth=buffer_depth)
    groups = _groups(plan)
    if len(groups) > 1 and (faults.slow_chips or faults.slow_links):
        raise ValueError(
            f"slow chips and links need all layers on one mesh; this plan mixes 1D and 2D "
            f"algorithms ({', '.join('+'.join(group) for group in groups)})"
        )
    problems = plan.problems()
    timelines = tuple(
        simulate_block(
            {name: (problems[name], plan.layers[name]) for name in group},
            plan.mesh_shape,
            spec,
            block=block,
            faults=faults,
            record=record,
        )
        for group in groups
    )
    reduce_s = all_reduce_s(problems, plan.data_parallel, plan.mesh_shape.num_chips, spec)
    return PlanSimulation(
        plan=plan,
        hardware=spec,
        block=block,
        faults=faults,
        passes=_passes(plan, spec, timelines),
        timelines=timelines,
        data_parallel_s=reduce_s,
    )


def _groups(plan: ModelPlan) -> list[list[str]]:
    """Neighbouring layers that see the same mesh."""

    def flat(name: str) -> bool:
        forward = plan.layers[name].forward
        return algorithms.algorithm_of(forward).flatten(forward) is not None

    return [list(names) for _, names in itertools.groupby(plan.layers, key=flat)]


def _passes(
    plan: ModelPlan, spec: HardwareSpec, timelines: tuple[Timeline, ...]
) -> tuple[SimulatedPass, ...]:
    problems, found = plan.problems(), []
    for label, taken_s in itertools.chain.from_iterable(one.part_s for one in timelines):
        layer, name = label.split("/")
        own, gemm = plan.layers[layer].forward, getattr(plan.layers[layer], name)
        problem = layer_problems(problems[layer], own)[name]
        schedule = algorithms.schedule(problem, gemm, algorithms.view(gemm, plan.mesh_shape))
        cost = seconds(schedule, problem, spec)
        found.append(SimulatedPass(layer=layer, name=name, simulated_s=taken_s, predicted=cost))
    return tuple(found)
