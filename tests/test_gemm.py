"""Values, gradients and second gradients of every algorithm equal the dense ones, exactly."""

import functools

import jax
import numpy as np
import pytest

import cases
import meshslice_jax as ms
from reference import derivatives, everything, small_integers


@functools.cache
def operands(m: int, n: int, k: int):
    # Sparse enough for float32 to hold every partial sum exactly; asserted below.
    density = min(0.5, 12 / max(m, n, k))
    lhs, rhs = small_integers(1, m, k, density=density), small_integers(2, k, n, density=density)
    expected, bound = derivatives(lhs, rhs)
    assert bound < 2**24
    assert all(x.any() for x in expected)
    return lhs, rhs, expected


def check_case(case):
    lhs, rhs, expected = operands(case.m, case.n, case.k)
    found = everything(case.plan, ms.make_mesh(case.mesh))(lhs, rhs)
    for name, got, want in zip(("out", "gL", "gR", "hL", "hR"), found, expected, strict=True):
        got = np.asarray(got)
        assert got.dtype == np.float32 and got.shape == want.shape
        if not (got == want).all():
            ratio = got[want != 0] / want[want != 0]
            pytest.fail(f"{name} differs; found/expected {ratio.min()} .. {ratio.max()}")


@pytest.mark.parametrize("case", cases.daily(), ids=str)
def test_values_and_gradients_daily(case):
    check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
@pytest.mark.parametrize("mesh", cases.MESHES, ids=str)
def test_values_and_gradients_whole_table(algorithm, mesh):
    ours = [c for c in cases.table() if c.plan.algorithm == algorithm and c.mesh == mesh]
    if not ours:
        assert algorithm == "cannon" and mesh[0] != mesh[1]
        return
    for case in ours:
        check_case(case)
        jax.clear_caches()


def test_the_table_covers_what_the_registry_offers():
    found = {(c.plan.algorithm, c.plan.dataflow, c.mesh) for c in cases.table()}
    for algorithm in ms.ALGORITHMS.values():
        for dataflow in algorithm.forward_dataflows:
            for mesh in cases.MESHES:
                square = mesh[0] == mesh[1]
                assert ((algorithm.name, dataflow, mesh) in found) == (
                    square or algorithm.name != "cannon"
                )
        for form in cases.RING_FORMS if "ring_form" in algorithm.options else ():
            assert any(
                c.plan.algorithm == algorithm.name
                and all(getattr(c.plan, field) == value for field, value in form.items())
                for c in cases.table()
            )
    assert {c.plan.slice_count for c in cases.table()} == set(cases.SLICE_COUNTS)
    assert len(cases.daily()) > 100


def test_equal_plans_trace_once():
    traced = []
    mesh = ms.make_mesh((2, 2))

    @functools.partial(jax.jit, static_argnums=2)
    def product(lhs, rhs, plan):
        traced.append(plan)
        return ms.matmul(lhs, rhs, plan, mesh=mesh)

    lhs, rhs, _ = operands(4, 4, 4)
    for _ in range(2):
        product(lhs, rhs, ms.GemmPlan(algorithm="meshslice", dataflow="ls", slice_count=2))
    assert len(traced) == 1


def test_a_layer_plan_runs_its_own_backward_plans():
    forward = ms.GemmPlan(algorithm="meshslice", dataflow="os", slice_count=2)
    plan = ms.LayerPlan(
        forward=forward,
        grad_lhs=ms.GemmPlan(algorithm="collective", dataflow="ls"),
        grad_rhs=ms.GemmPlan(algorithm="wang", dataflow="rs", ring="row"),
    )
    mesh = ms.make_mesh((2, 4))
    lhs, rhs, expected = operands(16, 24, 32)
    found = everything(plan, mesh)(lhs, rhs)
    assert all((np.asarray(a) == b).all() for a, b in zip(found, expected, strict=True))
    text = jax.jit(jax.grad(lambda a, b: ms.matmul(a, b, plan, mesh=mesh).sum(), (0, 1)))
    text = text.lower(lhs, rhs).compile().as_text()
    assert "collective/ls" in text and "wang/rs" in text


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_one_slice_is_the_collective_algorithm(dataflow):
    mesh = ms.make_mesh((2, 4))
    lhs, rhs, _ = operands(16, 24, 32)
    text = {}
    for name in ("meshslice", "collective"):
        plan = ms.GemmPlan(algorithm=name, dataflow=dataflow)
        traced = jax.make_jaxpr(lambda a, b, plan=plan: ms.matmul(a, b, plan, mesh=mesh))(lhs, rhs)
        text[name] = str(traced)
    assert text["meshslice"].replace("meshslice", "collective") == text["collective"]


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
@pytest.mark.parametrize("algorithm", [a for a in ms.ALGORITHMS if a not in ("tp1d", "fsdp")])
def test_the_twin_exchanges_rows_and_columns(algorithm, dataflow):
    plan = ms.GemmPlan(algorithm=algorithm, dataflow=dataflow, row_axis="col", col_axis="row")
    shape = (2, 2) if algorithm == "cannon" else (2, 4)
    lhs, rhs, expected = operands(16, 24, 32)
    found = everything(plan, ms.make_mesh(shape))(lhs, rhs)
    assert all((np.asarray(a) == b).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
def test_results_do_not_depend_on_device_order(algorithm):
    dataflow = ms.ALGORITHMS[algorithm].forward_dataflows[0]
    plan = ms.GemmPlan(algorithm=algorithm, dataflow=dataflow)
    lhs, rhs, expected = operands(16, 24, 32)
    order = np.random.default_rng(0).permutation(4)
    mesh = ms.make_mesh((2, 2), devices=[jax.devices()[i] for i in order])
    found = everything(plan, mesh)(lhs, rhs)
    assert all((np.asarray(a) == b).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0)], ids=str)
@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
def test_empty_products(algorithm, shape):
    m, n, k = shape
    dataflow = ms.ALGORITHMS[algorithm].forward_dataflows[0]
    plan = ms.GemmPlan(algorithm=algorithm, dataflow=dataflow)
    mesh = ms.make_mesh((2, 2))
    lhs, rhs = np.ones((m, k), np.float32), np.ones((k, n), np.float32)

    def loss(a, b):
        return ms.matmul(a, b, plan, mesh=mesh).sum()

    out = jax.jit(lambda a, b: ms.matmul(a, b, plan, mesh=mesh))(lhs, rhs)
    assert out.shape == (m, n) and not np.asarray(out).any()
    grads = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
    assert [g.shape for g in grads] == [(m, k), (k, n)]
    assert not any(np.asarray(g).any() for g in grads)


@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
def test_one_bad_number_spoils_only_its_row_and_column(algorithm):
    """NaN or inf reaches no element that does not depend on it."""
    dataflow = ms.ALGORITHMS[algorithm].forward_dataflows[0]
    plan = ms.GemmPlan(algorithm=algorithm, dataflow=dataflow)
    lhs, rhs, (expected, *_) = operands(16, 24, 32)
    lhs, rhs = lhs.copy(), rhs.copy()
    lhs[3, 7], rhs[9, 5] = np.nan, np.inf
    found = np.asarray(ms.matmul(lhs, rhs, plan, mesh=ms.make_mesh((2, 2))))
    clean = np.ones_like(found, bool)
    clean[3], clean[:, 5] = False, False
    assert (found[clean] == expected[clean]).all()
    assert np.isnan(found[3]).all()
