"""Compiling the products of a training step and replaying what the compiler made of them.

    Study -> candidates of each product -> compiled schedules -> Compiled rows -> Findings

A row is one compiled program: how long its schedule would take on the study's profile
(a projection, see `replay`), what is exposed, what is copied, what it holds in memory.
`Findings` keeps all rows; `best` picks the fastest of each product and algorithm, and
`totals` adds up what a training step would take under a rule for choosing.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshslice_jax import algorithms
from meshslice_jax.compiled import hlo, peak, program
from meshslice_jax.compiled.candidates import Candidate, Space, candidates, of_plan
from meshslice_jax.compiled.compiler import Compiler
from meshslice_jax.compiled.jobs import Answer, BlockJob, ProductJob
from meshslice_jax.compiled.layout import lay_out
from meshslice_jax.compiled.options import generation_of, options_of_plans
from meshslice_jax.compiled.replay import Links, Replay, replay, sensitivity
from meshslice_jax.compiled.topology import Topology
from meshslice_jax.plan import GemmPlan, LayerPlan, as_layer_plan
from meshslice_jax.problem import GemmProblem

#: Passes of a layer, as fields of LayerPlan, and what each differentiates.
PASSES = {"forward": None, "grad_lhs": "lhs", "grad_rhs": "rhs"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What is compiled.

    Attributes:
      topology: what to compile for.
      layers: name -> forward product.
      plans: name -> plan. Its dataflow and axes hold for every candidate; with
        `as_planned` the plan of each pass is the only one.
      space: what else is tried.
      passes: of PASSES.
      as_planned: compile the plans as they are.

    Raises:
      ValueError: a mesh that does not lie on the topology, unknown passes, layers
        without a plan, or 1D and 2D algorithms in one comparison.
    """

    topology: Topology
    layers: Mapping[str, GemmProblem]
    plans: Mapping[str, LayerPlan]
    space: Space
    passes: Sequence[str] = tuple(PASSES)
    as_planned: bool = False

    def __post_init__(self):
        lay_out(self.topology.dims, self.space.mesh_shape)
        generation_of(self.space.hardware)
        if unknown := [name for name in self.passes if name not in PASSES]:
            raise ValueError(f"unknown pass {', '.join(unknown)}; there are {', '.join(PASSES)}")
        if missing := [name for name in self.layers if name not in self.plans]:
            raise ValueError(f"no plan for layer {', '.join(missing)}")

    @property
    def links(self) -> Links:
        """The mesh and the rates under which schedules are replayed."""
        return Links(
            hardware=self.space.hardware,
            mesh_shape=self.space.mesh_shape,
            layout=lay_out(self.topology.dims, self.space.mesh_shape),
        )

    @property
    def clock_hz(self) -> float:
        """Cycles per second of the profile."""
        return generation_of(self.space.hardware).clock_hz(self.space.hardware)

    def ideal_s(self, flops: float, dtype: str) -> float:
        """Pure FLOPs on all chips."""
        chips = self.space.mesh_shape.num_chips
        return flops / chips / self.space.hardware.flops_per_s(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One compiled program and the replay of its schedule.

    Attributes:
      layer: name of the layer.
      pass_: "forward", "grad_lhs" or "grad_rhs".
      candidate: what was compiled.
      ideal_s: pure FLOPs.
      replay: the replayed schedule.
      variants: name of a changed assumption -> projected seconds of the same schedule.
      peak_bytes: of one chip, by the compiler.
      planned_bytes: the same, as `peak` expects it, or None.
      compile_s: seconds of compilation.
      hlo: the schedule.
    """

    layer: str
    pass_: str
    candidate: Candidate
    ideal_s: float
    replay: Replay
    variants: Mapping[str, float]
    peak_bytes: int
    planned_bytes: int | None
    compile_s: float
    hlo: str = dataclasses.field(repr=False)

    @property
    def layout(self) -> str:
        """How the weight is stored."""
        return self.candidate.plan.rhs_layout

    @property
    def projected_s(self) -> float:
        """Seconds of the replayed schedule."""
        return self.replay.projected_s

    @property
    def product(self) -> tuple[str, str]:
        """(layer, pass)."""
        return self.layer, self.pass_


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed:
    """A candidate that did not compile, and why."""

    layer: str
    pass_: str
    candidate: Candidate
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """All that was compiled in a study."""

    study: Study
    rows: tuple[Compiled, ...]
    failed: tuple[Failed, ...]

    def tried(self, product: tuple[str, str], algorithm: str) -> int:
        """Candidates that were compiled for a product and an algorithm."""
        of_rows = [row.product for row in self.rows if row.candidate.algorithm == algorithm]
        of_failed = [
            (one.layer, one.pass_) for one in self.failed if one.candidate.algorithm == algorithm
        ]
        return (of_rows + of_failed).count(product)

    def best(self) -> list[Compiled]:
        """The fastest row of each product and algorithm, in order."""
        found = {}
        for row in self.rows:
            key = (*row.product, row.candidate.algorithm)
            if key not in found or row.projected_s < found[key].projected_s:
                found[key] = row
        return list(found.values())

    def choices(self) -> dict[str, list[Compiled]]:
        """Rule for choosing -> one row of each product, where there is one for all.

        "meshslice" takes MeshSlice's fastest, where each layer's weight is stored in one way
        in all its passes; "natural" stores all of them naturally; "fixed" has one setting of
        MeshSlice for each dataflow; "tuned" takes the fastest of any algorithm. The others
        are the algorithms themselves.
        """
        ours = [row for row in self.rows if row.candidate.algorithm == "meshslice"]
        natural = [row for row in ours if row.layout == "natural"]
        found = {
            "meshslice": self._by_layer(ours),
            "natural": _fastest(natural),
            "fixed": _least(map(_fixed, _ways(ours))),
            "tuned": self._by_layer(self.rows),
        }
        names = dict.fromkeys(row.candidate.algorithm for row in self.rows)
        for name in names:
            if name != "meshslice":
                found[name] = _fastest([r for r in self.rows if r.candidate.algorithm == name])
        products = {(layer, name) for layer in self.study.layers for name in self.study.passes}
        return {rule: rows for rule, rows in found.items() if {r.product for r in rows} == products}

    def _by_layer(self, rows: Sequence[Compiled]) -> list[Compiled]:
        """The fastest rows of each layer that agree on how its weight is stored."""
        chosen = []
        for layer in self.study.layers:
            ways = _ways([row for row in rows if row.layer == layer])
            chosen += _least(map(_fastest, ways))
        return chosen


def _ways(rows: Sequence[Compiled]) -> list[list[Compiled]]:
    """Rows that can be passes of one layer: whose weight is stored, and cut, in the same way."""
    found = {}
    for row in rows:
        plan, cut = row.candidate.plan, ()
        if plan.rhs_layout != "natural":
            cut = plan.algorithm, plan.slice_count, plan.taper, plan.block_size
        found.setdefault((plan.rhs_layout, *cut), []).append(row)
    return list(found.values())


def _least(ways: Iterable[list[Compiled]]) -> list[Compiled]:
    """Of those that have most products the one with the least sum of times."""
    return min(ways, key=lambda way: (-len(way), sum(r.projected_s for r in way)), default=[])


def _fixed(rows: Sequence[Compiled]) -> list[Compiled]:
    """For each dataflow the rows of the one setting that is fastest over all its products."""
    chosen = []
    for dataflow in dict.fromkeys(row.candidate.plan.dataflow for row in rows):
        settings = {}
        for row in rows:
            if row.candidate.plan.dataflow is dataflow:
                settings.setdefault(row.candidate.setting, []).append(row)
        chosen += _least(settings.values())
    return chosen


def _fastest(rows: Sequence[Compiled]) -> list[Compiled]:
    found = {}
    for row in rows:
        if row.product not in found or row.projected_s < found[row.product].projected_s:
            found[row.product] = row
    return list(found.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledBlock:
    """A whole block, forward and backward, in one program.

    Attributes:
      replay: the replayed schedule.
      ideal_s: pure FLOPs of all its products.
      peak_bytes: of one chip, by the compiler.
      compile_s: seconds of compilation.
      hlo: the schedule.
    """

    replay: Replay
    ideal_s: float
    peak_bytes: int
    compile_s: float
    hlo: str = dataclasses.field(repr=False)


def jobs(study: Study, layer: str, pass_: str) -> list[tuple[Candidate, ProductJob]]:
    """The candidates of one product and what the compiler is asked for each."""
    plan, wrt = as_layer_plan(study.plans[layer]), PASSES[pass_]
    own: GemmPlan = getattr(plan, pass_)
    problem = algorithms.layer_problems(study.layers[layer], plan.forward)[pass_]
    space, forward = study.space, plan.forward.dataflow
    found = of_plan(space, own) if study.as_planned else candidates(space, problem, own, forward)
    return [
        (
            candidate,
            ProductJob(
                topology=str(study.topology),
                mesh_shape=tuple(study.space.mesh_shape),
                problem=problem,
                plan=candidate.plan,
                forward=forward,
                wrt=wrt,
                gspmd=candidate.algorithm == "gspmd",
                options=candidate.options,
            ),
        )
        for candidate in found
    ]


def run(
    study: Study, compiler: Compiler, report: Callable[[Compiled | Failed], None] | None = None
) -> Findings:
    """Compiles and replays every candidate of every product.

    Args:
      study: what to compile.
      compiler: of the study's topology.
      report: called with each row as it is found.
    """
    rows, failed = [], []
    for layer in study.layers:
        for pass_ in study.passes:
            for candidate, job in jobs(study, layer, pass_):
                answer = compiler.compile(job)
                if answer.error is None:
                    found = _compiled(study, layer, pass_, candidate, job, answer)
                    rows.append(found)
                else:
                    found = Failed(
                        layer=layer, pass_=pass_, candidate=candidate, reason=answer.error
                    )
                    failed.append(found)
                if report is not None:
                    report(found)
    return Findings(study=study, rows=tuple(rows), failed=tuple(failed))


def _compiled(study, layer, pass_, candidate, job: ProductJob, answer: Answer) -> Compiled:
    events = program.events(hlo.parse(answer.hlo))
    return Compiled(
        layer=layer,
        pass_=pass_,
        candidate=candidate,
        ideal_s=study.ideal_s(job.problem.flops, job.problem.lhs_dtype),
        replay=replay(events, study.links, study.clock_hz),
        variants={
            name: replay(events, links, study.clock_hz).projected_s
            for name, links in sensitivity(study.links).items()
        },
        peak_bytes=answer.peak_bytes,
        planned_bytes=peak.peak_bytes(job),
        compile_s=answer.compile_s,
        hlo=answer.hlo,
    )


def run_block(
    study: Study, plans: Mapping[str, LayerPlan], compiler: Compiler
) -> CompiledBlock | str:
    """Compiles all layers forward and backward as one program.

    Args:
      study: layers, topology and rates.
      plans: layer -> the plan of its three passes.
      compiler: of the study's topology.

    Returns:
      The replayed block, or why it did not compile.
    """
    every = [getattr(plan, pass_) for plan in plans.values() for pass_ in PASSES]
    options = study.space.given
    if options is None:
        options = options_of_plans(study.space.hardware, every)
    job = BlockJob(
        topology=str(study.topology),
        mesh_shape=tuple(study.space.mesh_shape),
        layers=dict(study.layers),
        plans=dict(plans),
        options=dict(options),
    )
    answer = compiler.compile(job)
    if answer.error is not None:
        return answer.error
    first = next(iter(study.layers.values()))
    flops = sum(len(PASSES) * problem.flops for problem in study.layers.values())
    return CompiledBlock(
        replay=replay(program.events(hlo.parse(answer.hlo)), study.links, study.clock_hz),
        ideal_s=study.ideal_s(flops, first.lhs_dtype),
        peak_bytes=answer.peak_bytes,
        compile_s=answer.compile_s,
        hlo=answer.hlo,
    )


def plans_of(rows: Sequence[Compiled], layers: Sequence[str]) -> dict[str, LayerPlan]:
    """The plans of a block from one row of each product; GSPMD rows have none.

    Raises:
      ValueError: a product without a row, or one that GSPMD partitions.
    """
    found = {row.product: row.candidate for row in rows}
    plans = {}
    for layer in layers:
        parts = {}
        for pass_ in PASSES:
            candidate = found.get((layer, pass_))
            if candidate is None or candidate.algorithm == "gspmd":
                raise ValueError(f"there is no plan for {pass_} of layer {layer}")
            parts[pass_] = candidate.plan
        plans[layer] = LayerPlan(**parts)
    return plans
