"""What a child process is asked to compile, and what it answers: values that go as JSON.

    ProductJob   one pass of one layer, by an algorithm of the package or by GSPMD
    BlockJob     the layers of a block in one program, forward and backward
    ProbeJob     the smallest program there is, to see whether options are accepted

`lower` turns a job into a lowered program on a mesh of described devices. Nothing runs:
operands are shapes with shardings.
"""

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshslice_jax import algorithms, gemm, layout
from meshslice_jax.algorithms.meshslice import units
from meshslice_jax.dataflow import Contraction, Dataflow
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.problem import GemmProblem

Options = dict[str, bool | int | float | str]


class ProductJob(msgspec.Struct, frozen=True, kw_only=True, tag="product"):
    """One pass of a layer.

    Attributes:
      topology: name of the topology.
      mesh_shape: (rows, cols).
      problem: the pass's own product.
      plan: the pass's own plan; under GSPMD only its placements count.
      forward: dataflow of the layer's forward product.
      wrt: "lhs" or "rhs" for a gradient, None for the forward product.
      gspmd: leave the product to XLA's partitioner.
      options: compiler options.
    """

    topology: str
    mesh_shape: tuple[int, int]
    problem: GemmProblem
    plan: GemmPlan
    forward: Dataflow
    wrt: str | None = None
    gspmd: bool = False
    options: Options = {}

    @property
    def contraction(self) -> Contraction:
        """The product with the storage order that its matrices have in a training step."""
        forward = Contraction(dataflow=self.forward)
        return forward.gradient(self.wrt).contraction if self.wrt else forward

    @property
    def kept(self) -> str | None:
        """The role of the layer's weight, where it comes in the plan's `rhs_layout`."""
        if self.plan.rhs_layout == "natural":
            return None
        return (
            Contraction(dataflow=self.forward).gradient(self.wrt).role("rhs") if self.wrt else "rhs"
        )


class BlockJob(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """The FC layers of a block, one after the other, and their gradients.

    Attributes:
      topology: name of the topology.
      mesh_shape: (rows, cols).
      layers: name -> forward product, in order.
      plans: name -> plan.
      options: compiler options.
    """

    topology: str
    mesh_shape: tuple[int, int]
    layers: dict[str, GemmProblem]
    plans: dict[str, LayerPlan]
    options: Options = {}


class ProbeJob(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """A program of one addition, compiled with options."""

    topology: str
    mesh_shape: tuple[int, int]
    options: Options = {}


Job = ProductJob | BlockJob | ProbeJob


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a job.

    Attributes:
      error: why it did not compile, or None.
      hlo: the scheduled module.
      peak_bytes: of one chip, arguments and results included.
      compile_s: seconds of lowering and compilation.
    """

    error: str | None = None
    hlo: str = ""
    peak_bytes: int = 0
    compile_s: float = 0.0


def lower(job: Job, mesh: Mesh):
    """A lowered program (`jax.stages.Lowered`).

    Raises:
      ValueError: the product cannot run as planned.
    """
    if isinstance(job, ProductJob):
        return _lower_product(job, mesh)
    if isinstance(job, BlockJob):
        return _lower_block(job, mesh)
    x = jax.ShapeDtypeStruct((8 * mesh.size, 128), jnp.float32, sharding=_spread(mesh))
    return jax.jit(lambda x: x + 1).lower(x)


def _spread(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names, None))


def _sharding(contraction: Contraction, plan: GemmPlan, role: str, mesh: Mesh) -> NamedSharding:
    names = algorithms.axis_names(plan)
    entries = (names[axis] or None for axis in contraction.placement(role))
    return NamedSharding(mesh, PartitionSpec(*entries))


def _lower_product(job: ProductJob, mesh: Mesh):
    contraction, plan, problem = job.contraction, job.plan, job.problem
    operands = [_struct(job, role, mesh) for role in ("lhs", "rhs")]
    if job.gspmd:
        equation = f"{contraction.lhs},{contraction.rhs}->{contraction.out}"

        def product(lhs, rhs):
            return jnp.einsum(equation, lhs, rhs, preferred_element_type=problem.out_dtype)
    else:

        def product(lhs, rhs):
            return gemm.contract(
                lhs, rhs, plan, contraction, mesh=mesh, out_dtype=problem.out_dtype, kept=job.kept
            )

    out = jax.tree.map(lambda one: one.sharding, _struct(job, "out", mesh))
    return jax.jit(product, out_shardings=out).lower(*operands)


def _struct(job: ProductJob, role: str, mesh: Mesh):
    """A matrix of a job as shapes with shardings: one, or those of a weight in slices."""
    kept = job.kept == role
    contraction = job.contraction.streamed_first() if kept else job.contraction
    sharding = _sharding(contraction, job.plan, role, mesh)
    shape = [job.problem.extent(label) for label in contraction.indices(role)]
    rows = [shape[0]]
    if kept and job.plan.rhs_layout == "sliced":
        _, widths = units(job.plan)
        rows = [shape[0] // sum(widths) * width for width in widths]
    structs = tuple(
        jax.ShapeDtypeStruct((count, shape[1]), job.problem.dtype(role), sharding=sharding)
        for count in rows
    )
    return structs if kept else structs[0]


def _lower_block(job: BlockJob, mesh: Mesh):
    names = list(job.layers)
    first, last = job.layers[names[0]], job.layers[names[-1]]

    def struct(rows: int, cols: int, dtype: str, plan: LayerPlan, role: str):
        sharding = _sharding(plan.forward.contraction, plan.forward, role, mesh)
        return jax.ShapeDtypeStruct((rows, cols), dtype, sharding=sharding)

    def weight(name: str, problem: GemmProblem):
        plan = job.plans[name]
        natural = struct(problem.k, problem.n, problem.rhs_dtype, plan, "rhs")
        if plan.forward.rhs_layout == "natural":
            return natural
        stored = jax.eval_shape(lambda rhs: layout.to_layout(rhs, plan, mesh=mesh), natural)
        sharding = _sharding(plan.forward.contraction.streamed_first(), plan.forward, "rhs", mesh)
        return jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding), stored
        )

    weights = {name: weight(name, problem) for name, problem in job.layers.items()}
    x = struct(first.m, first.k, first.lhs_dtype, job.plans[names[0]], "lhs")
    ct = struct(last.m, last.n, last.out_dtype, job.plans[names[-1]], "out")

    def chain(x, weights):
        before = None
        for name, problem in job.layers.items():
            x = _narrow(x, problem.k, before, mesh)
            x = gemm.matmul(x, weights[name], job.plans[name], mesh=mesh)
            before = job.plans[name].forward
        return x

    def step(x, weights, ct):
        _, back = jax.vjp(chain, x, weights)
        return back(ct)

    out = jax.tree.map(lambda one: one.sharding, (x, weights))
    return jax.jit(step, out_shardings=out).lower(x, weights, ct)


def _narrow(x: jax.Array, width: int, before: GemmPlan | None, mesh: Mesh) -> jax.Array:
    """The first columns of each shard: what stands for attention and gating.

    They make one input of several outputs (q, k, v; gate and up) without moving anything.
    """
    if x.shape[1] == width:
        return x
    if before is None or x.shape[1] % width:
        raise ValueError(
            f"a layer with inputs of width {width} cannot follow one with outputs of {x.shape[1]}"
        )
    parts = x.shape[1] // width
    spec = _sharding(before.contraction, before, "out", mesh).spec
    return jax.shard_map(
        lambda shard: shard[:, : shard.shape[1] // parts], mesh=mesh, in_specs=spec, out_specs=spec
    )(x)
