"""What a case is tried with: plans, sensible choices where none are given, baselines."""

import dataclasses

import msgspec

from meshslice_jax import algorithms, cost
from meshslice_jax.algorithms.base import divisibility_faults, streamed_extent
from meshslice_jax.bench.cases import Options, Pass, Row
from meshslice_jax.dataflow import TABLE, Dataflow
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import NATURAL, GemmProblem
from meshslice_jax.schedule import Schedule

#: The slice count that is tried first where none is asked for.
DEFAULT_SLICES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute a pass: a plan, or a baseline.

    Attributes:
      row: what is known before it runs.
      forward: the forward plan; of a baseline, the one whose placements it shares.
      plan: the plan of the pass; None for a baseline.
      base: mesh view and forward dataflow of its GSPMD baseline; None for the dense product.
      local: extents m, n, k of a chip's local products.
    """

    row: Row
    forward: GemmPlan
    plan: GemmPlan | None = None
    base: tuple[str, Dataflow] | None = None
    local: tuple[int, int, int] | None = None


def sensible_dataflow(problem: GemmProblem, algorithm: str) -> Dataflow:
    """The forward dataflow of `algorithm` that keeps the largest matrix in place.

    On a tie lhs stays rather than out, out rather than rhs. (MeshSlice, ISCA 2025,
    section 3.2.1, phase 1 of the autotuner, and its prototype for ties.)
    """
    order = [Dataflow.LS, Dataflow.OS, Dataflow.RS]
    legal = algorithms.ALGORITHMS[algorithm].forward_dataflows
    return max(
        (dataflow for dataflow in order if dataflow in legal),
        key=lambda dataflow: problem.bytes(TABLE[dataflow].stationary),
    )


def sensible_split(problem: GemmProblem) -> str:
    """1D tensor parallelism's split: by column where a layer widens, else by row.

    So qkv and the first MLP layer gather their input, the others scatter their output.
    (Korthikanti et al. 2022.)
    """
    return "column" if problem.n > problem.k else "row"


def sensible_slices(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> int:
    """The largest legal count up to 4 for MeshSlice; the natural steps of the others."""
    if "block_size" not in algorithms.algorithm_of(plan).options:
        return 1
    counts = range(DEFAULT_SLICES, 0, -1)
    trials = (dataclasses.replace(plan, slice_count=count) for count in counts)
    legal = (trial for trial in trials if algorithms.fits(problem, trial, shape))
    return next((trial.slice_count for trial in legal), 1)


def forward_plans(options: Options, problem: GemmProblem) -> list[GemmPlan]:
    """The forward plans of a layer, slices aside."""
    found = []
    for name in options.names:
        fields = {"split": sensible_split(problem), "block_size": options.block_size}
        read = {f: fields[f] for f in fields if f in algorithms.ALGORITHMS[name].options}
        for dataflow in options.dataflows or (sensible_dataflow(problem, name),):
            found.append(GemmPlan(algorithm=name, dataflow=dataflow, **read))
    return found


def candidates(options: Options, case: Pass) -> list[Candidate]:
    """Baselines first, then every plan of the case; those that can't run are skipped rows."""
    if options.plans is None:
        forwards = forward_plans(options, case.forward)
        plans = [
            (forward, _sliced(case, forward, slices, options.mesh_shape))
            for forward in forwards
            for slices in options.slices or (None,)
        ]
        on_mesh = options.dataflows or (sensible_dataflow(case.forward, "meshslice"),)
        forwards = [GemmPlan(algorithm="collective", dataflow=d) for d in on_mesh] + forwards
    else:
        layer = options.plans[case.layer]
        forwards, plans = [layer.forward], [(layer.forward, case.plan(layer))]
    bases = {}
    for forward in forwards:
        candidate = _gspmd(case, forward, options.mesh_shape)
        if forward.dataflow in algorithms.algorithm_of(forward).forward_dataflows:
            bases.setdefault(candidate.base, candidate)
    planned = [_candidate(options, case, forward, plan) for forward, plan in plans]
    return [_dense(options, case), *bases.values(), *planned]


def _sliced(case: Pass, forward: GemmPlan, slices: int | None, shape: MeshShape) -> GemmPlan:
    """The plan of a pass with the slice count that was asked for, or a sensible one."""
    plan = case.plan(forward)
    count = sensible_slices(case.problem(forward), plan, shape) if slices is None else slices
    return dataclasses.replace(plan, slice_count=count)


