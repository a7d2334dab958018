"""How far each number depends on each constant, and how the two fitted ones were found.

`sensitivity` changes one constant (or one choice in Wang's form, or the slice counts) and
lists what that does to the reproduced numbers. `fit_links` finds link efficiency and
hop time by Gauss-Newton on FC utilisations of Table 2; fitted on one model's pair, it
predicts the other's, which is the strongest evidence that the paper's simulator
behaves like this model.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from meshslice_jax.dataflow import Dataflow
from meshslice_jax.hardware import HardwareSpec, hardware_spec
from meshslice_jax.reproduce import search
from meshslice_jax.reproduce.peers import DEFAULT_WANG, WangForm
from meshslice_jax.reproduce.published import BOTH, GPT3, MEGATRON, PUBLISHED
from meshslice_jax.reproduce.rows import SWEPT_SHAPES, sixteen_products, timed_block

#: Columns of the table: heading -> key of PUBLISHED.
TARGETS = {
    "tuned G": ("fc_utilisation/tuned", GPT3),
    "tuned M": ("fc_utilisation/tuned", MEGATRON),
    "all-Y G": ("fc_utilisation/all_y_stationary", GPT3),
    "all-Y M": ("fc_utilisation/all_y_stationary", MEGATRON),
    "Wang G": ("fc_gain_over_wang", GPT3),
    "Wang M": ("fc_gain_over_wang", MEGATRON),
    "loss G": ("efficiency_lost_16_to_256", GPT3),
    "loss M": ("efficiency_lost_16_to_256", MEGATRON),
    "16 Coll.": ("mean_gain_over_collective_16_products", BOTH),
    "16 Wang": ("mean_gain_over_wang_16_products", BOTH),
    "spread G": ("mesh_shape_best_over_worst", GPT3),
}
_HOPS = ("gather_hop_s", "scatter_hop_s", "permute_hop_s")
_LAUNCHES = ("gather_launch_s", "scatter_launch_s", "permute_launch_s")


def utilisation(spec: HardwareSpec, model: str, all_y: bool) -> float:
    """One of Table 2's four: percent of peak at 256 chips, tuned or all-Y-stationary."""
    dataflow = Dataflow.OS if all_y else None
    return timed_block(spec, model, 256, "meshslice", dataflow=dataflow).utilisation(spec)


def targets(
    spec: HardwareSpec,
    wang: WangForm = DEFAULT_WANG,
    slice_count: int | None = None,
    same_mesh: bool = False,
) -> dict[str, float]:
    """The eleven numbers of TARGETS under one machine and one form of Wang.

    Args:
      spec: the machine.
      wang: the form of Wang's algorithm.
      slice_count: one for all layers; None is the best of each.
      same_mesh: whether Wang runs on the mesh that MeshSlice chose, not on its own best.
    """
    found = {}
    for model, letter in ((GPT3, "G"), (MEGATRON, "M")):
        ours = timed_block(spec, model, 256, "meshslice", slice_count=slice_count)
        small = timed_block(spec, model, 16, "meshslice", slice_count=slice_count)
        all_y = timed_block(
            spec, model, 256, "meshslice", dataflow=Dataflow.OS, slice_count=slice_count
        )
        peer = timed_block(
            spec,
            model,
            256,
            "wang",
            wang,
            shape=ours.mesh_shape if same_mesh else None,
            slice_count=slice_count,
        )
        found[f"tuned {letter}"] = ours.utilisation(spec)
        found[f"all-Y {letter}"] = all_y.utilisation(spec)
        found[f"Wang {letter}"] = 100 * (peer.total_s / ours.total_s - 1)
        found[f"loss {letter}"] = 100 * (1 - ours.utilisation(spec) / small.utilisation(spec))
    found |= _sixteen(spec, wang, slice_count, same_mesh)
    times = [
        timed_block(spec, GPT3, 256, "meshslice", shape=s, slice_count=slice_count).total_s
        for s in SWEPT_SHAPES
    ]
    found["spread G"] = max(times) / min(times)
    return {name: found[name] for name in TARGETS}


def _sixteen(spec, wang, slice_count, same_mesh) -> dict[str, float]:
    gains = {"16 Coll.": [], "16 Wang": []}
    for problem in sixteen_products():
        ours = search.single(problem, 256, "meshslice", spec, slice_count=slice_count)
        shapes = (ours.mesh_shape,) if same_mesh else None
        for name, algorithm in (("16 Coll.", "collective"), ("16 Wang", "wang")):
            peer = search.single(
                problem,
                256,
                algorithm,
                spec,
                wang,
                shapes=shapes if algorithm == "wang" else None,
                slice_count=slice_count,
            )
            gains[name].append(100 * (peer.total_s / ours.total_s - 1))
    return {name: sum(found) / len(found) for name, found in gains.items()}


def _scaled(fields: Iterable[str], factor: float):
    return lambda spec: {field: getattr(spec, field) * factor for field in fields}


def _set(fields: Iterable[str], value: float):
    return lambda spec: dict.fromkeys(fields, value)


