"""A tuned plan, and the meshes that lost, in words and tables."""

from rich.console import Console

from meshslice_jax import algorithms
from meshslice_jax.algorithms import layer_problems
from meshslice_jax.autotune import MeshReport, TuneReport
from meshslice_jax.autotune.finalists import Finalist
from meshslice_jax.autotune.report import counted
from meshslice_jax.autotune.reprice import stale
from meshslice_jax.cli import common
from meshslice_jax.cli.tables import megabytes, milliseconds, print_table
from meshslice_jax.compiled.candidates import form_of
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem

#: Columns of the table of passes.
COLUMNS = (
    "layer",
    "pass",
    "m n k",
    "local m n k",
    "flow",
    "algorithm",
    "S",
    "compute ms",
    "comm row ms",
    "comm col ms",
    "exposed ms",
    "total ms",
    "row MB",
    "col MB",
    "peak MB",
)
#: Columns that a narrow terminal does without, the first to go first.
EXPENDABLE = ("local m n k", "row MB", "col MB", "comm row ms", "comm col ms", "m n k", "peak MB")
#: Meshes that are printed of those that lost, and of those that were rejected; the JSON has all.
SHOWN_MESHES = 10


def print_tuned(console: Console, found: TuneReport, spec: HardwareSpec) -> None:
    """Prints a plan, what is predicted for it, and why the other meshes lost.

    Args:
      console: where to.
      found: what the tuner found.
      spec: the profile that it was tuned for.
    """
    common.say(console, common.profile_line(spec))
    common.say(
        console,
        f"{plan_line(found.plan)}, search {found.search}; between chips partial sums travel in "
        f"{_carried(found.plan)}",
    )
    for note in found.notes:
        common.say(console, f"note: {note}")
    print_plan(console, found.plan)
    limit = found.memory_limit_bytes
    held = found.plan.predicted.memory_bytes
    common.say(
        console,
        f"memory of a chip ({found.plan.predicted.memory}): {held / 1e9:.3f} GB of at most "
        f"{limit / 1e9:.3f} GB ({held / limit:.1%})",
    )
    _print_meshes(console, "runners-up", found.runners_up)
    _print_meshes(console, "rejected", found.rejected)


def print_finalists(console: Console, ranked: list[Finalist], topology: str) -> None:
    """Prints the meshes whose products were compiled, the best first, and its plan.

    Args:
      console: where to.
      ranked: what `finalists.rank` found.
      topology: what was compiled for.
    """
    console.print()
    common.say(
        console,
        f"compiled for {topology}: projected ms are the compiler's schedules replayed on the "
        "profile's links, nothing was measured",
    )
    rows = [
        [
            str(one.plan.mesh_shape),
            milliseconds(one.modelled_s),
            milliseconds(one.projected_s),
            str(one.candidates),
        ]
        for one in ranked
    ]
    print_table(console, ("mesh", "modelled ms", "projected ms", "programs"), rows)
    console.print()
    best = ranked[0].plan
    products = [
        [layer, part, flow_of(own), own.algorithm, str(own.slice_count), form_of(own)]
        for layer in best.layers
        for part, own in vars(best.layers[layer]).items()
    ]
    columns = ("layer", "pass", "flow", "algorithm", "S", "form")
    print_table(console, columns, products, title=f"the plan on {best.mesh_shape}")


def plan_line(plan: ModelPlan) -> str:
    """What a plan is for, in one line."""
    replicas = f" x {plan.data_parallel} replicas" if plan.data_parallel > 1 else ""
    chips = counted(plan.num_chips, "chip")
    return (
        f"{plan.model.name} on {chips}: mesh {plan.mesh_shape}{replicas}, batch "
        f"{plan.batch} x {plan.seq_len} tokens, {plan.dtype}"
    )


def _carried(plan: ModelPlan) -> str:
    """What the reduce-scatters of a plan carry, with the field that says so."""
    found = {own.reduce_dtype for layer in plan.layers.values() for own in vars(layer).values()}
    words = {"output": plan.dtype}
    return " and ".join(f"{words.get(one, one)} (reduce_dtype {one})" for one in sorted(found))


