"""The compiled programs of rightly placed products hold the planned collectives, no other."""

import re

import jax
import numpy as np
import pytest

import meshslice_jax as ms
from meshslice_jax import algorithms
from meshslice_jax.problem import GemmProblem

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
NAMES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "permute": "collective-permute",
}


def collectives(text):
    found = re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", text)
    return {kind: found.count(kind) for kind in KINDS if kind in found}


def planned(problem, plan, shape, passes):
    found = {}
    for name, part in algorithms.layer_problems(problem, plan).items():
        part_plan = plan if name == "forward" else plan.gradient(name.removeprefix("grad_"))
        if name in passes:
            for (kind, _), count in (
                algorithms.schedule(part, part_plan, shape).totals().ops.items()
            ):
                found[NAMES[kind]] = found.get(NAMES[kind], 0) + count
    return found


@pytest.mark.parametrize("dataflow", ms.Dataflow)
@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
def test_planned_collectives_and_no_other(algorithm, dataflow):
    if dataflow not in ms.ALGORITHMS[algorithm].forward_dataflows:
        return
    shape = (2, 2) if algorithm == "cannon" else (2, 4)
    slices = {"slice_count": 2, "loop": "unrolled"} if algorithm == "meshslice" else {}
    plan = ms.GemmPlan(algorithm=algorithm, dataflow=dataflow, **slices)
    mesh, problem = ms.make_mesh(shape), GemmProblem(m=64, n=96, k=128)
    lhs, rhs, out = (jax.sharding.NamedSharding(mesh, spec) for spec in ms.placements(plan))
    a = jax.ShapeDtypeStruct((64, 128), np.float32, sharding=lhs)
    b = jax.ShapeDtypeStruct((128, 96), np.float32, sharding=rhs)
    ct = jax.ShapeDtypeStruct((64, 96), np.float32, sharding=out)

    def forward(a, b):
        return ms.matmul(a, b, plan, mesh=mesh)

    def backward(a, b, ct, wrt):
        return jax.vjp(forward, a, b)[1](ct)[wrt]

    text = jax.jit(forward, out_shardings=out).lower(a, b).compile().as_text()
    assert collectives(text) == planned(problem, plan, shape, ["forward"])
    for wrt, (name, place) in enumerate((("grad_lhs", lhs), ("grad_rhs", rhs))):
        one = jax.jit(backward, static_argnums=3, out_shardings=place).lower(a, b, ct, wrt)
        assert collectives(one.compile().as_text()) == planned(problem, plan, shape, [name])


@pytest.mark.parametrize("dataflow", ms.Dataflow)
def test_residuals_are_the_operands(dataflow):
    """Nothing gathered outlives the forward product."""
    plan = ms.GemmPlan(dataflow=dataflow, slice_count=2)
    mesh = ms.make_mesh((2, 4))
    a, b = np.ones((64, 128), np.float32), np.ones((128, 96), np.float32)
    _, back = jax.vjp(lambda a, b: ms.matmul(a, b, plan, mesh=mesh), a, b)
    kept = sorted(x.size for x in jax.tree.leaves(back))
    assert kept == sorted([a.size, b.size])
    specs = {x.shape: x.sharding.spec for x in jax.tree.leaves(back)}
    lhs, rhs, _ = ms.placements(plan)
    assert specs == {a.shape: lhs, b.shape: rhs}


def test_collectives_and_products_have_readable_names():
    plan = ms.GemmPlan(dataflow="ls", slice_count=4, loop="unrolled")
    mesh = ms.make_mesh((2, 4))
    a, b = np.ones((64, 128), np.float32), np.ones((128, 96), np.float32)
    text = jax.jit(lambda a, b: ms.matmul(a, b, plan, mesh=mesh)).lower(a, b).compile().as_text()
    for index in range(4):
        assert f"meshslice/ls/slice{index}/product" in text
        assert f"meshslice/ls/slice{index}/scatter" in text
        assert f"meshslice/ls/slice{index}/gather" in text
    text = text.replace("\n", " ")
    for algorithm, label in (("summa", "broadcast"), ("cannon", "shift"), ("wang", "shift")):
        plan = ms.GemmPlan(algorithm=algorithm, dataflow="ls")
        lowered = jax.jit(
            lambda a, b, plan=plan: ms.matmul(a, b, plan, mesh=ms.make_mesh((2, 2)))
        ).lower(a, b)
        assert f"{algorithm}/ls/" in lowered.compile().as_text() and label in str(
            lowered.compile().as_text()
        )


@pytest.mark.parametrize("dataflow", ms.Dataflow)
def test_cannon_never_gathers(dataflow):
    plan = ms.GemmPlan(algorithm="cannon", dataflow=dataflow)
    totals = algorithms.schedule(GemmProblem(m=64, n=64, k=64), plan, (4, 4)).totals()
    assert {kind for kind, _ in totals.ops} == {"permute"}


def test_compile_time_of_many_slices():
    """S = 16, unrolled as for a TPU, takes at most 4 times the processor time of S = 4."""
    import time

    mesh = ms.make_mesh((4, 4))
    a = b = np.ones((1024, 1024), np.float32)
    took = {}
    for slices in (4, 16) * 3:
        plan = ms.GemmPlan(dataflow="os", slice_count=slices, loop="unrolled")
        jax.clear_caches()
        start = time.process_time()
        jax.jit(lambda a, b, plan=plan: ms.matmul(a, b, plan, mesh=mesh)).lower(a, b).compile()
        took[slices] = min(took.get(slices, 1e9), time.process_time() - start)
    assert took[16] <= 4 * took[4]
