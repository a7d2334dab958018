"""Schedules tell the truth: bytes, collectives and FLOPs are those of the traced kernels."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

import cases
import meshslice_jax as ms
from census import census
from meshslice_jax import algorithms
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Product, Schedule, Step, Transfer

#: Large meshes, traced without devices.
ABSTRACT_MESHES = ((16, 16), (32, 8))


def abstract_mesh(shape):
    return jax.sharding.AbstractMesh(shape, ("row", "col"))


def operand_types(problem):
    lhs = jax.ShapeDtypeStruct((problem.m, problem.k), problem.lhs_dtype)
    rhs = jax.ShapeDtypeStruct((problem.k, problem.n), problem.rhs_dtype)
    return lhs, rhs


def expected(problem, plan, shape, passes):
    """Sums of the schedules of some passes, keyed as the census is."""
    layer = algorithms.as_layer_plan(plan)
    names = algorithms.axis_names(layer.forward)
    ops, sent, flops = collections.Counter(), collections.Counter(), 0
    for name, part in algorithms.layer_problems(problem, layer.forward).items():
        if name not in passes:
            continue
        totals = algorithms.schedule(part, getattr(layer, name), shape).totals()
        flops += totals.flops
        for (kind, axis), count in totals.ops.items():
            sizes = {layer.forward.row_axis: shape[0], layer.forward.col_axis: shape[1]}
            along = tuple(name for name in names[axis] if sizes[name] > 1)
            ops[kind, along] += count
            sent[kind, along] += totals.bytes[kind, axis]
    return dict(ops), {key: round(count, 6) for key, count in sent.items()}, flops


def compare(problem, plan, shape, mesh):
    lhs, rhs = operand_types(problem)

    def product(a, b):
        return ms.matmul(a, b, plan, mesh=mesh, preferred_element_type=problem.out_dtype)

    assert census(product, lhs, rhs) == expected(problem, plan, shape, ["forward"])

    def everything(a, b):
        out, back = jax.vjp(product, a, b)
        return back(out)

    passes = ["forward", "grad_lhs", "grad_rhs"]
    assert census(everything, lhs, rhs) == expected(problem, plan, shape, passes)


def bench_cases():
    """One case per algorithm, dataflow, mesh, slice count and option but the loop's."""
    seen = set()
    for case in cases.table():
        key = (case.mesh, dataclasses.replace(case.plan, block_size=None))
        if key not in seen:
            seen.add(key)
            yield case


def check_traced_kernels(algorithm, dtype, meshes):
    counted = 0
    for case in bench_cases():
        long = max(case.mesh) == 16 and algorithm in ("summa", "fsdp", "tp1d")
        if case.plan.algorithm != algorithm or (long and case.plan.slice_count != 1):
            continue
        if case.mesh not in meshes:
            continue
        plan = case.plan
        if dtype == "bfloat16" and plan.slice_count % 2 == 0:
            plan = dataclasses.replace(plan, reduce_dtype="output")
        problem = GemmProblem.uniform(case.m, case.n, case.k, dtype)
        compare(problem, plan, case.mesh, abstract_mesh(case.mesh))
        counted += 1
    assert counted >= 3


