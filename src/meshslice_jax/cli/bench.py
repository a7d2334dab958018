"""`meshslice bench`: measured products, each answer checked before it is timed."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from meshslice_jax import algorithms, compat, distributed, models
from meshslice_jax import bench as benchmark
from meshslice_jax.cli import common, plan_report, report
from meshslice_jax.cli.wire import bench_wire
from meshslice_jax.dataflow import Dataflow
from meshslice_jax.hardware import HardwareSpec, hardware_spec
from meshslice_jax.mesh import make_mesh, parse_mesh_shape
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.plan_simulation import plan_hardware
from meshslice_jax.problem import GemmProblem
from meshslice_jax.shared_plan import shared_plan

DTYPES = ("float32", "bfloat16", "float16", "float64", "int8")


#: Options that choose what a plan has chosen.
CHOSEN_BY_PLAN = tuple(
    "mesh model mkn batch seq_len names dataflows slices block_size dtype".split()
)


def bench(
    context: typer.Context,
    mesh: Annotated[str, typer.Option(help="Mesh as ROWSxCOLS.")] = "4x4",
    devices: Annotated[
        int | None, typer.Option(help="CPU devices to emulate; by default what the mesh needs.")
    ] = None,
    platform: Annotated[
        str, typer.Option(help="cpu (emulated devices), or the real devices of tpu or gpu.")
    ] = "cpu",
    model: Annotated[
        str | None, typer.Option(help="The FC layers of a model: a name or a config.json.")
    ] = None,
    mkn: Annotated[
        list[str] | None, typer.Option(help="M,K,N of a product A[m,k] B[k,n]; may be repeated.")
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers of the model, or all.")] = "all",
    batch: Annotated[int, typer.Option(help="Sequences of the model's input.", min=1)] = 1,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens a sequence; by default the model's own.", min=1)
    ] = None,
    names: Annotated[str, typer.Option("--algorithms", help="Algorithms, or all.")] = "all",
    dataflows: Annotated[
        str, typer.Option(help="Forward dataflows of os,ls,rs; auto keeps the largest matrix.")
    ] = "auto",
    slices: Annotated[
        str, typer.Option(help="Slice counts such as 1,4; auto is 4 or less for MeshSlice, else 1.")
    ] = "auto",
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Block of MeshSlice's slices; by default the largest (--wire: 8).", min=1
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan that `meshslice tune --out` wrote, run as it is."),
    ] = None,
    scale: Annotated[int, typer.Option(help="With --plan: divide its tokens by this.", min=1)] = 1,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Profile on which times are projected (modelled); by default tpu_v4 or the plan's."
        ),
    ] = None,
    passes: Annotated[str, typer.Option(help="Passes of fwd,dlhs,drhs.")] = "fwd,dlhs,drhs",
    repeats: Annotated[int, typer.Option(help="Rounds of timing.")] = 7,
    wire: Annotated[
        str | None,
        typer.Option(
            help="Measure over real links between processes (root): auto, Mbit/s such as 430, "
            "or times compute such as 1.5x; a list. --passes may be fwd,dlhs,drhs,step."
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write rows as a JSON list (.jsonl: one a line).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a PNG, with its data as CSV beside it.")
    ] = None,
) -> None:
    """Time algorithms on a mesh, beside GSPMD and a dense product on one device.

    Every answer is compared with NumPy's first; a wrong one ends with exit code 1.
    Candidates of a pass take turns; compilation and warm-up are apart.
    """
    if wire is not None:
        bench_wire(context, wire, json, plot)
        return
    with common.usage_errors():
        common.check_outputs(json, plot, draws=plot is not None)
        if plan is None:
            if scale != 1:
                raise ValueError("--scale divides the tokens of a --plan; use --batch or --seq-len")
            model_plan, notes = None, []
            options = benchmark.Options(
                layers=find_layers(model, mkn or [], layers, batch, seq_len, dtype),
                mesh_shape=parse_mesh_shape(mesh),
                names=tuple(algorithms.ALGORITHMS) if names == "all" else common.comma_list(names),
                dataflows=None if dataflows == "auto" else _dataflows(dataflows),
                slices=None if slices == "auto" else common.positive_ints(slices, "--slices"),
                block_size=block_size,
                passes=common.comma_list(passes),
                repeats=repeats,
                hardware=_projection(hardware_spec(hardware or "tpu_v4"), dtype, hardware),
            )
        else:
            common.refuse_choices(context, CHOSEN_BY_PLAN)
            distributed.initialize()
            model_plan = shared_plan(common.read_plan(plan))
            dtype, spec = model_plan.dtype, plan_hardware(model_plan, hardware)
            options = benchmark.plan_options(
                model_plan,
                scale=scale,
                layers=None if layers == "all" else common.comma_list(layers),
                passes=common.comma_list(passes),
                repeats=repeats,
                hardware=_projection(spec, dtype, hardware),
            )
            notes = _plan_notes(model_plan, scale) + plan_report.stale_notes(model_plan, spec)
        if dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        found = common.find_devices(platform, options.mesh_shape, devices)
        if model_plan is not None:
            options = benchmark.check_memory(options, model_plan, found)
        if compat.num_processes() > 1:
            reason = "it runs on one device, which is not every process's"
            options = dataclasses.replace(options, dense_reason=reason)
        device_mesh = make_mesh(options.mesh_shape, devices=found)
    if report.print_bench(options, found, _measure(options, device_mesh), json, plot, notes):
        raise typer.Exit(1)


def _projection(spec: HardwareSpec, dtype: str, asked: str | None) -> HardwareSpec | None:
    """The profile if it can price `dtype`; None where it cannot and nobody asked for it."""
    try:
        spec.flops_per_s(dtype)
    except ValueError:
        if asked is not None:
            raise
        return None
    return spec


def _plan_notes(plan: ModelPlan, scale: int) -> list[str]:
    notes = [f"plan: {plan_report.plan_line(plan)}; products are timed one by one"]
    if scale > 1:
        notes.append(
            f"SCALED: {plan.tokens // scale} tokens instead of {plan.tokens} (m / {scale}); "
            "weights, mesh, dataflows and slice counts are the plan's"
        )
    if plan.data_parallel > 1:
        notes.append(f"one of {plan.data_parallel} replicas runs; their all-reduce does not")
    if plan.modelled_only:
        notes.append(f"not run, the model knows it only: {plan.block_schedule}")
    return notes


def find_layers(
    model: str | None,
    mkn: list[str],
    layers: str,
    batch: int,
    seq_len: int | None,
    dtype: str,
) -> dict[str, GemmProblem]:
    """The forward products that the options name.

    Raises:
      ValueError: neither or both of model and mkn, or something unknown in them.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if (model is None) == (not mkn):
        raise ValueError("give either --model NAME or --mkn M,K,N")
    if mkn:
        return {text: _product(text, dtype) for text in mkn}
    found = models.model_layers(model, batch=batch, seq_len=seq_len, dtype=dtype)
    wanted = tuple(found) if layers == "all" else common.comma_list(layers)
    if unknown := [name for name in wanted if name not in found]:
        raise ValueError(f"{model} has no layer {', '.join(unknown)}; it has {', '.join(found)}")
    return {
        name: benchmark.product(found[name].m, found[name].n, found[name].k, dtype)
        for name in wanted
    }


def _product(text: str, dtype: str) -> GemmProblem:
    extents = common.positive_ints(text, "--mkn")
    if len(extents) != 3:
        raise ValueError(f"--mkn {text!r} is not three extents M,K,N")
    m, k, n = extents
    return benchmark.product(m, n, k, dtype)


def _dataflows(text: str) -> tuple[Dataflow, ...]:
    names = common.comma_list(text)
    if unknown := [name for name in names if name not in list(Dataflow)]:
        legal = ", ".join(Dataflow)
        raise ValueError(f"unknown dataflow {', '.join(unknown)}; there are {legal}")
    return tuple(Dataflow(name) for name in names)


def _measure(options: benchmark.Options, mesh: jax.sharding.Mesh):
    """`bench.run` with its progress on stderr."""
    steps = sum(len(benchmark.candidates(options, case)) + 1 for case in benchmark.cases(options))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn())
    quiet = not distributed.is_first()
    with Progress(*columns, console=common.stderr(), transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=steps)
        with contextlib.closing(
            benchmark.run(
                options, mesh, lambda text: progress.update(task, advance=1, description=text)
            )
        ) as results:
            yield from results
