"""The autotuner: a model and a number of chips in, a `ModelPlan` out. No device is touched.

    model -> products of a block -> for every mesh: floor -> best block -> the fastest mesh

Rooms, from the inside out: `product` finds the best algorithm and slice count of one
product, `layer` the ways in which a layer's three products can run together, `chain` the
best combination of layers on one mesh (with `relayout` between layers that disagree), and
`search` the mesh. `overlap` asks the simulator for what the runtime cannot do yet. `memory`
says what a limit counts, `replicas` what data parallelism costs, `space` what is open and
what is pinned, `report` why the other meshes lost.

Nothing is random and nothing is measured, so every process of a job finds the same plan.
(MeshSlice, ISCA 2025, section 3.3.)
"""

import os
from collections.abc import Mapping
from typing import Literal

from meshslice_jax.autotune.report import MeshReport as MeshReport
from meshslice_jax.autotune.report import TuneReport as TuneReport
from meshslice_jax.autotune.search import Tuning
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.models import ModelShape
from meshslice_jax.plan import GemmPlan, LayerPlan


def tune(
    model: str | os.PathLike | ModelShape,
    num_chips: int,
    *,
    hardware: str | os.PathLike | HardwareSpec = "tpu_v4",
    batch: int | None = None,
    seq_len: int | None = None,
    dtype: str = "bfloat16",
    reduce_dtype: Literal["float32", "output"] = "output",
    search: Literal["exact", "paper"] = "exact",
    data_parallel: int | Literal["auto"] = 1,
    memory_limit_bytes: int | None = None,
    memory: Literal["fc_block", "training"] = "fc_block",
    algorithm: str | None = None,
    mesh_shape: tuple[int, int] | None = None,
    overrides: Mapping[str, LayerPlan | GemmPlan | Mapping[str, object]] | None = None,
    allow_modelled: bool = False,
) -> ModelPlan:
    """The fastest plan of a model's FC layers, forward and backward, on some chips.

    Args:
      model: a name in `MODELS`, a path to a config.json, or a ModelShape.
      num_chips: all chips, over all replicas.
      hardware: a profile's name, a path to its JSON, or a HardwareSpec.
      batch: sequences of a step over all replicas; None is max(1, num_chips // 2), the
        paper's weak scaling.
      seq_len: tokens of a sequence; None is 2048, or all that the model has positions for where
        those are fewer.
      dtype: dtype of activations and weights.
      reduce_dtype: what reduce-scatters carry between chips; see GemmPlan. The default here is
        "output", as the TPU compiler does it; that of a GemmPlan is "float32".
      search: "exact", or "paper" for the paper's two phases.
      data_parallel: replicas that share the batch, or "auto" to tune their number.
      memory_limit_bytes: the most that one chip may hold; None is the profile's HBM.
      memory: what the limit counts, "fc_block" or "training"; see `autotune.memory`.
      algorithm: the one algorithm to use in all layers.
      mesh_shape: (rows, cols) of one replica, instead of tuning it.
      overrides: per layer a LayerPlan, a GemmPlan or a mapping of GemmPlan fields to keep.
      allow_modelled: whether the block schedule may use what only the model and the
        simulator know yet; such a plan has `modelled_only`.

    Raises:
      ValueError: an argument that cannot be right, more tokens than the model has learned
        positions for, or no mesh on which anything runs and fits; the message goes through
        every mesh and names the changes that would help.
    """
    arguments = dict(locals())
    return tune_report(**arguments).plan


def tune_report(model: str | os.PathLike | ModelShape, num_chips: int, **arguments) -> TuneReport:
    """`tune`, with every mesh that was considered and why it lost.

    Args:
      model: as for `tune`.
      num_chips: as for `tune`.
      **arguments: the keyword arguments of `tune`.

    Raises:
      ValueError: as for `tune`.
      TypeError: an argument that `tune` does not have.
    """
    return Tuning.of(model, num_chips, **arguments).run()
