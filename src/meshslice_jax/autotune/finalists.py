"""The tuner's best meshes, ranked by what the TPU compiler makes of their products.

    tune -> the N best meshes that lie on a topology -> every product compiled in every form
         -> the fastest rows of each layer -> the mesh with the least sum

The closed form hides what its schedule hides; the compiler hides what it can. So the search
stays with the closed form, which prices thousands of plans in a second, and the choice among
the last few, and of the forms that only the compiler tells apart, is left to compiled
schedules. Dataflows, axes and meshes are the tuner's, and so is a 1D algorithm; the 2D algorithms,
slices, tapers, layouts and forms of rings and reduce-scatters are the compiler's choice, but for a
pinned algorithm and for layers with overrides, which are compiled as they are. Its times are
projections, see `compiled.replay`; relayouts and the all-reduce of replicas keep their modelled
times.
"""

import dataclasses
from collections.abc import Callable, Sequence

from meshslice_jax import algorithms
from meshslice_jax.autotune import tune, tune_report
from meshslice_jax.autotune.reprice import prediction_of
from meshslice_jax.compiled import run
from meshslice_jax.compiled.candidates import SLICE_COUNTS, Space
from meshslice_jax.compiled.compiler import Compiler
from meshslice_jax.compiled.layout import lay_out
from meshslice_jax.compiled.topology import Topology
from meshslice_jax.hardware import hardware_spec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.plan import GemmPlan

#: What is compiled for each product; GSPMD's partitioner is no plan.
COMPILED = ("meshslice", "wang", "collective")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finalist:
    """A mesh whose products were compiled.

    Attributes:
      plan: the tuner's mesh and dataflows, with the compiler's choice of the rest; its
        prediction is the closed form's for that choice.
      modelled_s: what the closed form predicts for the tuner's own choice, per block.
      projected_s: the sum of the compiled products' projections, plus modelled relayouts and
        all-reduces.
      candidates: how many programs were compiled.
    """

    plan: ModelPlan
    modelled_s: float
    projected_s: float
    candidates: int


def rank(
    model,
    num_chips: int,
    *,
    topology: Topology,
    count: int,
    compiler: Compiler,
    slice_counts: Sequence[int] = SLICE_COUNTS,
    progress: Callable[[str], None] = lambda text: None,
    **arguments,
) -> list[Finalist]:
    """The `count` best meshes of `tune`, fastest by compiled schedules first.

    Args:
      model: as for `tune`.
      num_chips: as for `tune`.
      topology: what to compile for; the chips of one replica.
      count: meshes to compile.
      compiler: of the topology.
      slice_counts: what is tried for MeshSlice.
      progress: called with a line for each program.
      **arguments: the keyword arguments of `tune`.

    Raises:
      ValueError: as for `tune`; a topology of another size, or on which none of the tuner's
        meshes lies; a mesh of which a product did not compile in any form.
    """
    if count < 1:
        raise ValueError(f"tune: finalists must be at least 1, got {count}")
    found = tune_report(model, num_chips, **arguments)
    spec = hardware_spec(arguments.get("hardware", "tpu_v4"))
    shapes = _on(topology, found, count)
    finalists = []
    for shape, replicas in shapes:
        pinned = arguments | {"mesh_shape": shape, "data_parallel": replicas}
        plan = found.plan
        if (plan.mesh_shape, plan.data_parallel) != (shape, replicas):
            plan = tune(model, num_chips, **pinned)
        space = Space(
            mesh_shape=shape,
            hardware=spec,
            slice_counts=tuple(slice_counts),
            option_sets=("tuned",),
        )
        finalists.append(_compiled(plan, space, topology, compiler, progress, arguments))
    fitting = [f for f in finalists if f.plan.predicted.memory_bytes <= found.memory_limit_bytes]
    if not fitting:
        raise ValueError(
            f"tune: what compiles fastest holds more than {found.memory_limit_bytes:,} bytes on "
            "every finalist's mesh; give fewer slices, or a larger memory limit"
        )
    return sorted(fitting, key=lambda one: one.projected_s)


def _on(topology: Topology, found, count: int) -> list[tuple[MeshShape, int]]:
    """The best meshes that lie on the topology, and their numbers of replicas."""
    tried = [one for one in found.meshes if one.status != "rejected"]
    sizes = {one.mesh_shape.num_chips for one in tried}
    if topology.num_chips not in sizes:
        raise ValueError(
            f"tune: topology {topology} has {topology.num_chips} chips, but a replica has "
            f"{', '.join(map(str, sorted(sizes)))}"
        )
    lying = []
    for one in tried:
        try:
            lay_out(topology.dims, one.mesh_shape)
        except ValueError:
            continue
        lying.append((one.mesh_shape, one.data_parallel))
    if not lying:
        shapes = ", ".join(str(one.mesh_shape) for one in tried[:8])
        raise ValueError(
            f"tune: none of the meshes that fit ({shapes}) lies on {topology}; give another "
            "topology of as many chips"
        )
    return lying[:count]


def _compiled(plan: ModelPlan, space: Space, topology, compiler, progress, arguments) -> Finalist:
    """The fastest plan on a mesh, layer by layer; what `tune` was told to keep is kept."""
    pinned, kept = arguments.get("algorithm"), arguments.get("overrides") or {}

    def told(row):
        outcome = row.reason if isinstance(row, run.Failed) else f"{row.projected_s * 1e3:.3f} ms"
        what = f"{row.candidate.algorithm} {row.candidate.form}"
        progress(f"{plan.mesh_shape} {row.layer} {row.pass_} {what}: {outcome}")

    rows, layers, programs = [], {}, 0
    for name, problem in plan.problems().items():
        study = run.Study(
            topology=topology,
            layers={name: problem},
            plans={name: plan.layers[name]},
            space=dataclasses.replace(
                space,
                algorithms=(pinned,) if pinned else _beside(plan.layers[name].forward),
            ),
            as_planned=name in kept,
        )
        found = run.run(study, compiler, told)
        chosen = found.choices().get("tuned")
        if chosen is None:
            reasons = "; ".join(sorted({one.reason for one in found.failed})) or "nothing fits"
            raise ValueError(f"tune: layer {name} on {plan.mesh_shape} did not compile: {reasons}")
        layers |= run.plans_of(chosen, [name])
        rows += chosen
        programs += len(found.rows) + len(found.failed)
    outside_s = plan.predicted.relayout_s + plan.predicted.data_parallel_s
    best = dataclasses.replace(plan, layers=layers)
    priced = prediction_of(best, space.hardware, plan.predicted.memory)
    return Finalist(
        plan=dataclasses.replace(best, predicted=priced),
        modelled_s=plan.predicted.block_s,
        projected_s=sum(row.projected_s for row in rows) + outside_s,
        candidates=programs,
    )


def _beside(plan: GemmPlan) -> tuple[str, ...]:
    """The algorithms that place matrices as a plan does; a 1D one stands alone."""
    flat = algorithms.algorithm_of(plan).flatten(plan) is not None
    return (plan.algorithm,) if flat else COMPILED
