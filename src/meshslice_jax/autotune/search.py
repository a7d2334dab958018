"""The search over meshes, with the arguments of `tune` resolved.

Every mesh (replicas x rows x cols) first gets a floor under its time: products alone, bytes
at the full link rate. Meshes are then searched in the order of their floors, until the
floors are above the best block found; the rest need no search. What cannot run, or does
not fit, is kept with its reason.
"""

import dataclasses
from collections.abc import Mapping

from meshslice_jax.autotune import (
    chain,
    memory,
    overlap,
    replicas,
    report,
    reprice,
    space,
    ways_out,
)
from meshslice_jax.autotune import layer as layers
from meshslice_jax.autotune.layer import Limit
from meshslice_jax.autotune.memory import MEMORY_KINDS
from meshslice_jax.autotune.product import Pricer, rounded
from meshslice_jax.autotune.report import MeshReport, TuneReport, counted
from meshslice_jax.hardware import HardwareSpec, hardware_spec
from meshslice_jax.mesh import MeshShape, factorisations
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.models import ModelShape, fc_layers
from meshslice_jax.models import model as model_shape
from meshslice_jax.problem import GemmProblem, itemsize

#: Tokens of a sequence where none are given and the model has no fewer positions: the paper's.
DEFAULT_SEQ_LEN = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One mesh to be searched: its block, what memory is left, and a floor under its time."""

    replicas: int
    shape: MeshShape
    block: chain.Block
    limit: Limit
    data_parallel_s: float
    floor_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """A mesh's best block."""

    job: Job
    solution: chain.Solution

    @property
    def total_s(self) -> float:
        return self.solution.total_s + self.job.data_parallel_s

    def rank(self) -> tuple:
        """Faster first; equals by fewer twins, fewer replicas, fewer rows."""
        twins = sum(option.way.twin for option in self.solution.options.values())
        return rounded(self.total_s), twins, self.job.replicas, self.job.shape.rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """The arguments of `tune`, checked and resolved; `run` searches."""

    model: ModelShape
    num_chips: int
    hardware: HardwareSpec
    batch: int
    seq_len: int
    dtype: str
    search: str
    memory: str
    memory_limit_bytes: int
    algorithm: str | None
    overrides: Mapping | None
    allow_modelled: bool
    meshes: tuple[tuple[int, MeshShape], ...]
    pricer: Pricer
    given: Mapping[str, object]

    @classmethod
    def of(
        cls,
        model,
        num_chips,
        *,
        hardware="tpu_v4",
        batch=None,
        seq_len=None,
        dtype="bfloat16",
        reduce_dtype="output",
        search="exact",
        data_parallel=1,
        memory_limit_bytes=None,
        memory="fc_block",
        algorithm=None,
        mesh_shape=None,
        overrides=None,
        allow_modelled=False,
    ) -> "Tuning":
        """Checks the arguments of `tune`, which documents them."""
        given = {name: value for name, value in locals().items() if name != "cls"}
        _positive("num_chips", num_chips)
        model = model_shape(model)
        seq_len = min(DEFAULT_SEQ_LEN, model.seq_len) if seq_len is None else seq_len
        batch = max(1, num_chips // 2) if batch is None else batch
        spec = hardware_spec(hardware)
        limit = spec.hbm_bytes if memory_limit_bytes is None else memory_limit_bytes
        for name, value in {
            "batch": batch,
            "seq_len": seq_len,
            "memory_limit_bytes": limit,
        }.items():
            _positive(name, value)
        model.check_seq_len(seq_len)
        if memory not in MEMORY_KINDS:
            raise ValueError(f"tune: memory={memory!r} is not one of {', '.join(MEMORY_KINDS)}")
        try:
            itemsize(dtype)
        except TypeError:
            raise ValueError(f"tune: dtype {dtype!r} is not a dtype") from None
        spec.flops_per_s(dtype)
        return cls(
            model=model,
            num_chips=num_chips,
            hardware=spec,
            batch=batch,
            seq_len=seq_len,
            dtype=dtype,
            search=search,
            memory=memory,
            memory_limit_bytes=limit,
            algorithm=algorithm,
            overrides=overrides,
            allow_modelled=allow_modelled,
            meshes=_meshes(num_chips, batch, data_parallel, mesh_shape),
            pricer=Pricer(spec, {"reduce_dtype": reduce_dtype}),
            given=given,
        )

    def changed(self, **arguments) -> "Tuning":
        """The same with other arguments.

        Raises:
          ValueError: together they cannot be right.
        """
        return Tuning.of(**(dict(self.given) | arguments))

    def run(self) -> TuneReport:
        """Searches the meshes in the order of their floors."""
        jobs, rejected = [], []
        for degree, shape in self.meshes:
            found = self.job(degree, shape)
            if isinstance(found, Job) and found.limit.over_bytes > 0:
                found = self._overfull(found)
            (jobs if isinstance(found, Job) else rejected).append(found)
        found, bounded = [], []
        for job in sorted(jobs, key=lambda job: job.floor_s):
            best_s = min((one.total_s for one in found), default=float("inf"))
            if job.floor_s > best_s:
                bounded.append(job)
                continue
            solution = chain.solve(job.block, job.shape, self.pricer, job.limit)
            if isinstance(solution, chain.Solution):
                found.append(_Found(job=job, solution=solution))
            else:
                rejected.append(self._misses(job, solution))
        if not found:
            raise ValueError(self._nothing_fits(rejected))
        found.sort(key=_Found.rank)
        return self._report(found, bounded, rejected)

    def fits(self) -> bool:
        """Whether there is a mesh on which everything runs within the limit."""
        for degree, shape in self.meshes:
            problems = self._problems(degree)
            if self._limit(problems, shape).over_bytes > 0:
                continue
            if isinstance(job := self.job(degree, shape), Job):
                solution = chain.solve(job.block, job.shape, self.pricer, job.limit)
                if isinstance(solution, chain.Solution):
                    return True
        return False

    def _problems(self, degree: int) -> dict[str, GemmProblem]:
        """The products of one of so many replicas."""
        return fc_layers(self.model, self.batch * self.seq_len // degree, self.dtype)

    def _limit(self, problems: dict[str, GemmProblem], shape: MeshShape) -> Limit:
        resident = memory.resident_bytes(self.memory, self.model, problems, shape.num_chips)
        return Limit(limit_bytes=self.memory_limit_bytes, resident_bytes=resident)

    def least_limit(self, job: Job, below: float) -> int | None:
        """The smallest limit with which a block runs on its mesh; None if it is not below."""
        least = 0
        for layer in job.block.problems:
            missed = self._missed(job, layer)
            if missed is None:
                return None
            least = max(least, self.memory_limit_bytes + missed[0])
            if least >= below:
                return None
        return least

    def job(self, degree: int, shape: MeshShape) -> Job | MeshReport:
        """A mesh ready to be searched, or why nothing runs there whatever the limit."""
        problems = self._problems(degree)
        spaces = space.layer_spaces(problems, self.search, self.algorithm, self.overrides)
        block = chain.Block(problems=problems, spaces=spaces, branches=self.model.branches)
        floor = chain.floor_s(block, shape, self.pricer)
        if isinstance(floor, str):
            why = layers.why_not(spaces[floor], problems[floor], shape, self.pricer)
            return _rejected(degree, shape, f"{floor}: {why}")
        reduce_s = replicas.all_reduce_s(problems, degree, shape.num_chips, self.hardware)
        return Job(
            replicas=degree,
            shape=shape,
            block=block,
            limit=self._limit(problems, shape),
            data_parallel_s=reduce_s,
            floor_s=floor + reduce_s,
        )

    def _overfull(self, job: Job) -> MeshReport:
        """The report of a mesh whose shards leave no room for any product."""
        return _rejected(
            job.replicas,
            job.shape,
            f"its shards alone ({self.memory}) take {job.limit.resident_bytes:,} bytes of a chip, "
            f"{job.limit.over_bytes:,} over the limit of {self.memory_limit_bytes:,}",
        )

    def _missed(self, job: Job, layer: str) -> tuple[int, str] | None:
        """By how many bytes a layer misses the limit at the least, and in which pass."""
        where = job.block.spaces[layer], job.block.problems[layer], job.shape, self.pricer
        return layers.leanest_bytes(*where, job.limit)

    def _misses(self, job: Job, layer: str) -> MeshReport:
        """The report of a mesh on which a layer does not run, or some not within the limit.

        Of those it names the one that misses the limit by most, so that so much more is enough.
        """
        if self._missed(job, layer) is None:
            where = job.block.spaces[layer], job.block.problems[layer], job.shape, self.pricer
            return _rejected(job.replicas, job.shape, f"{layer}: {layers.why_not(*where)}")
        misses = ((self._missed(job, one), one) for one in job.block.problems)
        over, name, layer = max((*missed, one) for missed, one in misses if missed is not None)
        return _rejected(
            job.replicas,
            job.shape,
            f"{layer} {name} ({self.memory}): its leanest plan is {over:,} bytes over the limit of "
            f"{self.memory_limit_bytes:,}",
        )

    def _report(self, found: list[_Found], bounded: list[Job], rejected) -> TuneReport:
        plans = [self._plan(one) for one in found]
        predictions = [one.predicted for one in plans]
        plan = self._overlapped(found[0], plans[0]) if self.allow_modelled else plans[0]
        modelled = plan.predicted.block_s * 1e3
        note = f"{modelled:.3f} ms with its block schedule, which only the model knows"
        entries = []
        for one, prediction in zip(found, predictions, strict=True):
            chosen = one is found[0]
            entries.append(
                MeshReport(
                    mesh_shape=one.job.shape,
                    data_parallel=one.job.replicas,
                    status="chosen" if chosen else "slower",
                    block_s=prediction.block_s,
                    memory_bytes=prediction.memory_bytes,
                    reason=(note if plan.modelled_only else "")
                    if chosen
                    else report.why_slower(prediction, predictions[0]),
                )
            )
        entries += [_bounded(job, found[0].total_s) for job in bounded]
        return TuneReport(
            plan=plan,
            search=self.search,
            memory_limit_bytes=self.memory_limit_bytes,
            meshes=tuple(entries + rejected),
        )

    def _plan(self, one: _Found) -> ModelPlan:
        plan = ModelPlan(
            model=self.model,
            num_chips=self.num_chips,
            mesh_shape=one.job.shape,
            layers={name: option.plan() for name, option in one.solution.options.items()},
            data_parallel=one.job.replicas,
            hardware=self.hardware.name,
            batch=self.batch,
            seq_len=self.seq_len,
            dtype=self.dtype,
        )
        priced = reprice.prediction_of(plan, self.hardware, self.memory)
        return dataclasses.replace(plan, predicted=priced)

    def _overlapped(self, one: _Found, plan: ModelPlan) -> ModelPlan:
        """The plan with the best block schedule that the simulator knows."""
        job = one.job
        best = overlap.best_overlap(
            job.block, dict(plan.layers), job.shape, self.hardware, job.limit
        )
        if best is None or best.schedule.is_plain:
            return plan
        layers_ = {
            name: report.predict_layer(
                job.block.problems[name], best.plans[name], job.shape, self.hardware
            )
            for name in best.plans
        }
        block_s = best.products_s + one.solution.relayout_s + job.data_parallel_s
        prediction = dataclasses.replace(
            plan.predicted,
            layers=layers_,
            fc_s=best.products_s,
            block_s=block_s,
            utilisation=plan.predicted.utilisation * plan.predicted.block_s / block_s,
            memory_bytes=best.memory_bytes,
        )
        return dataclasses.replace(
            plan, layers=best.plans, block_schedule=best.schedule, predicted=prediction
        )

    def _nothing_fits(self, rejected: list[MeshReport]) -> str:
        lines = [
            f"tune: no mesh of {counted(self.num_chips, 'chip')} runs {self.model.name} (batch "
            f"{self.batch}, seq_len {self.seq_len}, {self.dtype}):"
        ]
        alike: dict[str, list[str]] = {}
        for one in rejected:
            copies = f" x {one.data_parallel} replicas" if one.data_parallel > 1 else ""
            alike.setdefault(one.reason, []).append(f"{one.mesh_shape}{copies}")
        lines += [f"  {', '.join(meshes)}: {reason}" for reason, meshes in alike.items()]
        jobs = [job for mesh in self.meshes if isinstance(job := self.job(*mesh), Job)]
        found = ways_out.ways_out(self, jobs) or ["no change of one argument helps"]
        return "\n".join([*lines, f"  ways out: {'; or '.join(found)}"])


def _positive(name: str, value) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"tune: {name} must be a positive integer, got {value!r}")


def _meshes(num_chips, batch, data_parallel, mesh_shape) -> tuple[tuple[int, MeshShape], ...]:
    """All (replicas, mesh shape) to try."""
    if data_parallel == "auto":
        found = replicas.degrees(num_chips, batch)
    else:
        _positive("data_parallel", data_parallel)
        if num_chips % data_parallel or batch % data_parallel:
            raise ValueError(
                f"tune: data_parallel {data_parallel} must divide num_chips {num_chips} and batch "
                f"{batch}; {', '.join(map(str, replicas.degrees(num_chips, batch)))} do"
            )
        found = [data_parallel]
    meshes = tuple((d, shape) for d in found for shape in factorisations(num_chips // d))
    if mesh_shape is None:
        return meshes
    kept = tuple(one for one in meshes if one[1] == tuple(mesh_shape))
    if not kept:
        raise ValueError(
            f"tune: mesh_shape {tuple(mesh_shape)} with data_parallel {data_parallel} does not "
            f"make {num_chips} chips (and a whole batch per replica)"
        )
    return kept


def _rejected(degree: int, shape: MeshShape, reason: str) -> MeshReport:
    return MeshReport(
        mesh_shape=shape,
        data_parallel=degree,
        status="rejected",
        block_s=None,
        memory_bytes=None,
        reason=reason,
    )


def _bounded(job: Job, best_s: float) -> MeshReport:
    return MeshReport(
        mesh_shape=job.shape,
        data_parallel=job.replicas,
        status="bounded",
        block_s=job.floor_s,
        memory_bytes=None,
        reason=(
            f"at least {job.floor_s / best_s - 1:+.1%}: compute alone, or bytes at the full link "
            "rate, take longer than the chosen block"
        ),
    )
