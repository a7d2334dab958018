"""What is measured beside GSPMD: plans as they overlap on this backend, and the control.

One pass is one product; "step" is a layer's forward product and both gradients in one program.
Every answer is compared with NumPy's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from meshslice_jax import algorithms, gemm, layout
from meshslice_jax.bench.cases import PASSES, Pass
from meshslice_jax.bench.measure import first_error
from meshslice_jax.bench.operands import Data, find_error, reference
from meshslice_jax.bench.wire.options import WireOptions
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import NATURAL, GemmProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a pass.

    Attributes:
      name: an algorithm, "gspmd", or "meshslice serial" for the control.
      forward: the forward plan; of GSPMD the one whose placements it has.
      planned: whether the plan runs; else GSPMD does.
    """

    name: str
    forward: GemmPlan
    planned: bool = True


def variants(options: WireOptions, dataflow: str) -> list[Variant]:
    """GSPMD first, then all that `check` accepts of what the options name."""
    collective = GemmPlan(algorithm="collective", dataflow=dataflow)
    found = [Variant(name="gspmd", forward=collective, planned=False)]
    for name in options.names:
        if name != "meshslice":
            found.append(Variant(name=name, forward=GemmPlan(algorithm=name, dataflow=dataflow)))
            continue
        for count in options.slices:
            found.append(_meshslice(dataflow, count))
        strided = {"block_size": options.block_size}
        for fields in (
            {"gather_order": "free"},
            {"gather_order": "serial"},
            strided,
            strided | {"rhs_layout": "sliced"},
        ):
            found.append(_meshslice(dataflow, options.control_slices, **fields))
    extents = (options.m, options.n, options.k)
    return [variant for variant in found if _fits(variant.forward, extents, options.shape)]


def _meshslice(dataflow: str, count: int, **fields) -> Variant:
    chosen = {"gather_order": "tied", "loop": "unrolled"} | fields
    plan = GemmPlan(algorithm="meshslice", dataflow=dataflow, slice_count=count, **chosen)
    name = "meshslice serial" if plan.gather_order == "serial" else "meshslice"
    return Variant(name=name, forward=plan)


def _fits(plan: GemmPlan, extents: tuple[int, int, int], shape: MeshShape) -> bool:
    try:
        algorithms.check(plan, *extents, shape)
    except ValueError:
        return False
    return True


def answers(problem: GemmProblem, pass_: str, data: Data) -> dict[str, np.ndarray]:
    """The results of a pass by NumPy, by the names of `PASSES`: of a step, all three."""
    names = PASSES if pass_ == "step" else (pass_,)
    return {
        name: reference(Pass(layer="layer", name=name, forward=problem), data) for name in names
    }


def prepared(variant: Variant, data: Data, expected: dict[str, np.ndarray], mesh: Mesh):
    """Compiles a variant and compares its answer.

    Args:
      variant: what runs.
      data: the operands.
      expected: what is to be computed, from `answers`.
      mesh: the mesh.

    Returns:
      A function that runs it.

    Raises:
      RuntimeError: the answer is wrong, on any process.
    """
    plan = variant.forward
    where = {
        role: NamedSharding(mesh, spec)
        for role, spec in zip(NATURAL, gemm.placements(plan), strict=True)
    }
    if variant.planned:
        product, results = functools.partial(gemm.matmul, plan=plan, mesh=mesh), None
    else:
        results = tuple(where[PASSES[name] or "out"] for name in expected)

        def product(lhs, rhs):
            return lax.with_sharding_constraint(jnp.dot(lhs, rhs), where["out"])

    def program(lhs, rhs, ct):
        out, backward = jax.vjp(product, lhs, rhs)
        found = dict(zip(PASSES, (out, *backward(ct)), strict=True))
        return tuple(found[name] for name in expected)  # what is not asked for is not computed

    lhs, rhs, ct = (data.on(role, where[role]) for role in ("lhs", "rhs", "out"))
    operands = lhs, layout.to_layout(rhs, plan, mesh=mesh), ct
    compiled = jax.jit(program, out_shardings=results).lower(*operands).compile()
    error = None
    for got, want in zip(compiled(*operands), expected.values(), strict=True):
        error = error or find_error(layout.from_layout(got), want)
    if (error := first_error(error)) is not None:
        raise RuntimeError(f"{variant.name} {plan.dataflow} {'+'.join(expected)}: {error}")
    return functools.partial(compiled, *operands)