@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
def test_traced_kernels_match_their_schedules_daily(algorithm):
    check_traced_kernels(algorithm, "float32", ((2, 2), (2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
def test_traced_kernels_match_their_schedules(algorithm):
    check_traced_kernels(algorithm, "float32", cases.MESHES)
    check_traced_kernels(algorithm, "bfloat16", ((2, 3), (1, 4), (4, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ABSTRACT_MESHES, ids=str)
@pytest.mark.parametrize("dataflow", ms.Dataflow)
@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
def test_large_abstract_meshes(algorithm, dataflow, shape):
    if algorithm == "cannon" and shape[0] != shape[1]:
        pytest.skip("cannon needs a square mesh")
    if dataflow not in ms.ALGORITHMS[algorithm].forward_dataflows:
        pytest.skip("not a forward product of this algorithm")
    slices = {"meshslice": 8, "summa": 8, "wang": 4, "fsdp": 8, "tp1d": 8}.get(algorithm, 1)
    plan = ms.GemmPlan(algorithm=algorithm, dataflow=dataflow, slice_count=slices)
    problem = GemmProblem.uniform(4096, 12288, 2048, "bfloat16")
    compare(problem, plan, shape, abstract_mesh(shape))


@pytest.mark.parametrize("dataflow", ms.Dataflow)
@pytest.mark.parametrize("shape", ABSTRACT_MESHES, ids=str)
def test_meshslice_on_large_abstract_meshes(dataflow, shape):
    plan = ms.GemmPlan(dataflow=dataflow, slice_count=8, loop="unrolled")
    problem = GemmProblem.uniform(4096, 12288, 2048, "bfloat16")
    compare(problem, plan, shape, abstract_mesh(shape))


@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
def test_no_collective_over_an_axis_of_size_one(algorithm):
    dataflow = ms.ALGORITHMS[algorithm].forward_dataflows[0]
    plan = ms.GemmPlan(algorithm=algorithm, dataflow=dataflow)
    lhs, rhs = operand_types(GemmProblem(m=8, n=8, k=8))

    def step(a, b):
        return jax.grad(lambda a, b: ms.matmul(a, b, plan, mesh=abstract_mesh((1, 1))).sum())(a, b)

    ops, _, _ = census(step, lhs, rhs)
    assert ops == {}
    if algorithm not in ("cannon", "fsdp", "tp1d"):
        names = census(lambda a, b: ms.matmul(a, b, plan, mesh=abstract_mesh((1, 4))), lhs, rhs)[0]
        assert {axes for _, axes in names} == {("col",)}


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_reduce_dtype_is_what_travels(dataflow):
    """bfloat16 operands: gathers carry bfloat16, reduce-scatters float32 or bfloat16."""
    problem = GemmProblem.uniform(32, 32, 32, "bfloat16")
    sent = {}
    for reduce_dtype in ("float32", "output"):
        plan = ms.GemmPlan(algorithm="collective", dataflow=dataflow, reduce_dtype=reduce_dtype)
        sent[reduce_dtype] = algorithms.schedule(problem, plan, (2, 4)).totals().bytes
        compare(problem, plan, (2, 4), abstract_mesh((2, 4)))
    scatters = [key for key in sent["output"] if key[0] == "reduce_scatter"]
    assert len(scatters) == (0 if dataflow == "os" else 1)
    for key, count in sent["output"].items():
        factor = 2 if key in scatters else 1
        assert sent["float32"][key] == factor * count


def test_a_hand_worked_schedule():
    """LS on 2x4 with S = 2: m=8, n=16, k=32 in float32, numbers worked out by hand."""
    plan = ms.GemmPlan(dataflow="ls", slice_count=2)
    found = algorithms.schedule(GemmProblem(m=8, n=16, k=32), plan, (2, 4))
    # rhs: 32 x 16 floats = 2048 bytes, 256 a chip; a slice of it 128, sent to 1 other chip.
    gather = Transfer(kind="all_gather", role="rhs", axis="row", ring=2, bytes=128, hops=1)
    # out: 8 x 16 floats = 512 bytes, 64 a chip; a slice of it 32, sent in 3 hops.
    scatter = Transfer(kind="reduce_scatter", role="out", axis="col", ring=4, bytes=96, hops=3)
    product = Product(m=4, n=8, k=8)
    assert found.steps == (
        (Step(transfers=(gather,)), 1),
        (Step(transfers=(gather, scatter), product=product), 1),
        (Step(product=product), 1),
        (Step(transfers=(scatter,)), 1),
    )
    assert (found.bytes_along("row"), found.bytes_along("col")) == (256, 192)
    assert found.totals().flops == 2 * 8 * 16 * 32 // 8
    # lhs 8*32*4/8, rhs 256; out 64; two gathered slices of 256, two partials of 4*8*4.
    assert (found.argument_bytes, found.output_bytes) == (128 + 256, 64)
    assert found.temporary_bytes == 2 * 256 + 2 * 128


def test_schedules_of_one_slice_are_collectives():
    problem = GemmProblem(m=32, n=32, k=32)
    for dataflow in ms.Dataflow:
        one = algorithms.schedule(problem, ms.GemmPlan(dataflow=dataflow), (2, 4))
        whole = algorithms.schedule(
            problem, ms.GemmPlan(algorithm="collective", dataflow=dataflow), (2, 4)
        )
        assert one == whole


def test_empty_steps_are_left_out():
    found = algorithms.schedule(GemmProblem(m=4, n=4, k=4), ms.GemmPlan(), (1, 1))
    assert isinstance(found, Schedule) and len(found.steps) == 1 and found.products == 1


#: By how much the CPU compiler's temporaries may exceed the schedule's; docs/algorithms.md
#: has the same table. XLA:CPU keeps every buffer of an unrolled chain or ring.
MEMORY_FACTOR = {
    "meshslice": 1.5, "collective": 1.25, "summa": 3.5, "cannon": 1.25, "wang": 1.5,
    "tp1d": 1.5, "fsdp": 4.0,
}  # fmt: skip


@pytest.mark.parametrize("dataflow", ms.Dataflow)
@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
def test_memory_of_compiled_programs(algorithm, dataflow):
    if dataflow not in ms.ALGORITHMS[algorithm].forward_dataflows:
        return
    problem, shape = GemmProblem(m=512, n=512, k=512), (4, 4)
    slices = 4 if algorithm == "meshslice" else 1
    plan = ms.GemmPlan(algorithm=algorithm, dataflow=dataflow, slice_count=slices)
    mesh = ms.make_mesh(shape)
    specs = ms.placements(plan)
    types = [
        jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
        for t, spec in zip(operand_types(problem), specs, strict=False)
    ]
    compiled = jax.jit(lambda a, b: ms.matmul(a, b, plan, mesh=mesh)).lower(*types).compile()
    found, planned = compiled.memory_analysis(), algorithms.schedule(problem, plan, shape)
    assert found.argument_size_in_bytes == planned.argument_bytes
    assert found.output_size_in_bytes == planned.output_bytes
    assert found.temp_size_in_bytes <= MEMORY_FACTOR[algorithm] * planned.temporary_bytes
    assert np.prod(shape) * planned.totals().flops == problem.flops
