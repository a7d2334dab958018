"""What the model predicts for a plan that is given, and where its own prediction differs.

A plan carries the numbers that it was chosen by. They go stale when the model changes, and a
file can be edited by hand; so whoever reads a plan may ask for them anew.
"""

import dataclasses
from collections.abc import Iterator

from meshslice_jax import algorithms
from meshslice_jax.algorithms import layer_problems
from meshslice_jax.autotune import chain, memory, report
from meshslice_jax.autotune.relayout import placement
from meshslice_jax.autotune.replicas import all_reduce_s
from meshslice_jax.hardware import HARDWARE, HardwareSpec
from meshslice_jax.model_plan import ModelPlan, Prediction

#: Differences below this fraction are rounding.
_ROUNDING = 1e-6
#: What the simulator finds for a block schedule that is not the plain one.
_SIMULATED = ("fc_s", "block_s", "utilisation", "memory_bytes")


def prediction_of(plan: ModelPlan, hardware: HardwareSpec, kind: str) -> Prediction:
    """The closed form's prediction for a plan, its products one after the other.

    Args:
      plan: the plan; what it predicts itself is not looked at.
      hardware: the profile.
      kind: what the memory counts, "fc_block" or "training".
    """
    problems, shape = plan.problems(), plan.mesh_shape
    layers = {
        name: report.predict_layer(problems[name], plan.layers[name], shape, hardware)
        for name in problems
    }
    places = {
        name: tuple(placement(plan.layers[name].forward, role, shape) for role in ("lhs", "out"))
        for name in problems
    }
    fc_s = sum(one.total_s for passes in layers.values() for one in passes.values())
    relayout_s = chain.relayouts_s(
        places, plan.model.branches, chain.Mover(problems, shape, hardware)
    )
    reduce_s = all_reduce_s(problems, plan.data_parallel, shape.num_chips, hardware)
    block_s = fc_s + relayout_s + reduce_s
    flops = sum(3 * problem.flops for problem in problems.values()) / shape.num_chips
    resident = memory.resident_bytes(kind, plan.model, problems, shape.num_chips)
    return Prediction(
        layers=layers,
        fc_s=fc_s,
        relayout_s=relayout_s,
        data_parallel_s=reduce_s,
        block_s=block_s,
        utilisation=flops / (block_s * hardware.flops_per_s(plan.dtype)),
        memory=kind,
        memory_bytes=resident + _most_extra_bytes(plan),
    )


def _most_extra_bytes(plan: ModelPlan) -> int:
    """What the fullest product adds to what is resident."""
    found = []
    for name, problem in plan.problems().items():
        layer = plan.layers[name]
        for part, own in layer_problems(problem, layer.forward).items():
            one = getattr(layer, part)
            schedule = algorithms.schedule(own, one, algorithms.view(one, plan.mesh_shape))
            found.append(memory.extra_bytes(part, problem, schedule, plan.mesh_shape.num_chips))
    return max(found)


def stale(plan: ModelPlan, hardware: HardwareSpec | None = None) -> list[str]:
    """Where a plan's own prediction is not what the model gives, with path and both numbers.

    Args:
      plan: the plan; one without a prediction has nothing that could differ.
      hardware: the profile that the plan names, where it does not ship.

    Returns:
      A line for each field; none where the profile is not known, or cannot price the plan.
    """
    if hardware is None or hardware.name != plan.hardware:
        hardware = HARDWARE.get(plan.hardware)
    if plan.predicted is None or hardware is None:
        return []
    try:
        anew = dict(_numbers(prediction_of(plan, hardware, plan.predicted.memory)))
    except ValueError as error:
        return [f"$.predicted: {error}"]
    written = dict(_numbers(plan.predicted))
    if plan.modelled_only:
        anew = {path: value for path, value in anew.items() if path not in _SIMULATED}
        written = {path: value for path, value in written.items() if path not in _SIMULATED}
    return [
        f"$.predicted.{path} is {_shown(written, path)}, the model gives {_shown(anew, path)}"
        for path in written | anew
        if path not in written or path not in anew or not _same(written[path], anew[path])
    ]


def _shown(numbers: dict[str, float], path: str) -> str:
    return f"{numbers[path]:.9g}" if path in numbers else "missing"


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= _ROUNDING * max(abs(one), abs(other))


def _numbers(prediction: Prediction) -> Iterator[tuple[str, float]]:
    """Every number of a prediction by its path, the sums first."""
    for field in dataclasses.fields(prediction):
        if field.name not in ("layers", "memory"):
            yield field.name, getattr(prediction, field.name)
    for layer, passes in prediction.layers.items():
        for part, one in passes.items():
            for field in dataclasses.fields(one):
                yield f"layers.{layer}.{part}.{field.name}", getattr(one, field.name)