_LINK = ("link_efficiency", "idle_link_efficiency")
#: Label -> function from a spec to the fields that change.
CHANGES = {
    "MXU efficiency 0.978 (prototype)": _set(["mxu_efficiency"], 0.978),
    "MXU efficiency 0.95": _set(["mxu_efficiency"], 0.95),
    "link efficiency -10 %": _scaled(_LINK, 0.9),
    "link efficiency +10 %": _scaled(_LINK, 1.1),
    "idle link efficiency 0.92": _set(["idle_link_efficiency"], 0.92),
    "idle link efficiency 1.0": _set(["idle_link_efficiency"], 1.0),
    "hop 5 us (prototype today)": _set(_HOPS, 5e-6),
    "hop 10 us": _set(_HOPS, 10e-6),
    "hop 13 us, reduce-scatter 7 us (June 2024)": lambda spec: {
        "gather_hop_s": 13e-6,
        "scatter_hop_s": 7e-6,
        "permute_hop_s": 13e-6,
    },
    "hop 18 us": _set(_HOPS, 18e-6),
    "send hop 50 us (prototype)": _set(["permute_hop_s"], 50e-6),
    "launches x 0.5": _scaled(_LAUNCHES, 0.5),
    "launches x 2": _scaled(_LAUNCHES, 2),
    "launches x 4": _scaled(_LAUNCHES, 4),
    "contention 0": _set(["contention"], 0.0),
    "contention 0.5": _set(["contention"], 0.5),
    "contention 1.5": _set(["contention"], 1.5),
    "product launch 0": _set(["product_launch_s"], 0.0),
    "product launch 20 us": _set(["product_launch_s"], 20e-6),
}
_FORMS = {
    "Wang: faster ring per product": WangForm(ring="best"),
    "Wang: weights ringed": WangForm(ring="row"),
    "Wang: prototype's rings": WangForm(ring="prototype"),
    "Wang: no prologue": WangForm(prologue=False),
    "Wang: not merged": WangForm(merged=False),
    "Wang: one link direction": WangForm(directions=1),
}


def sensitivity(which: str | HardwareSpec = "tpu_v4_paper") -> dict[str, dict[str, float]]:
    """Label of a change -> target -> change of that target, in points (or of the ratio).

    The first entry, "base", holds the targets themselves.
    """
    base_spec = hardware_spec(which)
    base = targets(base_spec)
    found = {}
    for label, changed in CHANGES.items():
        found[label] = targets(dataclasses.replace(base_spec, **changed(base_spec)))
    for label, form in _FORMS.items():
        found[label] = targets(base_spec, form)
    found["Wang: on MeshSlice's mesh"] = targets(base_spec, same_mesh=True)
    for count in (4, 8):
        found[f"S = {count} in all layers"] = targets(base_spec, slice_count=count)
    moved = {label: {name: new[name] - base[name] for name in base} for label, new in found.items()}
    return {"base": base} | moved


def sensitivity_table(which: str | HardwareSpec = "tpu_v4_paper") -> str:
    """`sensitivity` as a Markdown table, for docs/time_model.md."""
    found = sensitivity(which)
    lines = ["| change | " + " | ".join(TARGETS) + " |", "|---|" + "---|" * len(TARGETS)]
    published = [f"{PUBLISHED[key]:g}" for key in TARGETS.values()]
    lines.append("| published | " + " | ".join(published) + " |")
    for label, values in found.items():
        sign = "" if label == "base" else "+"
        cells = [
            f"{value:{sign}.{2 if name == 'spread G' else 1}f}" for name, value in values.items()
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def fit_links(
    models: Iterable[str], which: str | HardwareSpec = "tpu_v4_paper", rounds: int = 8
) -> HardwareSpec:
    """Link efficiency and hop time that best meet the utilisations of `models`.

    Args:
      models: whose two utilisations of Table 2 (tuned and all-Y-stationary) to meet.
      which: the machine that gives all other constants.
      rounds: Gauss-Newton steps; the slice counts are chosen anew in each evaluation.
    """
    spec, models = hardware_spec(which), tuple(models)
    wanted = [
        PUBLISHED[f"fc_utilisation/{name}", model]
        for model in models
        for name in ("tuned", "all_y_stationary")
    ]

    def with_links(point: np.ndarray) -> HardwareSpec:
        efficiency, hop_us = (float(value) for value in point)
        changes = dict.fromkeys(_LINK, efficiency) | dict.fromkeys(_HOPS, hop_us * 1e-6)
        return dataclasses.replace(spec, name=f"{spec.name}/fitted", **changes)

    def misses(point: np.ndarray) -> np.ndarray:
        tried = with_links(point)
        found = [utilisation(tried, model, all_y) for model in models for all_y in (False, True)]
        return np.subtract(found, wanted)

    point = np.array([0.8, 10.0])
    for _ in range(rounds):
        here, nudges = misses(point), np.diag([0.01, 0.5])
        slopes = [(misses(point + nudge) - here) / nudge.sum() for nudge in nudges]
        step, *_ = np.linalg.lstsq(np.stack(slopes, axis=1), -here)
        point = np.clip(point + step, [0.3, 0.1], [1.0, 50.0])
    return with_links(point)
