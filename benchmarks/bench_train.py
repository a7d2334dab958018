"""How long is a training step of a GPT on a plan, beside the same placements under GSPMD?

    python benchmarks/bench_train.py --mesh 4x4 --hidden 768 --layers 2 --seq-len 1024 --batch 8

Both programs are the same model with the same placements of all weights and activations;
one multiplies with `ms.dot_general`, the other with `lax.dot_general` and leaves the rest to
XLA. Their losses are compared first. Steps take turns, in the other order every other
time. Memory is what the compiler says of the whole program, over all emulated devices
where they share one.
"""

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import typer

from common import run
from meshslice_jax.cli import common as cli
from meshslice_jax.mesh import make_mesh, parse_mesh_shape


def bench_train(
    mesh: Annotated[str, typer.Option(help="ROWSxCOLS.")] = "4x4",
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 768,
    heads: Annotated[int, typer.Option(help="Heads.")] = 12,
    layers: Annotated[int, typer.Option(help="Blocks.")] = 2,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 8,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    algorithm: Annotated[str, typer.Option(help="Of all FC layers.")] = "meshslice",
    slices: Annotated[int | None, typer.Option(help="Of all products; default: tuned.")] = None,
    remat: Annotated[bool, typer.Option("--remat", help="Compute blocks again.")] = False,
    repeats: Annotated[int, typer.Option(help="Timed steps of each.", min=1)] = 5,
    output: Annotated[Path | None, typer.Option("--json", help="Write the row as JSON.")] = None,
    platform: Annotated[str, typer.Option(help="cpu (emulated), tpu or gpu.")] = "cpu",
) -> None:
    """Time one training step on a plan and under GSPMD, interleaved."""
    from meshslice_jax import train as training

    shape = parse_mesh_shape(mesh)
    devices = cli.find_devices(platform, shape, None)
    device_mesh = make_mesh(shape, devices=devices)
    plan = training.training_plan(
        training.byte_gpt(hidden, heads, layers, seq_len),
        device_mesh,
        batch=batch,
        seq_len=seq_len,
        dtype=dtype,
        algorithm=algorithm,
    )
    if slices is not None:
        plan = with_slices(plan, slices)
    settings = training.TrainSettings(dtype=dtype, remat=remat)
    programs = {
        name: Program(training.make_trainer(plan, device_mesh, settings, **arguments), plan)
        for name, arguments in {"plan": {}, "gspmd": {"product": gspmd}}.items()
    }
    losses = {name: program.step() for name, program in programs.items()}
    if abs(losses["plan"] - losses["gspmd"]) > 1e-3:
        raise SystemExit(f"the losses differ: {losses}")
    times = interleaved(programs, repeats)
    row = {
        "mesh": mesh,
        "hidden": hidden,
        "layers": layers,
        "batch": batch,
        "seq_len": seq_len,
        "dtype": dtype,
        "remat": remat,
        "plan": {name: describe(layer) for name, layer in plan.layers.items()},
        "wall": summary(times, 0),
        "processor": summary(times, 1),
        "peak_bytes": {name: program.peak_bytes for name, program in programs.items()},
        "repeats": repeats,
    }
    cli.say(cli.stdout(), cli.header(devices))
    cli.say(cli.stdout(), cli.emulation_banner(devices) or "")
    print(json.dumps(row, indent=1))
    if output is not None:
        output.write_text(json.dumps(row, indent=1) + "\n")


def with_slices(plan, count: int):
    """The plan with `count` slices in every product."""
    layers = {
        name: dataclasses.replace(
            layer,
            **{
                part.name: dataclasses.replace(getattr(layer, part.name), slice_count=count)
                for part in dataclasses.fields(layer)
            },
        )
        for name, layer in plan.layers.items()
    }
    return dataclasses.replace(plan, layers=layers, predicted=None)


def describe(layer) -> list[str]:
    """Algorithm, dataflow and slices of the three passes."""
    passes = [getattr(layer, part.name) for part in dataclasses.fields(layer)]
    return [f"{one.algorithm} {one.dataflow.value} S={one.slice_count}" for one in passes]


def gspmd(plan, *, mesh):
    """`ms.dot_general`'s placements, and XLA's partitioner for the product and its gradients."""
    import jax

    from meshslice_jax.gemm import placements

    def place(x, spec):
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))

    def product(x, kernel, dimension_numbers, **arguments):
        lhs, rhs, out = placements(plan)
        flat = place(x.reshape(-1, x.shape[-1]), lhs)
        numbers = (((1,), (0,)), ((), ()))
        found = jax.lax.dot_general(flat, place(kernel, rhs), numbers, **arguments)
        return place(found, out).reshape(*x.shape[:-1], -1)

    return product


class Program:
    """A compiled training step and its state."""

    def __init__(self, trainer, plan):
        from meshslice_jax.train import text

        tokens = text.load_text().training
        pieces = text.sequences(tokens, plan.batch, plan.seq_len, (0, 0))
        self.pieces = text.on_mesh(pieces, trainer.data)
        self.state = trainer.init()
        self.compiled = trainer.step.lower(self.state, self.pieces).compile()
        memory = self.compiled.memory_analysis()
        self.peak_bytes = (
            memory.temp_size_in_bytes
            + memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )

    def step(self) -> float:
        """One step; waits for all of it."""
        import jax

        self.state, loss = self.compiled(self.state, self.pieces)
        jax.block_until_ready(self.state)
        return float(loss)


def interleaved(programs: dict[str, Program], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of each program's steps, which take turns: wall and processor time."""
    times = {name: [] for name in programs}
    for repeat in range(repeats):
        order = list(programs)[:: -1 if repeat % 2 else 1]
        for name in order:
            wall, processor = time.perf_counter(), time.process_time()
            programs[name].step()
            spent = time.perf_counter() - wall, time.process_time() - processor
            times[name].append(tuple(1e3 * one for one in spent))
    return times


def summary(times: dict[str, list[tuple[float, float]]], clock: int) -> dict[str, object]:
    """Medians, and the plan's time over GSPMD's pair by pair: median, least and most.

    Processor time is all threads' together. It tells more than wall time on a machine that
    other work keeps busy.
    """
    own = {name: [one[clock] for one in found] for name, found in times.items()}
    found = sorted(a / b for a, b in zip(own["plan"], own["gspmd"], strict=True))
    return {
        "ms": {name: statistics.median(one) for name, one in own.items()},
        "all_ms": own,
        "ratio_to_gspmd": statistics.median(found),
        "ratio_low": found[0],
        "ratio_high": found[-1],
    }


if __name__ == "__main__":
    run(bench_train)