def stale_notes(plan: ModelPlan, spec: HardwareSpec) -> list[str]:
    """A note where the numbers that a plan carries are not the model's, or nothing.

    Args:
      plan: the plan, from a file.
      spec: the profile that it is used with.
    """
    found = stale(plan, spec)
    if not found:
        return []
    return [
        f"note: the plan's own prediction is not what the model gives for it on {plan.hardware} "
        f"({counted(len(found), 'number')}: {found[0]}); another version wrote it, or it was edited"
    ]


def print_plan(console: Console, plan: ModelPlan) -> None:
    """Prints a row for each layer and pass of a plan with a prediction, and their sums."""
    predicted = plan.predicted
    common.say(
        console,
        "m n k and flow are the pass's own; row and col are the mesh's axes; a twin has them "
        "exchanged; MB are what one chip sends and holds, by the schedule",
    )
    console.print()
    rows = [
        _cells(plan, layer, part, problem)
        for layer, forward in plan.problems().items()
        for part, problem in layer_problems(forward, plan.layers[layer].forward).items()
    ]
    print_table(console, COLUMNS, rows, expendable=EXPENDABLE)
    console.print()
    parts = {
        "FC layers": predicted.fc_s,
        "relayouts between layers": predicted.relayout_s,
        "gradients' all-reduce over replicas": predicted.data_parallel_s,
    }
    shown = ", ".join(f"{name} {milliseconds(value)} ms" for name, value in parts.items() if value)
    common.say(
        console,
        f"one block, forward and backward: {milliseconds(predicted.block_s)} ms ({shown}); "
        f"utilisation {predicted.utilisation:.1%}; the model has "
        f"{counted(plan.model.layers, 'such block')}",
    )
    if plan.modelled_only:
        common.say(
            console, f"MODEL-ONLY: {plan.block_schedule}; no runtime executes this order yet"
        )


def flow_of(plan: GemmPlan) -> str:
    """The dataflow of a plan, and whether it is the twin."""
    return plan.dataflow.value + (" twin" if plan.row_axis == "col" else "")


def _cells(plan: ModelPlan, layer: str, part: str, problem: GemmProblem) -> list[str]:
    own, predicted = getattr(plan.layers[layer], part), plan.predicted.layers[layer][part]
    schedule = algorithms.schedule(problem, own, algorithms.view(own, plan.mesh_shape))
    local = next(step.product for step, _ in schedule.steps if step.product)
    comm = [predicted.comm_row_s, predicted.comm_col_s]
    sent = [predicted.bytes_row, predicted.bytes_col]
    if own.row_axis == "col":
        comm, sent = comm[::-1], sent[::-1]
    return [
        layer,
        part,
        f"{problem.m} {problem.n} {problem.k}",
        f"{local.m} {local.n} {local.k}",
        flow_of(own),
        own.algorithm,
        str(own.slice_count),
        milliseconds(predicted.math_s),
        *map(milliseconds, comm),
        milliseconds(predicted.exposed_s),
        milliseconds(predicted.total_s),
        *map(megabytes, sent),
        megabytes(predicted.peak_bytes),
    ]


def _print_meshes(console: Console, title: str, meshes: tuple[MeshReport, ...]) -> None:
    if not meshes:
        return
    console.print()
    common.say(console, f"{title}:")
    for one in meshes[:SHOWN_MESHES]:
        replicas = f" x {one.data_parallel}" if one.data_parallel > 1 else ""
        bound = "at least " if one.status == "bounded" else ""
        taken = f"{bound}{milliseconds(one.block_s)} ms, " if one.block_s else ""
        common.say(console, f"  {one.mesh_shape}{replicas}: {taken}{one.reason}")
    if len(meshes) > SHOWN_MESHES:
        common.say(console, f"  and {len(meshes) - SHOWN_MESHES} more; --json FILE has them all")
