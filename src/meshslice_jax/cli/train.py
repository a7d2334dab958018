"""`meshslice train`: a small GPT on a mesh, from text, with checkpoints."""

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import meshslice_jax
from meshslice_jax import distributed
from meshslice_jax.cli import common
from meshslice_jax.mesh import MeshShape, make_mesh, parse_mesh_shape
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.shared_plan import shared_plan

if TYPE_CHECKING:  # Flax, Optax and Orbax are imported by the command, not by the program
    from meshslice_jax import train as training

#: What a plan from a file decides.
CHOSEN_BY_PLAN = (
    "mesh data_parallel algorithm hidden heads layers batch seq_len dtype hardware".split()
)


def train(
    context: typer.Context,
    text: Annotated[
        Path | None, typer.Option(help="Text to learn, as bytes; by default Python's help topics.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the whole run.", min=1)] = 400,
    plan: Annotated[
        str, typer.Option(help="A plan that `meshslice tune --out` wrote, or auto.")
    ] = "auto",
    mesh: Annotated[str, typer.Option(help="ROWSxCOLS of one replica.")] = "2x4",
    data_parallel: Annotated[int, typer.Option(help="Replicas that share the batch.", min=1)] = 1,
    algorithm: Annotated[
        str, typer.Option(help="The algorithm of all FC layers, or any: the tuner's choice.")
    ] = "meshslice",
    hardware: Annotated[str, typer.Option(help="Profile by which plans are compared.")] = "tpu_v4",
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads.")] = 8,
    layers: Annotated[int, typer.Option(help="Blocks.", min=1)] = 4,
    batch: Annotated[int, typer.Option(help="Sequences of a step.", min=1)] = 16,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 128,
    dtype: Annotated[
        str, typer.Option(help="Of activations: float32 or bfloat16; weights are float32.")
    ] = "float32",
    learning_rate: Annotated[float, typer.Option(help="The highest, after warm-up.")] = 3e-3,
    warmup: Annotated[int, typer.Option(help="Steps of warm-up.", min=0)] = 50,
    remat: Annotated[
        bool, typer.Option("--remat", help="Compute blocks again in the backward pass.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of weights and data.", min=0)] = 0,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Where to save checkpoints and the log of losses.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between two.", min=1)] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")
    ] = False,
    log: Annotated[
        Path | None, typer.Option(help="JSON line of each step; default: in --checkpoint-dir.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the loss curve as a PNG.")] = None,
    profile_dir: Annotated[
        Path | None, typer.Option(help="Write a trace of three steps, for xprof.")
    ] = None,
    platform: Annotated[str, typer.Option(help="cpu (emulated devices), tpu or gpu.")] = "cpu",
    devices: Annotated[int | None, typer.Option(help="Devices to emulate.")] = None,
) -> None:
    """Train a small GPT whose FC layers run on a tuned 2D plan.

    Tokens are bytes: the model of a --plan is trained with a vocabulary of 256.
    Prints the loss beside the text's unigram entropy, both in nats a byte, and at the end
    the loss on text that was held out.
    """
    from meshslice_jax import train as training
    from meshslice_jax.cli import train_report as report

    with common.usage_errors():
        if resume and checkpoint_dir is None:
            raise ValueError("--resume needs the --checkpoint-dir of the run to go on with")
        common.check_outputs(log, plot, draws=plot is not None)
        tokens = training.load_text(text)
        given = _given_plan(context, plan)
        shape = given.mesh_shape if given else parse_mesh_shape(mesh)
        replicas = given.data_parallel if given else data_parallel
        settings = training.TrainSettings(
            steps=steps,
            learning_rate=learning_rate,
            warmup_steps=warmup,
            seed=seed,
            dtype=given.dtype if given else dtype,
            remat=remat,
        )
        found = common.find_devices(platform, MeshShape(replicas * shape.rows, shape.cols), devices)
        device_mesh = _mesh(shape, replicas, found)
        model_plan = given or shared_plan(
            training.training_plan(
                training.byte_gpt(hidden, heads, layers, seq_len),
                device_mesh,
                batch=batch,
                seq_len=seq_len,
                dtype=dtype,
                algorithm=None if algorithm == "any" else algorithm,
                hardware=hardware,
            )
        )
        trainer = training.make_trainer(model_plan, device_mesh, settings)
        data = training.Data(text=tokens, batch=model_plan.batch, seq_len=model_plan.seq_len)
        console, entropy = common.stdout(), training.unigram_entropy(tokens.training)
        checkpoints = _checkpoints(checkpoint_dir, _told(model_plan, settings, data), console)
        state = training.begin(trainer, checkpoints, resume)
        _compare(console, checkpoints, int(state["step"]))
    report.print_run(console, found, model_plan, settings, entropy)
    log = log or (checkpoint_dir and checkpoint_dir / "log.jsonl")
    with report.progress_of(steps, int(state["step"]), log) as recorder:
        state = training.train(
            trainer,
            data,
            state,
            on_step=recorder.add,
            checkpoints=checkpoints,
            checkpoint_every=checkpoint_every,
            profile_dir=profile_dir and str(profile_dir),
        )
    validation = training.evaluate(trainer, data, state)
    report.print_end(console, recorder.records, validation, entropy)
    if plot is not None and distributed.is_first():
        report.plot(recorder.records, log, entropy, plot)


