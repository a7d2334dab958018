"""What is measured beside GSPMD: plans as they overlap on this backend, and the control.

One pass is one product, as in the benchmark on emulated devices and with its check against
NumPy; "step" is a layer's forward product and both gradients in one program.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from meshslice_jax import algorithms, gemm
from meshslice_jax.bench.candidates import Candidate
from meshslice_jax.bench.cases import PASSES, Pass, Row
from meshslice_jax.bench.measure import first_error, prepare
from meshslice_jax.bench.operands import Data, find_error, reference
from meshslice_jax.bench.wire.options import WireOptions
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan, as_layer_plan
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
            found.append(_meshslice(dataflow, count, "tied"))
        for order in ("free", "serial"):
            found.append(_meshslice(dataflow, options.control_slices, order))
    extents = (options.m, options.n, options.k)
    return [variant for variant in found if _fits(variant.forward, extents, options.shape)]


def _meshslice(dataflow: str, count: int, order: str) -> Variant:
    plan = GemmPlan(
        algorithm="meshslice",
        dataflow=dataflow,
        slice_count=count,
        loop="unrolled",
        gather_order=order,
    )
    name = "meshslice serial" if order == "serial" else "meshslice"
    return Variant(name=name, forward=plan)


def _fits(plan: GemmPlan, extents: tuple[int, int, int], shape: MeshShape) -> bool:
    try:
        algorithms.check(plan, *extents, shape)
    except ValueError:
        return False
    return True


def prepared(variant: Variant, problem: GemmProblem, pass_: str, data: Data, mesh: Mesh):
    """Compiles a variant and compares its answer.

    Returns:
      A function that runs it.

    Raises:
      RuntimeError: the answer is wrong, on any process.
    """
    call, error = (_step if pass_ == "step" else _single)(variant, problem, pass_, data, mesh)
    if error is not None:
        raise RuntimeError(f"{variant.name} {variant.forward.dataflow} {pass_}: {error}")
    return call


def _single(variant: Variant, problem: GemmProblem, pass_: str, data: Data, mesh: Mesh):
    case = Pass(layer="layer", name=pass_, forward=problem)
    row = Row(
        layer="layer",
        pass_=pass_,
        m=problem.m,
        n=problem.n,
        k=problem.k,
        dtype=problem.lhs_dtype,
        mesh="",
        algorithm=variant.name,
    )
    candidate = Candidate(
        row=row,
        forward=variant.forward,
        plan=case.plan(variant.forward) if variant.planned else None,
        base=("", variant.forward.dataflow),
    )
    done, call = prepare(case, candidate, data, mesh, reference(case, data))
    return call, done.reason


def _step(variant: Variant, problem: GemmProblem, _: str, data: Data, mesh: Mesh):
    specs = gemm.placements(variant.forward)
    where = {role: NamedSharding(mesh, spec) for role, spec in zip(NATURAL, specs, strict=True)}
    if variant.planned:
        plan = as_layer_plan(variant.forward)
        product = functools.partial(gemm.matmul, plan=plan, mesh=mesh)
    else:

        def product(lhs, rhs):
            return lax.with_sharding_constraint(jnp.dot(lhs, rhs), where["out"])

    def step(lhs, rhs, ct):
        out, backward = jax.vjp(product, lhs, rhs)
        return (out, *backward(ct))

    operands = [data.on(role, where[role]) for role in ("lhs", "rhs", "out")]
    results = tuple(where[role] for role in ("out", "lhs", "rhs"))
    lowered = jax.jit(step, out_shardings=results).lower(*operands)
    compiled = lowered.compile()
    error = None
    for name, got in zip(PASSES, compiled(*operands), strict=True):
        case = Pass(layer="layer", name=name, forward=problem)
        error = error or find_error(got, reference(case, data))
    return functools.partial(compiled, *operands), first_error(error)