def _row(case: Pass, problem: GemmProblem, mesh, algorithm: str, **fields) -> Row:
    return Row(
        layer=case.layer,
        pass_=case.name,
        m=problem.m,
        n=problem.n,
        k=problem.k,
        dtype=problem.lhs_dtype,
        mesh=str(mesh),
        algorithm=algorithm,
        **fields,
    )


def _skip(row: Row, reasons: list[str]) -> Row:
    return msgspec.structs.replace(row, status="skipped", reason="; ".join(reasons))


def _projected(schedule: Schedule, problem: GemmProblem, hardware: HardwareSpec | None) -> dict:
    """The modelled fields of a row."""
    if hardware is None:
        return {}
    total_s = cost.seconds(schedule, problem, hardware).total_s
    return {"projected_ms": total_s * 1e3, "projected_hardware": hardware.name}


def _dense(options: Options, case: Pass) -> Candidate:
    plan = GemmPlan(algorithm="collective")
    problem, alone = case.problem(plan), MeshShape(1, 1)
    schedule = algorithms.schedule(problem, case.plan(plan), alone)
    row = _row(
        case,
        problem,
        alone,
        "dense",
        bytes_row=0,
        bytes_col=0,
        peak_bytes=sum(problem.bytes(role) for role in NATURAL),
        **_projected(schedule, problem, options.hardware),
    )
    reasons = [options.dense_reason] if options.dense_reason else []
    return Candidate(
        row=_skip(row, reasons) if reasons else row,
        forward=plan,
        local=(problem.m, problem.n, problem.k),
    )


def _base(forward: GemmPlan, shape: MeshShape) -> tuple[str, Dataflow]:
    """The mesh as a forward plan's placements see it, and its dataflow."""
    seen = algorithms.algorithm_of(forward).view(forward, algorithms.view(forward, shape))
    return str(seen), forward.dataflow


def _gspmd(case: Pass, forward: GemmPlan, shape: MeshShape) -> Candidate:
    base, own = _base(forward, shape), algorithms.view(forward, shape)
    seen = algorithms.algorithm_of(forward).view(forward, own)
    plan, problem = case.plan(forward), case.problem(forward)
    row = _row(case, problem, shape if seen == own else seen, "gspmd", dataflow=plan.dataflow.value)
    faults = divisibility_faults(problem, plan, seen, algorithms.axis_names(plan))
    return Candidate(row=_skip(row, faults) if faults else row, forward=forward, base=base)


def _candidate(options: Options, case: Pass, forward: GemmPlan, plan: GemmPlan) -> Candidate:
    shape, problem = options.mesh_shape, case.problem(forward)
    own = algorithms.view(plan, shape)
    row = _row(
        case,
        problem,
        shape,
        plan.algorithm,
        dataflow=plan.dataflow.value,
        slice_count=plan.slice_count,
    )
    if faults := _faults(forward, plan, problem, own):
        return Candidate(row=_skip(row, faults), forward=forward)
    schedule = algorithms.schedule(problem, plan, own)
    products = [step.product for step, _ in schedule.steps if step.product]
    twin = plan.row_axis == "col"  # its row is the mesh's col
    row = msgspec.structs.replace(
        row,
        block_size=_block_size(problem, plan, own),
        bytes_row=round(schedule.bytes_along("col" if twin else "row")),
        bytes_col=round(schedule.bytes_along("row" if twin else "col")),
        peak_bytes=schedule.peak_bytes,
        **_projected(schedule, problem, options.hardware),
    )
    return Candidate(
        row=row,
        forward=forward,
        plan=plan,
        base=_base(forward, shape),
        local=(products[0].m, products[0].n, products[0].k),
    )


def _faults(forward: GemmPlan, plan: GemmPlan, problem, shape: MeshShape) -> list[str]:
    legal = algorithms.algorithm_of(forward).forward_dataflows
    if forward.dataflow not in legal:
        names = ", ".join(dataflow.value for dataflow in legal)
        return [f"no forward dataflow {forward.dataflow.value} in {plan.algorithm}; it has {names}"]
    return algorithms.find_faults(problem, plan, shape)


def _block_size(problem: GemmProblem, plan: GemmPlan, shape: MeshShape) -> int | None:
    if "block_size" not in algorithms.algorithm_of(plan).options:
        return None
    return plan.block_size or streamed_extent(problem, plan, shape) // plan.slice_count
