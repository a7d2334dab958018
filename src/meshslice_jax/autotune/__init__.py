"""The autotuner: a model and a number of chips in, a `ModelPlan` out. No device is touched.

    model -> products of a block -> for every mesh: floor -> best block -> the fastest mesh

Rooms, from the inside out: `product` finds the best algorithm and slice count of one
product, `layer` the ways in which a layer's three products can run together, `chain` the
best combination of layers on one mesh (with `relayout` between layers that disagree), and
`tune` here the mesh. `memory` says what a limit counts, `replicas` what data parallelism
costs, `space` what is open and what is pinned, `report` why the other meshes lost.

Meshes are taken in the order of a floor under their time (products alone, bytes at full
link rate); those whose floor is above the best block so far need no search. Nothing is
random and nothing is measured, so every process of a job finds the same plan.
(MeshSlice, ISCA 2025, section 3.3.)
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Literal

from meshslice_jax.autotune import chain, memory, replicas, report, space
from meshslice_jax.autotune import layer as layers
from meshslice_jax.autotune.layer import Limit
from meshslice_jax.autotune.memory import MEMORY_KINDS
from meshslice_jax.autotune.product import Pricer
from meshslice_jax.autotune.report import MeshReport as MeshReport
from meshslice_jax.autotune.report import TuneReport as TuneReport
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.hardware import hardware as hardware_spec
from meshslice_jax.mesh import MeshShape, factorisations
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.models import ModelShape, fc_layers
from meshslice_jax.models import model as model_shape
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.problem import itemsize


def tune(
    model: str | os.PathLike | ModelShape,
    num_chips: int,
    *,
    hardware: str | os.PathLike | HardwareSpec = "tpu_v4",
    batch: int | None = None,
    seq_len: int = 2048,
    dtype: str = "bfloat16",
    reduce_dtype: Literal["float32", "output"] = "output",
    search: Literal["exact", "paper"] = "exact",
    data_parallel: int | Literal["auto"] = 1,
    memory_limit_bytes: int | None = None,
    memory: Literal["fc_block", "training"] = "fc_block",
    algorithm: str | None = None,
    mesh_shape: tuple[int, int] | None = None,
    overrides: Mapping[str, LayerPlan | GemmPlan | Mapping[str, object]] | None = None,
    allow_modelled: bool = False,
) -> ModelPlan:
    """The fastest plan of a model's FC layers, forward and backward, on some chips.

    Args:
      model: a name in `MODELS`, a path to a config.json, or a ModelShape.
      num_chips: all chips, over all replicas.
      hardware: a profile's name, a path to its JSON, or a HardwareSpec.
      batch: sequences of a step over all replicas; None is max(1, num_chips // 2), the
        paper's weak scaling.
      seq_len: tokens of a sequence.
      dtype: dtype of activations and weights.
      reduce_dtype: what reduce-scatters carry; see GemmPlan.
      search: "exact", or "paper" for the paper's two phases.
      data_parallel: replicas that share the batch, or "auto" to tune their number.
      memory_limit_bytes: the most that one chip may hold; None is the profile's HBM.
      memory: what the limit counts, "fc_block" or "training"; see `autotune.memory`.
      algorithm: the one algorithm to use in all layers.
      mesh_shape: (rows, cols) of one replica, instead of tuning it.
      overrides: per layer a LayerPlan, a GemmPlan or a mapping of GemmPlan fields to keep.
      allow_modelled: whether the block schedule may use what only the model and the
        simulator know yet; such a plan has `modelled_only`.

    Raises:
      ValueError: an argument that cannot be right, or no mesh on which anything runs and
        fits; the message goes through every mesh.
    """
    arguments = dict(locals())
    return tune_report(**arguments).plan


def tune_report(model: str | os.PathLike | ModelShape, num_chips: int, **arguments) -> TuneReport:
    """`tune`, with every mesh that was considered and why it lost.

    Args:
      model: as for `tune`.
      num_chips: as for `tune`.
      **arguments: the keyword arguments of `tune`.

    Raises:
      ValueError: as for `tune`.
      TypeError: an argument that `tune` does not have.
    """
    return _Tuning.of(model, num_chips, **arguments).run()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
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

    job: _Job
    solution: chain.Solution

    @property
    def total_s(self) -> float:
        return self.solution.total_s + self.job.data_parallel_s

    def rank(self) -> tuple:
        """Faster first; equals by fewer twins, fewer replicas, fewer rows."""
        twins = sum(option.way.twin for option in self.solution.options.values())
        return self.total_s, twins, self.job.replicas, self.job.shape.rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tuning:
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

    @classmethod
    def of(
        cls,
        model,
        num_chips,
        *,
        hardware="tpu_v4",
        batch=None,
        seq_len=2048,
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
    ) -> "_Tuning":
        """Checks the arguments of `tune`, which documents them."""
        _positive("num_chips", num_chips)
        batch = max(1, num_chips // 2) if batch is None else batch
        spec = hardware_spec(hardware)
        limit = spec.hbm_bytes if memory_limit_bytes is None else memory_limit_bytes
        for name, value in {
            "batch": batch,
            "seq_len": seq_len,
            "memory_limit_bytes": limit,
        }.items():
            _positive(name, value)
        if memory not in MEMORY_KINDS:
            raise ValueError(f"tune: memory={memory!r} is not one of {', '.join(MEMORY_KINDS)}")
        try:
            itemsize(dtype)
        except TypeError:
            raise ValueError(f"tune: dtype {dtype!r} is not a dtype") from None
        spec.flops_per_s(dtype)
        return cls(
            model=model_shape(model),
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
        )

    def run(self) -> TuneReport:
        """Searches the meshes in the order of their floors."""
        jobs, rejected = [], []
        for degree, shape in self.meshes:
            found = self._job(degree, shape)
            (jobs if isinstance(found, _Job) else rejected).append(found)
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

    def _job(self, degree: int, shape: MeshShape) -> _Job | MeshReport:
        tokens = self.batch * self.seq_len // degree
        problems = fc_layers(self.model, tokens, self.dtype)
        spaces = space.layer_spaces(problems, self.search, self.algorithm, self.overrides)
        block = chain.Block(problems=problems, spaces=spaces, branches=self.model.branches)
        floor = chain.floor_s(block, shape, self.pricer)
        if isinstance(floor, str):
            why = layers.why_not(spaces[floor], problems[floor], shape, self.pricer)
            return _rejected(degree, shape, f"{floor}: {why}")
        resident = memory.resident_bytes(self.memory, self.model, problems, shape.num_chips)
        if resident > self.memory_limit_bytes:
            return _rejected(
                degree,
                shape,
                f"its shards alone ({self.memory}) take {resident:,} bytes of a chip, "
                f"{resident - self.memory_limit_bytes:,} over the limit of "
                f"{self.memory_limit_bytes:,}",
            )
        reduce_s = replicas.all_reduce_s(problems, degree, shape.num_chips, self.hardware)
        return _Job(
            replicas=degree,
            shape=shape,
            block=block,
            limit=Limit(limit_bytes=self.memory_limit_bytes, resident_bytes=resident),
            data_parallel_s=reduce_s,
            floor_s=floor + reduce_s,
        )

    def _misses(self, job: _Job, layer: str) -> MeshReport:
        """The report of a mesh on which a layer runs, but not within the memory limit."""
        over, name = layers.leanest_bytes(
            job.block.spaces[layer], job.block.problems[layer], job.shape, self.pricer, job.limit
        )
        return _rejected(
            job.replicas,
            job.shape,
            f"{layer} {name} ({self.memory}): its leanest plan is {over:,} bytes over the limit of "
            f"{self.memory_limit_bytes:,}",
        )

    def _report(self, found: list[_Found], bounded: list[_Job], rejected) -> TuneReport:
        predictions = [self._predict(one) for one in found]
        entries = []
        for one, prediction in zip(found, predictions, strict=True):
            chosen = one is found[0]
            entries.append(
                MeshReport(
                    mesh_shape=one.job.shape,
                    data_parallel=one.job.replicas,
                    status="chosen" if chosen else "slower",
                    block_s=one.total_s,
                    memory_bytes=prediction.memory_bytes,
                    reason="" if chosen else report.why_slower(prediction, predictions[0]),
                )
            )
        entries += [_bounded(job, found[0].total_s) for job in bounded]
        return TuneReport(
            plan=self._plan(found[0], predictions[0]),
            search=self.search,
            memory_limit_bytes=self.memory_limit_bytes,
            meshes=tuple(entries + rejected),
        )

    def _predict(self, one: _Found):
        return report.predict(
            one.job.block,
            one.solution,
            data_parallel_s=one.job.data_parallel_s,
            memory=self.memory,
            memory_bytes=self._memory_bytes(one),
            hardware=self.hardware,
        )

    def _memory_bytes(self, one: _Found) -> int:
        chips = one.job.shape.num_chips
        most = max(
            memory.extra_bytes(name, one.job.block.problems[layer], product.schedule, chips)
            for layer, option in one.solution.options.items()
            for name, product in zip(layers.PASSES, option.products, strict=True)
        )
        return one.job.limit.resident_bytes + most

    def _plan(self, one: _Found, prediction) -> ModelPlan:
        return ModelPlan(
            model=self.model,
            num_chips=self.num_chips,
            mesh_shape=one.job.shape,
            layers={name: option.plan() for name, option in one.solution.options.items()},
            data_parallel=one.job.replicas,
            hardware=self.hardware.name,
            batch=self.batch,
            seq_len=self.seq_len,
            dtype=self.dtype,
            predicted=prediction,
        )

    def _nothing_fits(self, rejected: list[MeshReport]) -> str:
        lines = [
            f"tune: no mesh of {self.num_chips} chips runs {self.model.name} (batch {self.batch}, "
            f"seq_len {self.seq_len}, {self.dtype}):"
        ]
        for one in rejected:
            copies = f" x {one.data_parallel} replicas" if one.data_parallel > 1 else ""
            lines.append(f"  {one.mesh_shape}{copies}: {one.reason}")
        lines.append(
            "  ways out: a number of chips whose factors divide the extents (such as a power of "
            "two), a larger memory limit, more chips, or fewer pins"
        )
        return "\n".join(lines)


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


def _bounded(job: _Job, best_s: float) -> MeshReport:
    return MeshReport(
        mesh_shape=job.shape,
        data_parallel=job.replicas,
        status="bounded",
        block_s=job.floor_s,
        memory_bytes=None,
        reason=(
            f"at least {job.floor_s / best_s - 1:+.1%}: products and bytes at full link rate "
            "alone take longer than the chosen block"
        ),
    )
