"""Weights stored in slices: exact forward and backward, and exactly invertible."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshslice_jax as ms
from reference import derivatives, everything, small_integers

M, N, K = 24, 48, 96
LHS, RHS = small_integers(1, M, K, density=0.2), small_integers(2, K, N, density=0.2)
EXPECTED, BOUND = derivatives(LHS, RHS)
assert BOUND < 2**24

LAYOUTS = ("permuted", "sliced")
#: Mesh shapes on which slices of the weight, of the other mover, or of neither are strided.
MESHES = ((2, 4), (4, 2), (2, 2), (1, 4))
FORMS = (
    {"slice_count": 3, "reduce_scatter": "ring", "gather_order": "ordered"},
    {"slice_count": 4, "taper": "ends", "reduce_scatter": "all_to_all"},
    {"slice_count": 3, "loop": "rolled"},
    {"slice_count": 2, "block_size": 1, "gather_order": "tied"},
    {"slice_count": 1},
)


def plan_of(layout, dataflow="os", **fields):
    return ms.GemmPlan(dataflow=dataflow, rhs_layout=layout, **fields)


def cases():
    """Every form with both layouts, meshes and dataflows in turn."""
    meshes, dataflows = itertools.cycle(MESHES), itertools.cycle(("os", "ls", "ls", "os", "os"))
    found = []
    for layout, form in itertools.product(LAYOUTS, FORMS):
        mesh, dataflow = next(meshes), next(dataflows)
        if not (layout == "sliced" and form.get("loop")):
            name = "-".join(f"{key}={value}" for key, value in form.items())
            plan = plan_of(layout, dataflow, **form)
            found.append(pytest.param(plan, mesh, id=f"{dataflow}-{layout}-{mesh}-{name}"))
    return found


def compare(found):
    for got, want in zip(found, EXPECTED, strict=True):
        assert (np.asarray(ms.from_layout(got)) == want).all()


@pytest.mark.parametrize("plan, shape", cases())
def test_stored_weights_give_the_same_bits_forward_and_backward(plan, shape):
    mesh = ms.make_mesh(shape)
    stored = ms.to_layout(jnp.asarray(RHS), plan, mesh=mesh)
    assert stored.shape == (K, N) and stored.dtype == jnp.float32
    assert (np.asarray(ms.from_layout(stored)) == RHS).all()
    found = everything(plan, mesh)(LHS, stored)
    assert [isinstance(x, ms.StoredRhs) for x in found] == [False, False, True, False, True]
    compare(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plain_weight_is_converted_on_the_way(layout):
    plan = plan_of(layout, "ls", slice_count=3, loop="unrolled")
    compare(everything(plan, ms.make_mesh((4, 2)))(LHS, jnp.asarray(RHS)))


def test_the_parts_are_what_the_slices_need_and_move_nothing():
    mesh, plan = ms.make_mesh((2, 4)), plan_of("sliced", slice_count=3)
    natural = jax.device_put(RHS, jax.NamedSharding(mesh, ms.placements(plan)[1]))
    stored = jax.jit(lambda rhs: ms.to_layout(rhs, plan, mesh=mesh))(natural)
    assert [part.shape for part in stored.parts] == [(K // 3, N)] * 3

    def text(plan, rhs):
        return jax.jit(lambda a, b: ms.matmul(a, b, plan, mesh=mesh)).lower(LHS, rhs).as_text()

    # k is sliced: naturally both operands, in parts only lhs.
    plain = plan_of("natural", slice_count=3, loop="unrolled")
    assert text(plain, RHS).count("stablehlo.slice") == 6
    assert text(plan, stored).count("stablehlo.slice") == 3


def test_stored_weights_train_with_data_parallel_replicas():
    mesh = ms.make_mesh((2, 2, 2), ("data", "row", "col"))
    plan = plan_of("sliced", slice_count=2, batch_axes=("data",))
    compare(everything(plan, mesh)(LHS, ms.to_layout(jnp.asarray(RHS), plan, mesh=mesh)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_weights_under_vmap_over_a_mesh_axis(layout):
    mesh, plan = ms.make_mesh((2, 2, 2), ("data", "row", "col")), plan_of(layout, slice_count=3)
    lhs, rhs = np.stack([LHS, 2 * LHS]), jnp.stack([jnp.asarray(RHS), 3 * RHS])

    def product(a, b):
        return ms.matmul(a, ms.to_layout(b, plan, mesh=mesh), plan, mesh=mesh)

    found = jax.jit(jax.vmap(product, spmd_axis_name="data"))(lhs, rhs)
    assert (np.asarray(found) == np.stack([LHS @ RHS, 6 * (LHS @ RHS)])).all()


def test_an_empty_product_with_a_stored_weight_is_empty():
    mesh, plan = ms.make_mesh((2, 4)), plan_of("sliced", "ls", slice_count=3)
    stored = ms.to_layout(jnp.asarray(RHS), plan, mesh=mesh)
    for shape in ((0, N), (K, 0)):
        empty = ms.to_layout(jnp.zeros(shape), plan, mesh=mesh)
        assert empty.shape == ms.from_layout(empty).shape == shape
        assert not ms.matmul(jnp.ones((M, shape[0])), empty, plan, mesh=mesh).any()
    out, grads = jax.value_and_grad(
        lambda rhs: ms.matmul(jnp.zeros((0, K)), rhs, plan, mesh=mesh).sum()
    )(stored)
    assert out == 0 and isinstance(grads, ms.StoredRhs)
    assert not any(part.any() for part in grads.parts)


@pytest.mark.parametrize("dataflow, layout", [("os", "sliced"), ("ls", "permuted")])
def test_stored_weights_on_explicit_axes(dataflow, layout):
    plan = plan_of(layout, dataflow, slice_count=3)
    mesh, spec = jax.make_mesh((2, 4), ("row", "col")), ms.placements(plan)[1]
    with jax.set_mesh(mesh):
        placed = jax.device_put(jnp.asarray(RHS), jax.NamedSharding(mesh, spec))
        for rhs in (jnp.asarray(RHS), placed):  # without a type, and with the plan's
            stored = ms.to_layout(rhs, plan)
            assert {jax.typeof(part).sharding.spec for part in stored.parts} == {P("row", "col")}
            assert jax.typeof(ms.from_layout(stored)).sharding.spec == spec
        found = everything(plan, None)(LHS, stored)
        compare(found)
        assert [jax.typeof(x) for x in found[2].parts] == [jax.typeof(x) for x in stored.parts]
        compare(everything(plan, None)(LHS, placed))
    compare(everything(plan, mesh)(LHS, ms.to_layout(placed, plan, mesh=mesh)))  # no context


def test_stored_weights_on_further_axes_of_either_type():
    explicit, auto = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    plan = plan_of("sliced", "ls", slice_count=3, batch_axes=("data",))
    for types in ((explicit,) * 3, (auto, explicit, explicit), (explicit, auto, explicit)):
        mesh = jax.make_mesh((2, 2, 2), ("data", "row", "col"), axis_types=types)
        with jax.set_mesh(mesh):
            compare(everything(plan, None)(LHS, ms.to_layout(jnp.asarray(RHS), plan)))


def test_natural_is_left_alone():
    plan = plan_of("natural")
    assert ms.to_layout(RHS, plan, mesh=ms.make_mesh((2, 2))) is RHS
    assert ms.from_layout(RHS) is RHS


def test_errors_say_what_to_do():
    mesh, plan = ms.make_mesh((2, 4)), plan_of("sliced", slice_count=3)
    stored = ms.to_layout(jnp.asarray(RHS), plan, mesh=mesh)
    with pytest.raises(ValueError, match="rhs is stored 'sliced', but the plan has rhs_layout='na"):
        ms.matmul(LHS, stored, ms.GemmPlan(slice_count=3), mesh=mesh)
    with pytest.raises(ValueError, match=r"is stored as Cut.*but the plan on this mesh needs Cut"):
        ms.matmul(LHS, stored, plan_of("sliced", slice_count=2), mesh=mesh)
    with pytest.raises(ValueError, match=r"rhs dimension k = 96 is not cut evenly into 7 parts"):
        ms.to_layout(RHS, plan_of("sliced", slice_count=7), mesh=mesh)
    for call in (ms.to_layout, lambda rhs, plan, mesh: ms.matmul(LHS, rhs, plan, mesh=mesh)):
        with pytest.raises(ValueError, match="with dataflow 'rs' it stays put"):
            call(RHS, plan_of("sliced", "rs"), mesh=mesh)
        with pytest.raises(ValueError, match="summa does not read rhs_layout='sliced'"):
            call(RHS, plan_of("sliced", algorithm="summa"), mesh=mesh)
        with pytest.raises(TypeError, match=r"rhs must be a matrix \[k, n\], got shape \(96,\)"):
            call(RHS[:, 0], plan, mesh=mesh)
        with pytest.raises(TypeError, match="rhs has dtype bool, which is not a number"):
            call(RHS > 0, plan, mesh=mesh)
    with pytest.raises(TypeError, match=r"is stored 'sliced' already; pass ms.from_layout"):
        ms.to_layout(stored, plan, mesh=mesh)
    with pytest.raises(TypeError, match="lhs is a stored weight; only rhs can be one"):
        ms.matmul(stored, RHS, plan, mesh=mesh)
    with pytest.raises(
        TypeError, match=r"dot_general takes arrays; ms.matmul takes stored weights"
    ):
        ms.dot_general(plan, mesh=mesh)(LHS, stored, (((1,), (0,)), ((), ())))
    with pytest.raises(TypeError, match="is a stack of stored weights"):
        ms.matmul(LHS, jax.tree.map(lambda x: jnp.stack([x, x]), stored), plan, mesh=mesh)
    with pytest.raises(
        ValueError, match="collective does not read rhs_layout='sliced', only meshslice"
    ):
        ms.check(plan_of("sliced", algorithm="collective"), M, N, K, (2, 4))
    with pytest.raises(ValueError, match=r"grad_lhs.slice_count is 6.*rhs_layout 'sliced' needs 3"):
        ms.LayerPlan(forward=plan, grad_lhs=plan_of("sliced", "ls", slice_count=6))
    with pytest.raises(ValueError, match="loop='rolled' runs slices that are alike"):
        ms.check(plan_of("sliced", slice_count=3, loop="rolled"), M, N, K, (2, 4))
