"""`meshslice compile`: what the TPU compiler makes of each product, without a TPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from meshslice_jax import algorithms, models
from meshslice_jax.bench.candidates import sensible_dataflow
from meshslice_jax.cli import common, compile_report
from meshslice_jax.compiled import candidates, run
from meshslice_jax.compiled.compiler import Compiler, default_cache
from meshslice_jax.compiled.options import probe_options
from meshslice_jax.compiled.topology import Topology, parse_topology, require_libtpu
from meshslice_jax.hardware import hardware_spec
from meshslice_jax.mesh import MeshShape, parse_mesh_shape
from meshslice_jax.plan import GemmPlan, LayerPlan, as_layer_plan
from meshslice_jax.problem import GemmProblem

#: Options that choose what a plan has chosen.
CHOSEN_BY_PLAN = "mesh model batch seq_len dtype reduce_dtype names slices layouts".split()


def compile_(
    context: typer.Context,
    topology: Annotated[
        str, typer.Option(help="TPU topology, such as v4:4x8x8, v5e:16x16 or v6e:4x4.")
    ],
    mesh: Annotated[
        str | None, typer.Option(help="Mesh as ROWSxCOLS; its axes are dimensions of the torus.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model by name, or the path of a config.json.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan that `meshslice tune --out` wrote, as it is.")
    ] = None,
    names: Annotated[
        str,
        typer.Option("--algorithms", help="Algorithms and gspmd, or all."),
    ] = ",".join(candidates.COMPARED),
    layers: Annotated[str, typer.Option(help="Layers of the model, or all.")] = "all",
    passes: Annotated[str, typer.Option(help=f"Passes of {','.join(run.PASSES)}.")] = ",".join(
        run.PASSES
    ),
    slices: Annotated[str, typer.Option(help="MeshSlice's slice counts.")] = ",".join(
        map(str, candidates.SLICE_COUNTS)
    ),
    layouts: Annotated[
        str, typer.Option(help="How MeshSlice may store weights: natural, permuted, sliced.")
    ] = ",".join(candidates.LAYOUTS),
    options: Annotated[
        list[str] | None,
        typer.Option(
            help="Compiler options: tuned (asynchronous collectives), default (none), or "
            "KEY=VALUE; may be repeated. By default tuned and default are both tried."
        ),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Profile to replay on; by default the generation's.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a step; by default chips / 2.", min=1)
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 2048,
    dtype: Annotated[str, typer.Option(help="Dtype of activations and weights.")] = "bfloat16",
    reduce_dtype: Annotated[
        str, typer.Option(help="What reduce-scatters carry: output or float32.")
    ] = "output",
    block: Annotated[
        bool, typer.Option(help="Compile the whole block, forward and backward, as one program.")
    ] = False,
    sensitivity: Annotated[
        bool, typer.Option(help="Print totals under other assumptions about links.")
    ] = False,
    limit: Annotated[float, typer.Option(help="Seconds that one compilation may take.")] = 300.0,
    cache: Annotated[
        bool, typer.Option(help="Keep compiled schedules in the user's cache folder, and use them.")
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Write what was found as JSON.")] = None,
    hlo: Annotated[
        Path | None, typer.Option(help="Write the fastest schedules into this folder.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write their timelines for ui.perfetto.dev.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a PNG of them, with its data as CSV beside it.")
    ] = None,
) -> None:
    """Compile FC products for a TPU topology and project their time from the schedule.

    No TPU is needed, and none is measured: order and cycles are the compiler's, the links
    are a model. Compilation runs in child processes; libtpu must be installed.
    """
    with common.usage_errors():
        require_libtpu()
        common.check_outputs(json, hlo, trace, plot, draws=plot is not None)
        target = parse_topology(topology)
        study, prefix = _study(
            context, target, plan, mesh, model, layers, passes, names, slices, layouts, options,
            hardware, batch, seq_len, dtype, reduce_dtype,
        )  # fmt: skip
        if study.space.given and (refused := probe_options(target, study.space.given)):
            raise ValueError("; ".join(f"option {name}: {why}" for name, why in refused.items()))
        if block and set(study.passes) != set(run.PASSES):
            raise ValueError(f"--block needs all passes: {','.join(run.PASSES)}")
        with Compiler(target, limit, default_cache() if cache else None) as compiler:
            found = run.run(study, compiler, _progress(study))
            blocks = _blocks(found, compiler) if block else {}
    compile_report.print_findings(common.stdout(), found, prefix, blocks, sensitivity)
    if json is not None:
        json.write_text(compile_report.to_json(found, blocks))
    if hlo is not None:
        compile_report.write_hlo(found, blocks, hlo)
    if trace is not None:
        compile_report.write_trace(found, trace)
    if plot is not None:
        compile_report.write_plot(found, plot)
    if found.failed and not found.rows:
        raise typer.Exit(1)


def _study(
    context, target: Topology, plan, mesh, model, layers, passes, names, slices, layouts, options,
    hardware, batch, seq_len, dtype, reduce_dtype,
) -> tuple[run.Study, str]:  # fmt: skip
    """What the options ask for, and how it is called in the output."""
    spec = target.hardware if hardware is None else hardware_spec(hardware)
    sets, given = parse_options(options or list(candidates.OPTION_SETS))
    if plan is not None:
        common.refuse_choices(context, CHOSEN_BY_PLAN)
        model_plan = common.read_plan(plan)
        shape, problems = MeshShape(*model_plan.mesh_shape), model_plan.problems()
        plans, name = dict(model_plan.layers), f"{model_plan.model.name}, plan {plan.name}"
        tried = tuple(algorithms.ALGORITHMS)
    else:
        if model is None or mesh is None:
            raise ValueError("give --model NAME and --mesh ROWSxCOLS, or --plan FILE")
        shape = parse_mesh_shape(mesh)
        sequences = max(1, target.num_chips // 2) if batch is None else batch
        problems = models.model_layers(model, batch=sequences, seq_len=seq_len, dtype=dtype)
        plans = {name: _base(problem, reduce_dtype) for name, problem in problems.items()}
        name = f"{model}, {sequences} sequences of {seq_len}, {dtype}"
        every = (*algorithms.ALGORITHMS, "gspmd")
        tried = every if names == "all" else common.comma_list(names)
    wanted = tuple(problems) if layers == "all" else common.comma_list(layers)
    if unknown := [layer for layer in wanted if layer not in problems]:
        raise ValueError(f"there is no layer {', '.join(unknown)}; there are {', '.join(problems)}")
    study = run.Study(
        topology=target,
        layers={layer: problems[layer] for layer in wanted},
        plans=plans,
        space=candidates.Space(
            mesh_shape=shape,
            hardware=spec,
            algorithms=tried,
            slice_counts=common.positive_ints(slices, "--slices"),
            layouts=common.comma_list(layouts),
            option_sets=sets,
            given=given,
        ),
        passes=common.comma_list(passes),
        as_planned=plan is not None,
    )
    return study, name


def _base(problem: GemmProblem, reduce_dtype: str) -> LayerPlan:
    """Placements that all algorithms on two axes share: the largest matrix stays put."""
    dataflow = sensible_dataflow(problem, "meshslice")
    return as_layer_plan(GemmPlan(dataflow=dataflow, reduce_dtype=reduce_dtype))


def parse_options(texts: list[str]) -> tuple[tuple[str, ...], Mapping | None]:
    """Reads --options as names of option sets, or as options of the compiler.

    Raises:
      ValueError: both kinds at once, or neither.
    """
    pairs = [text.partition("=") for text in texts if "=" in text]
    sets = tuple(text for text in texts if "=" not in text)
    if pairs and sets:
        raise ValueError(
            f"--options mixes {', '.join(sets)} with KEY=VALUE; give either option sets or options"
        )
    given = {key: _value(value) for key, _, value in pairs}
    return sets or candidates.OPTION_SETS, given or None


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _progress(study: run.Study):
    """Prints each row to stderr as it is found."""
    products = [(layer, pass_) for layer in study.layers for pass_ in study.passes]
    total = sum(len(run.jobs(study, *product)) for product in products)
    state = iter(range(1, total + 1))

    def report(row):
        text = f"[{next(state)}/{total}] {compile_report.describe(row)}"
        common.say(common.stderr(), text)

    return report


def _blocks(found: run.Findings, compiler: Compiler) -> dict[str, run.CompiledBlock | str]:
    """The block as one program, for every rule whose choices are plans."""
    blocks = {}
    for rule, rows in found.choices().items():
        if rule in ("natural", "fixed") or any(r.candidate.algorithm == "gspmd" for r in rows):
            continue
        plans = run.plans_of(rows, list(found.study.layers))
        blocks[rule] = run.run_block(found.study, plans, compiler)
    return blocks