def _given_plan(context: typer.Context, plan: str) -> ModelPlan | None:
    """The plan of a file, on all processes process 0's; None for auto."""
    if plan == "auto":
        return None
    common.refuse_choices(context, CHOSEN_BY_PLAN)
    distributed.initialize()
    found = shared_plan(common.read_plan(Path(plan)))
    if found.seq_len > found.model.seq_len:
        raise ValueError(
            f"the plan has seq_len = {found.seq_len}, and its model {found.model.name!r} has "
            f"positions for {found.model.seq_len}; tune with --seq-len {found.model.seq_len}"
        )
    # No FC layer depends on the vocabulary; tokens are bytes, whatever the model had.
    return dataclasses.replace(found, model=dataclasses.replace(found.model, vocab=256))


def _checkpoints(
    directory: Path | None, told: dict[str, Any], console: Console
) -> "training.Checkpoints | None":
    from meshslice_jax.train import Checkpoints

    if directory is None:
        return None
    return Checkpoints(directory, told, say=lambda line: common.say(console, line))


def _mesh(shape: MeshShape, data_parallel: int, devices: list):
    if data_parallel == 1:
        return make_mesh(shape, devices=devices)
    return make_mesh((data_parallel, *shape), ("data", "row", "col"), devices=devices)


def _told(plan: ModelPlan, settings: "training.TrainSettings", data: Any) -> dict[str, Any]:
    """What decides the loss curve; the plan and its mesh do not."""
    return {
        "model": dataclasses.asdict(plan.model),
        "settings": dataclasses.asdict(settings),
        "batch": data.batch,
        "seq_len": data.seq_len,
        "text_sha256": hashlib.sha256(data.text.training.tobytes()).hexdigest(),
        "meshslice_jax": meshslice_jax.__version__,
    }


def _compare(console: Console, checkpoints: "training.Checkpoints | None", step: int) -> None:
    """Says what a resumed run was told otherwise than the run that it goes on with."""
    if checkpoints is None or step == 0:
        return
    before, told = _flat(checkpoints.run_of(step)), _flat(checkpoints.run)
    changed = [
        f"{name} ({before[name]} -> {told[name]})"
        for name in told
        if before.get(name, told[name]) != told[name]
    ]
    if changed:
        common.say(
            console,
            f"told otherwise than before: {', '.join(changed)}; losses will not be those of "
            "one uninterrupted run",
            style="yellow",
        )


def _flat(told: dict[str, Any]) -> dict[str, Any]:
    return {name: told[name] for name in told if name != "settings"} | told["settings"]
