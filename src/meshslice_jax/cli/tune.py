"""`meshslice tune`: the fastest plan of a model on some chips, and why the others lost."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from meshslice_jax.autotune import TuneReport, tune_report
from meshslice_jax.autotune.finalists import rank
from meshslice_jax.cli import common, plan_report
from meshslice_jax.compiled.compiler import Compiler, default_cache
from meshslice_jax.compiled.topology import parse_topology
from meshslice_jax.hardware import hardware_spec
from meshslice_jax.mesh import parse_mesh_shape
from meshslice_jax.model_plan import ModelPlan, plan_to_json, save_plan
from meshslice_jax.plan import GemmPlan

_UNITS = {"": 1, "GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}


def tune(
    chips: Annotated[int, typer.Option(help="All chips, over all replicas.")],
    model: Annotated[
        str | None, typer.Option(help="A model by name, or the path of a config.json.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A Hugging Face config.json, instead of --model.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="Hardware profile: a name, or a path to its JSON.")
    ] = "tpu_v4",
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a step, all replicas; by default chips / 2.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence; by default 2048, or the model's own if fewer."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of activations and weights.")] = "bfloat16",
    reduce_dtype: Annotated[
        str,
        typer.Option(
            help="What reduce-scatters carry between chips: output (the output's dtype, as a TPU "
            "does it) or float32 (twice the bytes for bfloat16)."
        ),
    ] = "output",
    search: Annotated[
        str, typer.Option(help="exact, or paper for the paper's two phases.")
    ] = "exact",
    data_parallel: Annotated[
        str, typer.Option(help="Replicas that share the batch, or auto to tune their number.")
    ] = "1",
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Bytes that a chip may hold, or such as 16GiB; by default its HBM."),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="What the limit counts: fc_block or training.")
    ] = "fc_block",
    algorithm: Annotated[
        str | None, typer.Option(help="The one algorithm to use in all layers.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Mesh of one replica as ROWSxCOLS, instead of tuning it.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            help="LAYER:FIELD=VALUE,... keeps fields of a layer's plan, such as "
            "qkv:dataflow=ls,slice_count=4; may be repeated."
        ),
    ] = None,
    allow_modelled: Annotated[
        bool, typer.Option(help="Let the block schedule use what only the model knows yet.")
    ] = False,
    finalists: Annotated[
        int | None,
        typer.Option(
            help="Compile this many of the best meshes for --topology; rank by that.", min=1
        ),
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="TPU topology of one replica, such as v4:4x8x8.")
    ] = None,
    slices: Annotated[
        str, typer.Option(help="Slice counts that are compiled for MeshSlice.")
    ] = "6,8",
    limit: Annotated[float, typer.Option(help="Seconds that one compilation may take.")] = 300.0,
    out: Annotated[Path | None, typer.Option(help="Write the plan as JSON.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the plan and every mesh considered as JSON.")
    ] = None,
) -> None:
    """Find the fastest plan of a model's FC layers, forward and backward.

    No device is touched. Every time is modelled on the profile that is printed; with
    --finalists the best meshes are compiled for a TPU topology (libtpu must be installed, no
    TPU is needed), and the plan is the one whose schedules project to the least time.
    """
    with common.usage_errors():
        common.check_outputs(out, json)
        if (finalists is None) != (topology is None):
            raise ValueError("--finalists N and --topology NAME go together")
        arguments = {
            "hardware": hardware,
            "batch": batch,
            "seq_len": seq_len,
            "dtype": dtype,
            "reduce_dtype": reduce_dtype,
            "search": search,
            "data_parallel": _degree(data_parallel),
            "memory_limit_bytes": None if memory_limit is None else parse_bytes(memory_limit),
            "memory": memory,
            "algorithm": algorithm,
            "mesh_shape": None if mesh is None else parse_mesh_shape(mesh),
            "overrides": parse_overrides(override or []),
            "allow_modelled": allow_modelled,
        }
        source = _source(model, config)
        found = tune_report(source, chips, **arguments)
    console = common.stdout()
    plan_report.print_tuned(console, found, hardware_spec(hardware))
    plan = found.plan
    if finalists is not None:
        with common.usage_errors():
            counts = common.positive_ints(slices, "--slices")
            plan = _compiled(source, chips, topology, finalists, counts, limit, arguments)
    if out is not None:
        save_plan(plan, out)
        common.say(common.stdout(), f"\nplan written to {out}")
    if json is not None:
        json.write_text(report_to_json(dataclasses.replace(found, plan=plan)))


def _compiled(source, chips, topology, count, slices, limit, arguments) -> ModelPlan:
    """The best of the finalists, printed with the others."""
    target = parse_topology(topology)
    with Compiler(target, limit, default_cache()) as compiler:
        ranked = rank(
            source,
            chips,
            topology=target,
            count=count,
            compiler=compiler,
            slice_counts=slices,
            progress=lambda text: common.say(common.stderr(), text),
            **arguments,
        )
    plan_report.print_finalists(common.stdout(), ranked, str(target))
    return ranked[0].plan


def _source(model: str | None, config: Path | None) -> str | Path:
    if (model is None) == (config is None):
        raise ValueError("give either --model NAME or --config config.json")
    return model if config is None else config


def _degree(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise ValueError(f"--data-parallel {text!r} is neither a number of replicas nor auto")
    return int(text)


def parse_bytes(text: str) -> int:
    """Reads "17179869184", "17,179,869,184" or "16GiB" as a number of bytes.

    Raises:
      ValueError: anything else.
    """
    digits = text.rstrip("".join(_UNITS))
    unit = text[len(digits) :]
    digits = re.sub(r",(?=\d{3}(\D|,|$))", "", digits)
    if not digits.strip().isdecimal() or unit not in _UNITS:
        names = ", ".join(name for name in _UNITS if name)
        raise ValueError(
            f"memory limit {text!r} is not a whole number of bytes, or of one of {names}"
        )
    return int(digits) * _UNITS[unit]


def parse_overrides(texts: list[str]) -> dict[str, dict[str, object]]:
    """Reads ["qkv:dataflow=ls,slice_count=4"] as {"qkv": {"dataflow": "ls", "slice_count": 4}}.

    Raises:
      ValueError: another form, or a count that is no integer.
    """
    found: dict[str, dict[str, object]] = {}
    for text in texts:
        layer, _, rest = text.partition(":")
        for part in rest.split(","):
            field, equals, value = part.partition("=")
            if not (layer and field and equals and value):
                raise ValueError(f"--override {text!r} is not of the form LAYER:FIELD=VALUE,...")
            found.setdefault(layer, {})[field] = _value(text, field, value)
    return found


def _value(text: str, field: str, value: str) -> object:
    kinds = {one.name: one.type for one in dataclasses.fields(GemmPlan)}
    if kinds.get(field) not in (int, int | None):
        return value
    if value == "none" and kinds[field] == int | None:
        return None
    if not value.isdecimal():
        raise ValueError(f"--override {text!r}: {field} must be a whole number, got {value!r}")
    return int(value)


def report_to_json(found: TuneReport) -> str:
    """The plan and every mesh that was considered, as JSON text."""
    meshes = [
        dataclasses.asdict(one) | {"mesh_shape": list(one.mesh_shape)} for one in found.meshes
    ]
    fields = {
        "search": found.search,
        "memory_limit_bytes": found.memory_limit_bytes,
        "plan": json.loads(plan_to_json(found.plan)),
        "meshes": meshes,
    }
    return json.dumps(fields, indent=1) + "\n"
