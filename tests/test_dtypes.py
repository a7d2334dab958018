"""Dtypes: results, accumulation, precision, and error bounds on real numbers."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshslice_jax as ms
from meshslice_jax.problem import promoted_dtype
from reference import derivatives, small_integers

MESH = (2, 4)
FLOATS = ("float32", "bfloat16", "float16")


def all_forward_plans():
    """Daily MeshSlice in all dataflows, and every other algorithm in one."""
    for number, algorithm in enumerate(ms.ALGORITHMS.values()):
        ours, flows = algorithm.name == "meshslice", algorithm.forward_dataflows
        for place, dataflow in enumerate(flows):
            plan = ms.GemmPlan(
                algorithm=algorithm.name, dataflow=dataflow, slice_count=2 if ours else 1
            )
            daily = ours or place == number % len(flows)
            name = f"{plan.algorithm}-{plan.dataflow.value}"
            yield pytest.param(plan, id=name, marks=() if daily else pytest.mark.slow)


FORWARD_PLANS = list(all_forward_plans())


def mesh_for(plan):
    return ms.make_mesh((2, 2) if plan.algorithm == "cannon" else MESH)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
@pytest.mark.parametrize("plan", FORWARD_PLANS)
def test_narrow_dtypes_are_exact_on_small_integers(plan, dtype):
    lhs, rhs = small_integers(1, 16, 24, density=0.5), small_integers(2, 24, 32, density=0.5)
    wanted, _ = derivatives(lhs, rhs)
    out = ms.matmul(lhs.astype(dtype), rhs.astype(dtype), plan, mesh=mesh_for(plan))
    assert out.dtype == dtype and (np.asarray(out).astype(np.int64) == wanted[0]).all()
    if dtype == "int32":
        return
    grads = jax.grad(
        lambda a, b: (ms.matmul(a, b, plan, mesh=mesh_for(plan)).astype(jnp.float32) ** 2).sum(),
        (0, 1),
    )(lhs.astype(dtype), rhs.astype(dtype))
    for got, want in zip(grads, wanted[1:3], strict=True):
        assert got.dtype == dtype
        assert (np.asarray(got) == want.astype(np.float32).astype(got.dtype)).all()


@pytest.mark.parametrize("plan", FORWARD_PLANS)
def test_int8_gives_int32(plan):
    lhs, rhs = np.full((16, 16), 100, np.int8), np.full((16, 16), 100, np.int8)
    out = ms.matmul(lhs, rhs, plan, mesh=mesh_for(plan))
    assert out.dtype == jnp.int32 and (np.asarray(out) == 16 * 100 * 100).all()
    as_float = ms.matmul(lhs, rhs, plan, mesh=mesh_for(plan), preferred_element_type=jnp.float32)
    assert as_float.dtype == jnp.float32 and (np.asarray(as_float) == 160000).all()


def test_integers_have_no_gradient():
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(lambda a: ms.matmul(a, a, ms.GemmPlan(), mesh=ms.make_mesh(MESH)).sum())(
            np.ones((8, 8), np.int8)
        )


@pytest.mark.parametrize("plan", FORWARD_PLANS)
def test_float64_stays_float64(plan):
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        lhs, rhs = random.standard_normal((16, 24)), random.standard_normal((24, 32))
        mesh = mesh_for(plan)
        out = ms.matmul(lhs, rhs, plan, mesh=mesh)
        grads = jax.grad(lambda a, b: (ms.matmul(a, b, plan, mesh=mesh) ** 2).sum(), (0, 1))(
            lhs, rhs
        )
        wanted = lhs @ rhs
        for got, want in zip(
            (out, *grads), (wanted, 2 * wanted @ rhs.T, 2 * lhs.T @ wanted), strict=True
        ):
            assert got.dtype == np.float64
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * np.abs(want).max())


@pytest.mark.parametrize(
    ("lhs_dtype", "rhs_dtype"), list(itertools.product(FLOATS, FLOATS)), ids=str
)
@pytest.mark.parametrize("preferred", [None, "float32", "bfloat16"])
def test_result_dtypes(lhs_dtype, rhs_dtype, preferred):
    lhs, rhs = small_integers(1, 8, 8, density=0.5), small_integers(2, 8, 8, density=0.5)
    a, b = lhs.astype(lhs_dtype), rhs.astype(rhs_dtype)
    plan = ms.GemmPlan(dataflow="ls", slice_count=2)
    mesh = ms.make_mesh((2, 2))

    def product(a, b):
        return ms.matmul(a, b, plan, mesh=mesh, preferred_element_type=preferred)

    wanted = jnp.dtype(preferred) if preferred else promoted_dtype(lhs_dtype, rhs_dtype)
    out = product(a, b)
    assert out.dtype == wanted and (np.asarray(out).astype(np.float32) == lhs @ rhs).all()
    grads = jax.grad(lambda a, b: product(a, b).astype(jnp.float32).sum(), (0, 1))(a, b)
    assert [g.dtype for g in grads] == [jnp.dtype(lhs_dtype), jnp.dtype(rhs_dtype)]


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_mixed_operands_with_a_wide_output_have_wide_gradients(dataflow):
    """bfloat16 activations, float32 weights and output: dW is as good as float32 allows."""
    random = np.random.default_rng(0)
    lhs = random.standard_normal((64, 32)).astype(jnp.bfloat16)
    rhs, ct = random.standard_normal((32, 16)), random.standard_normal((64, 16))
    plan = ms.GemmPlan(dataflow=dataflow, slice_count=2)

    def product(a, b):
        return ms.matmul(a, b, plan, mesh=ms.make_mesh((2, 4)), preferred_element_type="float32")

    _, back = jax.vjp(product, lhs, rhs.astype(np.float32))
    _, grad = back(ct.astype(np.float32))
    wanted = lhs.astype(np.float64).T @ ct
    assert grad.dtype == np.float32
    assert np.abs(np.asarray(grad) - wanted).max() < 1e-5


def bound(lhs, rhs, roundings: float, eps: float):
    """Elementwise: c * eps * |A| |B|."""
    return roundings * eps * (np.abs(lhs) @ np.abs(rhs)) + 1e-30


@pytest.mark.parametrize("reduce_dtype", ["float32", "output"])
@pytest.mark.parametrize("plan", FORWARD_PLANS)
def test_error_bounds_of_real_numbers(plan, reduce_dtype):
    """float32 between chips: one rounding to bfloat16. Output dtype: one a hop at most."""
    import dataclasses

    random = np.random.default_rng(1)
    lhs, rhs = random.standard_normal((32, 64)), random.standard_normal((64, 32))
    a, b = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
    plan = dataclasses.replace(plan, reduce_dtype=reduce_dtype)
    found = np.asarray(ms.matmul(a, b, plan, mesh=mesh_for(plan))).astype(np.float64)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    eps = 2.0**-9  # half a unit in the last place of bfloat16
    hops = 8 if plan.algorithm in ("fsdp", "tp1d") else 4
    roundings = 1.1 if reduce_dtype == "float32" else hops
    assert (
        np.abs(found - exact) <= bound(a.astype(np.float64), b.astype(np.float64), roundings, eps)
    ).all()


@pytest.mark.parametrize("plan", FORWARD_PLANS)
def test_sums_that_cancel_are_exact_in_bfloat16(plan):
    """256 - 255 = 1 over chips, slices and steps: partial sums stay in float32."""
    lhs = np.zeros((16, 16), np.float32)
    lhs[:, ::2], lhs[:, 1::2] = 256, -255.0
    rhs = np.ones((16, 16), np.float32)
    wanted = lhs @ rhs
    assert (wanted == 8).all()
    # 255 needs eight bits, so one rounding of a partial sum such as 511 or 767 would show.
    out = ms.matmul(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), plan, mesh=mesh_for(plan))
    assert (np.asarray(out).astype(np.float32) == wanted).all()


@pytest.mark.parametrize(
    "precision",
    [None, "default", "highest", jax.lax.Precision.HIGH, ("highest", "default"), "BF16_BF16_F32"],
    ids=str,
)
@pytest.mark.parametrize("plan", FORWARD_PLANS)
def test_precision_reaches_every_local_product(plan, precision):
    if isinstance(precision, str) and precision.startswith("BF16"):
        precision = getattr(jax.lax.DotAlgorithmPreset, precision)
    mesh = jax.sharding.AbstractMesh((2, 2), ("row", "col"))
    x = jax.ShapeDtypeStruct((16, 16), np.float32)

    def step(a, b):
        return jax.grad(
            lambda a, b: ms.matmul(a, b, plan, mesh=mesh, precision=precision).sum(), (0, 1)
        )(a, b)

    wanted = (
        jax.make_jaxpr(
            lambda a, b: jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision)
        )(x, x)
        .eqns[0]
        .params["precision"]
    )
    found = _precisions(jax.make_jaxpr(step)(x, x).jaxpr)
    assert len(found) >= 3
    if not isinstance(precision, tuple):
        assert set(found) == {wanted}
    else:  # a pair follows its operands where the local product exchanges them
        assert {frozenset(p) for p in found} == {frozenset(wanted)}


def _precisions(jaxpr):
    import jax.extend.core as jex

    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(eqn.params["precision"])
        for value in eqn.params.values():
            for sub in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(sub, jex.ClosedJaxpr):
                    found += _precisions(sub.jaxpr)
                elif isinstance(sub, jex.Jaxpr):
                    found += _precisions(sub)
    return found


def test_default_precision_setting_reaches_local_products():
    mesh = jax.sharding.AbstractMesh((2, 2), ("row", "col"))
    x = jax.ShapeDtypeStruct((16, 16), np.float32)
    with jax.default_matmul_precision("highest"):
        traced = jax.make_jaxpr(lambda a, b: ms.matmul(a, b, ms.GemmPlan(), mesh=mesh))(x, x)
    assert set(_precisions(traced.jaxpr)) == {(jax.lax.Precision.HIGHEST,) * 2}


def test_narrow_inputs_travel_narrow():
    from census import census

    mesh = jax.sharding.AbstractMesh((2, 2), ("row", "col"))
    x = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
    _, sent, _ = census(lambda a, b: ms.matmul(a, b, ms.GemmPlan(), mesh=mesh), x, x)
    assert sent == {("all_gather", ("col",)): 8 * 8 * 2, ("all_gather", ("row",)): 8 * 8 * 2}


def test_narrow_floats_meet_others_as_bfloat16():
    mesh = ms.make_mesh((2, 2))
    plan = ms.GemmPlan(dataflow="ls", slice_count=2)
    x = jnp.asarray(np.random.default_rng(1).integers(-1, 2, (8, 8)), jnp.float8_e4m3fn)
    want = np.asarray(x, np.float32) @ np.asarray(x, np.float32)
    found = ms.matmul(x, x, plan, mesh=mesh, preferred_element_type=jnp.float32)
    assert found.dtype == jnp.float32 and (np.asarray(found) == want).all()
    mixed = ms.matmul(x, x.astype(jnp.bfloat16), plan, mesh=mesh)
    assert mixed.dtype == jnp.bfloat16 and (np.asarray(mixed, np.float32) == want).all()


#: Every dtype that jax.numpy names.
DTYPES = sorted(
    {jnp.dtype(kind).name for kind in vars(jnp).values() if isinstance(kind, type(jnp.float32))}
)
NARROW = re.compile(r"u?int[124]|float[46]_.*|bool")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_right_or_refused(dtype):
    """As operands, with a result of their own kind and a wide one, and as the result."""
    assert len(DTYPES) >= 28
    plan, mesh = ms.GemmPlan(dataflow="ls", slice_count=2), ms.make_mesh((2, 2))
    values = np.random.default_rng(0).choice([1.0, 2.0], (8, 8))  # what every dtype has
    wanted, ones = values @ values, np.ones((8, 8), "int8")

    def product(x, preferred=None):
        return ms.matmul(x, x, plan, mesh=mesh, preferred_element_type=preferred)

    with jax.enable_x64("64" in dtype or "128" in dtype):
        if NARROW.fullmatch(dtype):
            for given in (np.zeros((8, 8), dtype), jax.ShapeDtypeStruct((8, 8), dtype)):
                with pytest.raises(TypeError, match=f"lhs has dtype {dtype}, .* 8 bits or more"):
                    jax.eval_shape(product, given)
            with pytest.raises(TypeError, match=f"preferred_element_type is dtype {dtype}, "):
                product(ones, dtype)
            return
        x = values.astype(dtype)
        wide = promoted_dtype(dtype, "float32") if jnp.issubdtype(dtype, jnp.inexact) else None
        for found in (product(x), product(x, wide)):
            assert (np.asarray(found) == wanted.astype(found.dtype)).all()
        assert (np.asarray(product(ones, dtype)) == np.full((8, 8), 8).astype(dtype)).all()


def test_a_result_that_does_not_hold_the_numbers_is_refused():
    plan, mesh = ms.GemmPlan(), ms.make_mesh((2, 2))
    for wanted in ("float32", "int8"):
        x = np.ones((8, 8), "complex64")
        with pytest.raises(TypeError, match=f"{wanted}, which does not hold a result of complex"):
            ms.matmul(x, x, plan, mesh=mesh, preferred_element_type=wanted)
