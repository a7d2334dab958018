"""The plan of a whole model: one value, and one JSON file, that says how its layers run.

A `ModelPlan` joins a model, a number of chips and a mesh shape with a `LayerPlan` for each
FC layer of a block (all blocks are alike) and with what a hardware profile predicts for
it. It is what the tuner returns and what the benchmark, the simulator and the Flax layers
take. It cannot be illegal: every layer is checked against its own products and mesh when
the value is made, so a file edited by hand fails when it is loaded, with the reason.

    tune(...) -> ModelPlan -> save_plan -> plan.json -> load_plan -> the same ModelPlan

Axis names are the mesh's, "row" and "col"; a layer whose plan has row_axis="col" is the
twin dataflow: it sees the mesh with rows and columns exchanged.
"""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec

from meshslice_jax import algorithms
from meshslice_jax.block import BlockSchedule
from meshslice_jax.hardware import HARDWARE
from meshslice_jax.mesh import MeshShape
from meshslice_jax.models import MODELS, ModelShape, fc_layers, model
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.prediction import FrozenMapping as FrozenMapping
from meshslice_jax.prediction import PassPrediction as PassPrediction
from meshslice_jax.prediction import Prediction as Prediction
from meshslice_jax.problem import GemmProblem, itemsize

#: Version of the file format. It rises when the meaning of a field changes.
VERSION = 1
#: The passes of a layer, as fields of `LayerPlan` and in the files.
PASSES = ("forward", "grad_lhs", "grad_rhs")
_PLAIN = BlockSchedule()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """How the FC layers of a model run on a mesh.

    Attributes:
      model: the model (a name or record).
      num_chips: all chips, data_parallel * rows * cols.
      mesh_shape: (rows, cols) of the mesh that one replica uses.
      layers: layer name -> LayerPlan, for every layer of `fc_layers(model, ...)`.
      data_parallel: replicas that share the batch.
      hardware: name of the profile that the prediction was made with.
      batch: sequences of a step, over all replicas; None is max(1, num_chips // 2), the
        paper's weak scaling.
      seq_len: tokens of a sequence.
      dtype: dtype of activations and weights.
      block_schedule: order and overlap of the products of a block. Anything but the plain
        order exists in the model and simulator only.
      predicted: what the profile predicts, or None.

    Raises:
      ValueError: sizes that do not fit together, layers that are not the model's, or a
        layer that cannot run as planned on this mesh (with the reason).
    """

    model: ModelShape
    num_chips: int
    mesh_shape: MeshShape
    layers: Mapping[str, LayerPlan]
    data_parallel: int = 1
    hardware: str = "tpu_v4"
    batch: int | None = None
    seq_len: int = 2048
    dtype: str = "bfloat16"
    block_schedule: BlockSchedule = _PLAIN
    predicted: Prediction | None = None

    def __post_init__(self):
        if self.batch is None and isinstance(self.num_chips, int):
            object.__setattr__(self, "batch", max(1, self.num_chips // 2))
        object.__setattr__(self, "model", model(self.model))
        object.__setattr__(self, "mesh_shape", MeshShape(*self.mesh_shape))
        object.__setattr__(self, "layers", FrozenMapping(self.layers))
        self._check_sizes()
        self._check_layers()

    @property
    def modelled_only(self) -> bool:
        """Whether it holds options that the runtime does not execute (yet)."""
        return not self.block_schedule.is_plain

    @property
    def tokens(self) -> int:
        """The tokens of one replica, m of every layer."""
        return self.batch * self.seq_len // self.data_parallel

    def problems(self) -> dict[str, GemmProblem]:
        """The products of one block in one replica, by layer."""
        return fc_layers(self.model, self.tokens, self.dtype)

    def _check_sizes(self) -> None:
        sizes = {
            "num_chips": self.num_chips,
            "mesh_shape.rows": self.mesh_shape.rows,
            "mesh_shape.cols": self.mesh_shape.cols,
            "data_parallel": self.data_parallel,
            "batch": self.batch,
            "seq_len": self.seq_len,
        }
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"ModelPlan: {name} must be a positive integer, got {value!r}")
        if self.data_parallel * self.mesh_shape.num_chips != self.num_chips:
            raise ValueError(
                f"ModelPlan: {self.data_parallel} replicas on {self.mesh_shape} meshes are "
                f"{self.data_parallel * self.mesh_shape.num_chips} chips, not num_chips = "
                f"{self.num_chips}"
            )
        if self.batch % self.data_parallel:
            raise ValueError(
                f"ModelPlan: batch {self.batch} cannot be shared by data_parallel = "
                f"{self.data_parallel} replicas"
            )
        try:
            itemsize(self.dtype)
        except TypeError:
            raise ValueError(f"ModelPlan: dtype {self.dtype!r} is not a dtype") from None

    def _check_layers(self) -> None:
        problems = self.problems()
        if set(self.layers) != set(problems):
            raise ValueError(
                f"ModelPlan: {self.model.name} has the layers {', '.join(problems)}, and the plan "
                f"has {', '.join(self.layers) or 'none'}"
            )
        for name, plan in self.layers.items():
            axes = {plan.forward.row_axis, plan.forward.col_axis}
            if axes != {"row", "col"}:
                raise ValueError(
                    f"ModelPlan: layer {name!r} has the axes {', '.join(sorted(axes))}; the mesh "
                    "of a model plan has 'row' and 'col'"
                )
            if plan.forward.batch_axes:
                raise ValueError(
                    f"ModelPlan: layer {name!r} has batch_axes {plan.forward.batch_axes}; a model "
                    "plan is of one replica, whoever runs it adds the mesh axis of the replicas"
                )
            try:
                algorithms.check_problem(
                    plan, problems[name], algorithms.view(plan.forward, self.mesh_shape)
                )
            except ValueError as error:
                raise ValueError(f"ModelPlan: layer {name!r}: {error}") from None


# --- JSON ---------------------------------------------------------------------------------


def _mirror(record: type, **nested: Any) -> type[msgspec.Struct]:
    """A msgspec struct with the fields and defaults of a dataclass, strict about both."""
    fields = []
    for field in dataclasses.fields(record):
        entry = (field.name, nested.get(field.name, field.type))
        has_default = field.default is not dataclasses.MISSING and field.name not in nested
        fields.append((*entry, field.default) if has_default else entry)
    return msgspec.defstruct(
        record.__name__, fields, kw_only=True, forbid_unknown_fields=True, frozen=True
    )


_Gemm = _mirror(GemmPlan)
_Model = _mirror(ModelShape)
_Block = _mirror(BlockSchedule)
_Pass = _mirror(PassPrediction)
# Entries of mappings are decoded one by one: only so does an error name the entry's key.
_Predicted = _mirror(Prediction, layers=dict[str, dict[str, msgspec.Raw]])


class _Layer(msgspec.Struct, forbid_unknown_fields=True):
    """A LayerPlan in a file: gradients that are absent are derived from `forward`."""

    forward: _Gemm
    grad_lhs: _Gemm | None = None
    grad_rhs: _Gemm | None = None


class _Version(msgspec.Struct):
    """The one field that is read first, whatever the others are."""

    version: int


class _Report(msgspec.Struct):
    """What tells the report of `meshslice tune --json` from other files."""

    plan: _Version
    meshes: msgspec.Raw


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A ModelPlan in a file; the defaults are those of `ModelPlan`."""

    version: int
    model: str | _Model
    num_chips: int
    mesh_shape: tuple[int, int]
    data_parallel: int = 1
    hardware: str = "tpu_v4"
    batch: int | None = None
    seq_len: int = 2048
    dtype: str = "bfloat16"
    layers: dict[str, msgspec.Raw]
    block_schedule: _Block = _Block()
    predicted: _Predicted | None = None


def plan_to_json(plan: ModelPlan) -> str:
    """The plan as indented JSON text; a model of `MODELS` is written by name."""
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    if MODELS.get(plan.model.name) == plan.model:
        fields["model"] = plan.model.name
    ordered = {"version": VERSION} | {name: fields[name] for name in _File.__struct_fields__[1:]}
    text = msgspec.json.encode(ordered, enc_hook=dict)
    return msgspec.json.format(text, indent=2).decode() + "\n"


def plan_from_json(text: str | bytes, name: str = "plan") -> ModelPlan:
    """Reads a plan's JSON text.

    Args:
      text: what `plan_to_json` wrote, or was written by hand.
      name: what to call it in messages.

    Raises:
      ValueError: it is not the JSON of a plan, a field is unknown, missing or of the wrong
        kind (with its path), it is of a newer version, or the plan cannot run on its own mesh.
    """
    try:
        version = _version(text)
        if not 1 <= version <= VERSION:
            raise ValueError(
                f"version {version} is not one that this package reads (1 to {VERSION}); "
                "a newer meshslice_jax wrote it"
                if version > VERSION
                else f"version {version} does not exist; the first is 1"
            )
        return _from_file(msgspec.json.decode(text, type=_File))
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None


def _version(text: str | bytes) -> int:
    """The version of a plan's file; what is no such file is told apart."""
    try:
        return msgspec.json.decode(text, type=_Version).version
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            msgspec.json.decode(text, type=_Report)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ValueError(
                f"{error}; expected a plan, which `meshslice tune --out` and ms.save_plan write"
            ) from None
        raise ValueError(
            "this is the report that `meshslice tune --json` writes; a plan is what "
            "`meshslice tune --out` writes (and what the report has under `plan`)"
        ) from None


def _from_file(found: _File) -> ModelPlan:
    fields = {name: getattr(found, name) for name in found.__struct_fields__}
    del fields["version"]
    if not isinstance(found.model, str):
        fields["model"] = _made(ModelShape, found.model, "$.model")
    elif found.model in MODELS:
        fields["model"] = MODELS[found.model]
    else:
        raise ValueError(f"unknown model {found.model!r} - at `$.model`; write its sizes instead")
    fields["layers"] = {name: _layer(name, layer) for name, layer in found.layers.items()}
    fields["block_schedule"] = _made(BlockSchedule, found.block_schedule, "$.block_schedule")
    if found.predicted is not None:
        fields["predicted"] = _prediction(found.predicted)
    return ModelPlan(**fields)


def _layer(name: str, raw: msgspec.Raw) -> LayerPlan:
    layer = _decode(raw, _Layer, f"$.layers.{name}")
    passes = {
        part: _made(GemmPlan, getattr(layer, part), f"$.layers.{name}.{part}")
        for part in PASSES
        if getattr(layer, part) is not None
    }
    for part, plan in passes.items():
        for field, fault in algorithms.field_faults(plan).items():
            raise ValueError(f"{fault} - at `$.layers.{name}.{part}.{field}`")
    try:
        return LayerPlan(**passes)
    except ValueError as error:
        raise ValueError(f"{error} - at `$.layers.{name}`") from None


def _prediction(found: Any) -> Prediction:
    fields = msgspec.structs.asdict(found)
    fields["layers"] = {
        name: {
            part: PassPrediction(
                **msgspec.structs.asdict(_decode(raw, _Pass, f"$.predicted.layers.{name}.{part}"))
            )
            for part, raw in passes.items()
        }
        for name, passes in found.layers.items()
    }
    return Prediction(**fields)


def _decode(raw: msgspec.Raw, kind: type, path: str) -> Any:
    """An entry of a mapping; what is wrong with it is told with its whole path."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        what, _, inner = str(error).partition(" - at `$")
        raise ValueError(f"{what} - at `{path}{inner.rstrip('`')}`") from None


def _made(record: type, found: msgspec.Struct, path: str) -> Any:
    """The record of a struct; what the record itself refuses is told with its path."""
    try:
        return record(**msgspec.structs.asdict(found))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{error} - at `{path}`") from None


def save_plan(plan: ModelPlan, path: str | os.PathLike) -> None:
    """Writes a plan to a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(plan_to_json(plan))


def load_plan(path: str | os.PathLike) -> ModelPlan:
    """Reads a plan from a JSON file.

    Raises:
      OSError: the file cannot be opened.
      ValueError: as for `plan_from_json`, with the file's name.

    Warns:
      UserWarning: `hardware` is no profile that ships: one of the user's own, which whatever
        prices the plan has to be given, or a slip.
    """
    with open(path, "rb") as file:
        plan = plan_from_json(file.read(), os.fspath(path))
    if plan.hardware not in HARDWARE:
        warnings.warn(
            f"{os.fspath(path)}: hardware {plan.hardware!r} is no profile that ships (they are "
            f"{', '.join(HARDWARE)}) - at `$.hardware`; if it is your own, give its JSON file as "
            "hardware where the plan is priced",
            stacklevel=2,
        )
    return plan
