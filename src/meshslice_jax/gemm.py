"""`matmul`: a planned 2D product of global arrays, differentiable to any order.

    arrays + plan + mesh -> place operands -> custom_vjp(shard_map(kernel)) -> array

The derivative is read off the table: `Contraction.gradient` names the two backward
products, which run through the same function with their own plans, so gradients of
gradients need nothing more. Residuals are the two operands as they are placed;
nothing gathered outlives a product.

Where it runs decides how the shard_map is built; see `site`. On a mesh with further
axes, name those over which m is sharded too in `plan.batch_axes`. Over an axis that is
not named there XLA gathers the operands before the kernel's own collectives.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshslice_jax import algorithms, collectives, compat, layout
from meshslice_jax.algorithms.base import Job, wire_dtype
from meshslice_jax.dataflow import Contraction
from meshslice_jax.plan import GemmPlan, LayerPlan, as_layer_plan
from meshslice_jax.problem import (
    ROLES,
    GemmProblem,
    accumulation_dtype,
    dtype_fault,
    promoted_dtype,
)
from meshslice_jax.site import Site, as_matrix, axes_in, find_site, spec_entry


def placements(plan: GemmPlan | LayerPlan) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """PartitionSpecs of lhs[m, k], rhs[k, n] and out[m, n] under a plan.

    Operands that are placed like this enter `matmul` without any data movement.
    """
    plan = as_layer_plan(plan).forward
    return tuple(_spec(plan.contraction, plan, "m", role) for role in ROLES)


def _spec(contraction: Contraction, plan: GemmPlan, batched: str, role: str) -> PartitionSpec:
    """The placement of a matrix; its index `batched` is sharded over the batch axes too."""
    names, entries = algorithms.axis_names(plan), []
    for label, axis in zip(contraction.indices(role), contraction.placement(role), strict=True):
        entries.append((plan.batch_axes if label == batched else ()) + names[axis])
    return PartitionSpec(*(spec_entry(found) for found in entries))


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    plan: GemmPlan | LayerPlan,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    precision=None,
    preferred_element_type=None,
) -> jax.Array:
    """`lhs @ rhs` as planned, on a mesh; global shapes in and out.

    Args:
      lhs: [m, k], placed in any way or not at all.
      rhs: [k, n], likewise; or what `to_layout` made of it.
      plan: how it runs. A GemmPlan derives the plans of its gradients.
      mesh: the mesh; None reads the mesh in context (`jax.set_mesh`, `with mesh:`).
      precision: as for `lax.dot_general`, for every local product.
      preferred_element_type: dtype of the result; by default the promoted dtype of
        the operands, and int32 for int8.

    Returns:
      out[m, n], placed as `placements(plan)` says. Reverse-mode differentiable to any
      order; forward mode raises JAX's error for `custom_vjp`.

    Raises:
      ValueError: no mesh, an axis that the mesh lacks, shapes that do not multiply,
        extents that the plan does not cut evenly (see `check`).
      TypeError: operands that are not matrices of numbers of 8 bits or more, a
        preferred_element_type that does not hold their products, or not a plan.
    """
    plan = as_layer_plan(plan)
    if isinstance(lhs, layout.StoredRhs):
        raise TypeError("lhs is a stored weight; only rhs can be one: ms.from_layout(lhs)")
    lhs, rhs = as_matrix(lhs, "lhs"), as_matrix(rhs, "rhs")
    if lhs.shape[1] != rhs.shape[0]:
        raise ValueError(
            f"lhs[m={lhs.shape[0]}, k={lhs.shape[1]}] and rhs[k={rhs.shape[0]}, "
            f"n={rhs.shape[1]}] do not multiply: k differs"
        )
    problem = GemmProblem(
        m=lhs.shape[0],
        n=rhs.shape[1],
        k=lhs.shape[1],
        lhs_dtype=lhs.dtype.name,
        rhs_dtype=rhs.dtype.name,
        out_dtype=_out_dtype(lhs, rhs, preferred_element_type),
    )
    site = find_site(mesh, plan.forward, (lhs, *jax.tree.leaves(rhs)))
    check_at(site, plan, problem)
    call = _Call(
        contraction=plan.forward.contraction,
        batched="m",
        plan=plan,
        site=site,
        out_dtype=problem.out_dtype,
        precision=_hashable(precision),
        kept=None if plan.forward.rhs_layout == "natural" else "rhs",
    )
    if 0 in lhs.shape + rhs.shape:  # nothing to move: an empty result, or a sum of no terms
        return site.place(jnp.zeros((problem.m, problem.n), problem.out_dtype), call.spec("out"))
    rhs = layout.as_parts(rhs, plan.forward, site)
    out = _product(call, call.place(lhs, "lhs"), call.place(rhs, "rhs"))
    # A reshard to its own type accepts a cotangent of any type; custom_vjp does not.
    return site.reshard(out, jax.typeof(out).sharding.spec) if site.explicit else out


def check_at(site: Site, plan: LayerPlan, problem: GemmProblem) -> None:
    """Returns if a product and its gradients run as planned where they are called.

    Raises:
      ValueError: they do not; see `check`.
    """
    one = of_one_replica(problem, plan, site.replicas(plan.forward))
    algorithms.check_problem(plan, one, site.shape(plan.forward))


def of_one_replica(problem: GemmProblem, plan: LayerPlan, replicas: int) -> GemmProblem:
    """The part of a product that each of its data-parallel replicas runs.

    Raises:
      ValueError: the replicas do not share m evenly.
    """
    if problem.m % replicas:
        names = "*".join(plan.forward.batch_axes)
        raise ValueError(
            f"lhs dimension m = {problem.m} is not divisible by batch axes {names!r} of size "
            f"{replicas}; pad m or change batch_axes"
        )
    return dataclasses.replace(problem, m=problem.m // replicas)


def _out_dtype(lhs, rhs, preferred) -> str:
    natural = promoted_dtype(lhs.dtype.name, rhs.dtype.name)
    if preferred is not None:
        preferred = jnp.dtype(preferred)
        if fault := dtype_fault(preferred):
            raise TypeError(f"preferred_element_type is {fault}")
        if natural.startswith("complex") and preferred.kind != "c":
            raise TypeError(
                f"preferred_element_type is {preferred.name}, which does not hold a result of "
                f"{natural}"
            )
        return preferred.name
    return accumulation_dtype(natural) if natural in ("int8", "uint8") else natural


def _hashable(precision):
    return tuple(precision) if isinstance(precision, list) else precision


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of a product: hashable, equal for equal settings.

    `batched` is the index that is sharded over the plan's batch axes: m, under the name
    that it has in this product. `kept` is the role of the layer's weight in this product,
    where it is stored as the plan's `rhs_layout` says: as a tuple of arrays.
    """

    contraction: Contraction
    batched: str
    plan: LayerPlan
    site: Site
    out_dtype: str
    precision: object
    kept: str | None = None

    def stored(self, role: str) -> Contraction:
        """The contraction with a matrix as it comes or goes: what is kept, streamed index first."""
        return self.contraction.streamed_first() if role == self.kept else self.contraction

    def spec(self, role: str) -> PartitionSpec:
        """The placement of a matrix; of all arrays of the one that is kept."""
        return _spec(self.stored(role), self.plan.forward, self.batched, role)

    def place(self, x, role: str):
        """Puts a matrix where the plan wants it."""
        return jax.tree.map(lambda part: self.site.place(part, self.spec(role)), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: _Call, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The product over the mesh; lhs and rhs in the storage order of the contraction."""
    return _run(call, _out_spec(call, lhs, rhs) if call.site.explicit else None, lhs, rhs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(call: _Call, result: PartitionSpec | None, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Runs the kernel; on Explicit axes, enters them and returns a `result` on them.

    Jitted because an eager shard_map runs, and compiles, operation by operation.
    """
    site = call.site
    mapped = jax.shard_map(
        functools.partial(_kernel, call),
        mesh=site.mesh,
        in_specs=(call.spec("lhs"), call.spec("rhs")),
        out_specs=call.spec("out"),
        axis_names=site.manual,
    )
    if not site.explicit:
        return mapped(lhs, rhs)
    with site.context():
        return jax.sharding.auto_axes(mapped, axes=site.explicit, out_sharding=result)(lhs, rhs)


def _kernel(call: _Call, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """One chip's part of the product.

    Kernels see moving matrices with their streamed index first, where a slice is
    contiguous and a collective moves whole rows. Transposing shards at the border costs
    less than a collective over a minor dimension, which transposes what it has gathered
    or is about to reduce (XLA:CPU, transpose counted: reduce-scatter 2.1 times, all-gather
    1.4 times). The TPU compiler lays out whole collectives as they want it, so there only
    what is cut into pieces needs this.
    """
    plan, site = call.plan.forward, call.site
    algorithm = algorithms.algorithm_of(plan)
    turned = algorithm.cuts or site.platform != "tpu"
    inner = call.contraction.streamed_first() if turned else call.contraction
    names = algorithms.axis_names(plan)
    dtypes = GemmProblem(
        m=0, n=0, k=0, lhs_dtype=_dtype(lhs), rhs_dtype=_dtype(rhs), out_dtype=call.out_dtype
    )
    # A 16-bit reduction in a partially manual shard_map aborts XLA:CPU.
    wide = site.partial and site.platform == "cpu"
    wire = dtypes.accum_dtype if wide else wire_dtype(dtypes, plan)
    summed = plan.batch_axes if call.batched == "k" else ()
    job = Job(
        contraction=inner,
        plan=plan,
        row=site.axis(names["row"]),
        col=site.axis(names["col"]),
        accum_dtype=dtypes.accum_dtype,
        wire_dtype=wire,
        out_dtype=wire if summed else call.out_dtype,
        precision=call.precision,
        # XLA:CPU (jaxlib 0.12) refuses some bfloat16 x bfloat16 = float32 products.
        widened=site.platform == "cpu",
        kept=call.kept,
        turned_after=inner.out != call.contraction.out and call.kept != "out",
        exchanged=collectives.exchanges(site.platform),
        rolled=plan.loop == "rolled" or (plan.loop == "auto" and site.platform != "tpu"),
    )

    def turn(x, role: str):
        same = inner.indices(role) == call.contraction.indices(role)
        return x if same or role == call.kept else x.T

    with jax.named_scope(f"{plan.algorithm}/{plan.dataflow.value}"):
        out = algorithm.kernel(turn(lhs, "lhs"), turn(rhs, "rhs"), job)
        if summed:
            with jax.named_scope("batch"):
                out = jax.tree.map(lambda x: lax.psum(x, summed).astype(call.out_dtype), out)
        return turn(out, "out")


def _out_spec(call: _Call, lhs: jax.Array, rhs: jax.Array) -> PartitionSpec:
    """The output's type on Explicit axes: the plan's axes, and others that m and n had."""
    kept = {"lhs": _names_by_label(call, lhs, "lhs"), "rhs": _names_by_label(call, rhs, "rhs")}
    entries = []
    for label, entry in zip(call.stored("out").indices("out"), call.spec("out"), strict=True):
        source = "lhs" if label == "m" else "rhs"
        used = {name for done in entries for name in axes_in(done)}
        others = tuple(name for name in kept[source][label] if name not in used)
        entries.append(spec_entry(others + axes_in(entry)))
    return call.site.on_explicit(PartitionSpec(*entries))


def _names_by_label(call: _Call, x: jax.Array, role: str) -> dict[str, tuple[str, ...]]:
    """For each index of an operand, the axes of its type that are not the plan's."""
    plan = call.plan.forward
    ours = {plan.row_axis, plan.col_axis, *plan.batch_axes}
    spec = jax.typeof(jax.tree.leaves(x)[0]).sharding.spec
    return {
        label: tuple(name for name in axes_in(entry) if name not in ours)
        for label, entry in zip(call.stored(role).indices(role), spec, strict=True)
    }


def _forward(call: _Call, lhs: jax.Array, rhs: jax.Array):
    return _product(call, lhs, rhs), (lhs, rhs)


def _backward(call: _Call, residuals, ct: jax.Array):
    lhs, rhs = residuals
    operands = {"lhs": lhs, "rhs": rhs, "ct": ct}
    return tuple(_gradient(call, operands, wrt) for wrt in ("lhs", "rhs"))


def _gradient(call: _Call, operands: dict[str, jax.Array], wrt: str) -> jax.Array:
    gradient = call.contraction.gradient(wrt)
    first, second = gradient.operands
    part = dataclasses.replace(
        call,
        contraction=gradient.contraction,
        batched=next(new for new, old in gradient.labels if old == call.batched),
        plan=as_layer_plan(call.plan.gradient(wrt)),
        out_dtype=_dtype(operands[wrt]),
        kept=call.kept and gradient.role(call.kept),
    )
    found = _product(part, operands[first], operands[second])
    return jax.tree.map(functools.partial(_cotangent, call.site), found, operands[wrt])


def _cotangent(site: Site, found: jax.Array, operand: jax.Array) -> jax.Array:
    """A gradient with the operand's type, summed over the axes of a caller's shard_map along
    which the operand is the same."""
    if site.explicit:
        found = site.reshard(found, jax.typeof(operand).sharding.spec)
    extra = compat.varying_axes(found) - compat.varying_axes(operand)
    if not extra:
        return found
    wide = found.astype(accumulation_dtype(found.dtype))
    return lax.psum(wide, tuple(sorted(extra))).astype(found.dtype)


def _dtype(x) -> str:
    """The dtype of a matrix, which may be a tuple of arrays."""
    return jax.tree.leaves(x)[0].dtype.name


_product.defvjp(_forward, _backward)


def contract(
    lhs: jax.Array,
    rhs: jax.Array,
    plan: GemmPlan,
    contraction: Contraction,
    *,
    mesh: Mesh,
    out_dtype: str,
    precision=None,
    batched: str = "m",
    kept: str | None = None,
) -> jax.Array:
    """One product by itself, its matrices in the storage order of `contraction`.

    What reverse mode runs as a backward pass, for those who time or inspect one pass:
    `plan.gradient(wrt)` and `contraction.gradient(wrt).contraction` of a forward plan.

    Args:
      lhs: the product's own lhs, stored as `contraction.lhs` says.
      rhs: its rhs, stored as `contraction.rhs` says.
      plan: how it runs; its dataflow is the contraction's.
      contraction: dataflow and storage order.
      mesh: the mesh, with Auto axes.
      out_dtype: dtype of the result.
      precision: as for `lax.dot_general`.
      batched: the index that is sharded over plan.batch_axes too.
      kept: the role of the layer's weight, if it comes as the parts of plan.rhs_layout.

    Returns:
      out, stored as `contraction.out` says.

    Raises:
      ValueError: the product cannot run as planned.
    """
    extents = {}
    for role, x in (("lhs", lhs), ("rhs", rhs)):
        stored, parts = contraction.streamed_first() if role == kept else contraction, x
        for label in contraction.indices(role):
            sizes = [part.shape[stored.dim(role, label)] for part in jax.tree.leaves(parts)]
            extents[label] = sum(sizes) if label == contraction.streamed else sizes[0]
    problem = GemmProblem(
        **extents, lhs_dtype=_dtype(lhs), rhs_dtype=_dtype(rhs), out_dtype=out_dtype
    )
    site = find_site(mesh, plan, (*jax.tree.leaves(lhs), *jax.tree.leaves(rhs)))
    algorithms.schedule(problem, plan, site.shape(plan))  # raises where it cannot run
    call = _Call(
        contraction=contraction,
        batched=batched,
        plan=as_layer_plan(plan),
        site=site,
        out_dtype=out_dtype,
        precision=_hashable(precision),
        kept=kept,
    )
    return _product(call, call.place(lhs, "lhs"), call.place(rhs, "rhs"))
