"""Where and how matmul is called: meshes, contexts, placements, transformations."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshslice_jax as ms
from reference import derivatives, small_integers

LHS, RHS = small_integers(3, 16, 24), small_integers(4, 24, 32)
(OUT, GRAD_LHS, GRAD_RHS, *_), _bound = derivatives(LHS, RHS)
EXPECTED = (OUT, GRAD_LHS, GRAD_RHS)

PLANS = {
    "os": ms.GemmPlan(algorithm="meshslice", dataflow="os", slice_count=3),
    "ls": ms.GemmPlan(algorithm="meshslice", dataflow="ls", slice_count=2),
    "rs": ms.GemmPlan(algorithm="wang", dataflow="rs"),
}


def mesh_of(kind: str, extra: int = 0) -> Mesh:
    """A 2x4 mesh, Auto or Explicit, with a further axis "data" of `extra` if that is not 0."""
    shape, names = ((extra, 2, 4), ("data", "row", "col")) if extra else ((2, 4), ("row", "col"))
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=types, devices=jax.devices()[: np.prod(shape)])


def step(plan, mesh=None):
    """(lhs, rhs) -> out and both gradients of sum(out ** 2)."""

    def loss(lhs, rhs):
        out = ms.matmul(lhs, rhs, plan, mesh=mesh)
        return (out**2).sum(), out

    def function(lhs, rhs):
        (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(lhs, rhs)
        return (out, *grads)

    return function


def same(found, expected=EXPECTED):
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape and (np.asarray(got) == want).all()


@pytest.mark.parametrize("how", ["argument", "set_mesh", "both", "legacy"])
@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("dataflow", PLANS)
def test_meshes_under_jit_with_operands_never_placed(dataflow, kind, extra, how):
    mesh, plan = mesh_of(kind, extra), PLANS[dataflow]
    given = mesh if how in ("argument", "both") else None
    run = jax.jit(step(plan, given))
    if how == "argument":
        same(run(LHS, RHS))
    elif how == "legacy":
        with pytest.warns(DeprecationWarning, match="with mesh"):
            mesh.__enter__()
        try:
            same(run(LHS, RHS))
        finally:
            mesh.__exit__(None, None, None)
    else:
        with jax.set_mesh(mesh):
            same(run(LHS, RHS))


@pytest.mark.parametrize("how", ["argument", "set_mesh"])
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("dataflow", ["ls"])
def test_eagerly(dataflow, kind, extra, how):
    mesh, plan = mesh_of(kind, extra), PLANS[dataflow]
    if how == "argument":
        same(step(plan, mesh)(LHS, RHS))
        return
    with jax.set_mesh(mesh):
        same(step(plan)(LHS, RHS))


@pytest.mark.parametrize("spec", [P("row", "col"), P("col"), P(), P(("row", "col"))], ids=str)
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_operands_placed_in_any_way(kind, extra, spec):
    mesh, plan = mesh_of(kind, extra), PLANS["ls"]
    lhs, rhs = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (LHS, RHS))
    same(jax.jit(step(plan, mesh))(lhs, rhs))
    same([ms.matmul(lhs, rhs, plan, mesh=mesh)], [OUT])
    with jax.set_mesh(mesh):
        same(jax.jit(step(plan))(lhs, rhs))
        same(step(plan)(lhs, rhs))


def test_operands_on_another_device_are_moved():
    lhs = jax.device_put(LHS, jax.devices()[9])
    same([ms.matmul(lhs, RHS, PLANS["os"], mesh=mesh_of("auto"))], [OUT])


@pytest.mark.parametrize("order", [("data", "row"), ("row", "data")], ids=str)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_an_operand_sharded_over_an_axis_that_is_not_named(kind, order):
    mesh, plan = mesh_of(kind, 2), PLANS["ls"]
    lhs = jax.device_put(LHS, NamedSharding(mesh, P(order, "col")))
    with jax.set_mesh(mesh):
        same(jax.jit(step(plan))(lhs, RHS))


def kinds_across_data(text: str) -> set[str]:
    """Kinds of collectives that exchange data between the two replicas of 8 devices."""
    found = set()
    for line in text.split("\n"):
        match = re.search(r" (all-gather|all-reduce|reduce-scatter|collective-permute)\(", line)
        if match is None:
            continue
        if named := re.search(r"replica_groups=mesh\[.*?\] \{(.*?)\}", line):  # newer XLA
            across = "data" in named.group(1)
        else:
            groups = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line)
            assert groups is not None, line
            sets = re.findall(r"\{([\d,]*)\}", groups.group(1))
            across = any(len({int(n) // 8 for n in group.split(",")}) > 1 for group in sets)
        if across:
            found.add(match.group(1))
    return found


@pytest.mark.parametrize("how", ["argument", "set_mesh"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("dataflow", PLANS)
def test_data_parallel_replicas(dataflow, kind, how):
    """m over a data axis: only the gradient of the weight crosses it, in one all-reduce."""
    mesh = mesh_of(kind, 2)
    plan = dataclasses.replace(PLANS[dataflow], batch_axes=("data",))
    places = [NamedSharding(mesh, spec) for spec in ms.placements(plan)]
    assert "data" in str(places[0].spec) and "data" not in str(places[1].spec)
    lhs, rhs = jax.device_put(LHS, places[0]), jax.device_put(RHS, places[1])
    with jax.set_mesh(mesh) if how == "set_mesh" else contextlib.nullcontext():
        run = jax.jit(step(plan, mesh), out_shardings=(places[2], places[0], places[1]))
        same(run(lhs, rhs))
        same(jax.jit(step(plan, mesh))(LHS, RHS))
        text = run.lower(lhs, rhs).compile().as_text()
    assert kinds_across_data(text) == {"all-reduce"}


@pytest.mark.parametrize("dataflow", PLANS)
def test_second_gradients_of_data_parallel_replicas(dataflow):
    mesh = mesh_of("auto", 2)
    plan = dataclasses.replace(PLANS[dataflow], batch_axes=("data",))

    def second(lhs, rhs):
        _, grad_lhs, grad_rhs = step(plan, mesh)(lhs, rhs)
        return (grad_lhs**2).sum() + (grad_rhs**2).sum()

    same(jax.jit(jax.grad(second, (0, 1)))(LHS, RHS), derivatives(LHS, RHS)[0][3:])


def test_replicas_that_do_not_divide_m():
    plan = ms.GemmPlan(batch_axes=("data",))
    with pytest.raises(ValueError, match="m = 15 is not divisible by batch axes 'data' of size 2"):
        ms.matmul(LHS[:15], RHS, plan, mesh=mesh_of("auto", 2))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dataflow", PLANS)
def test_inside_a_callers_shard_map_over_another_axis(dataflow, dtype, kind):
    mesh, plan = mesh_of(kind, 2), PLANS[dataflow]

    def outer(lhs, rhs):
        inner = jax.shard_map(
            lambda a, b: ms.matmul(a, b, plan),
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
            axis_names={"data"},
        )
        out = inner(lhs, rhs)
        return (out.astype(jnp.float32) ** 2).sum(), out

    lhs = jax.device_put(LHS.astype(dtype), NamedSharding(mesh, P("data")))
    rhs = jax.device_put(RHS.astype(dtype), NamedSharding(mesh, P()))
    (_, out), grads = jax.jit(jax.value_and_grad(outer, (0, 1), has_aux=True))(lhs, rhs)
    assert out.dtype == dtype and all(g.dtype == dtype for g in grads)
    same((out, *grads), tuple(x.astype(dtype).astype(np.float32) for x in EXPECTED))


@pytest.mark.parametrize("batch_axes", [(), ("data",)], ids=str)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("how", ["argument", "set_mesh"])
def test_two_layers_of_weights_never_placed(how, kind, batch_axes):
    mesh = mesh_of(kind, 2 if batch_axes else 0)
    plans = [ms.GemmPlan(dataflow=d, slice_count=2, batch_axes=batch_axes) for d in ("os", "ls")]
    weights = [small_integers(8, 24, 32, density=0.1), small_integers(9, 32, 16, density=0.1)]

    def loss(product, first, second):
        return (product(jax.nn.relu(product(LHS, first, 0)), second, 1) ** 2).sum()

    run = functools.partial(loss, lambda a, b, i: ms.matmul(a, b, plans[i], mesh=mesh))
    wanted = jax.grad(functools.partial(loss, lambda a, b, i: a @ b), (0, 1))(*weights)
    assert all(np.abs(x).max() > 0 for x in wanted)
    with jax.set_mesh(mesh) if how == "set_mesh" else contextlib.nullcontext():
        same(jax.jit(jax.grad(run, (0, 1)))(*weights), wanted)
        same(jax.grad(run, (0, 1))(*weights), wanted)


def test_operands_on_explicit_axes_and_results_of_others_do_not_mix_out_of_context():
    mesh, plan = mesh_of("explicit"), ms.GemmPlan(dataflow="ls")
    placed = jax.device_put(np.ones((32, 16), np.float32), NamedSharding(mesh, P("col", "row")))

    def two_layers(weight):
        return ms.matmul(ms.matmul(LHS, RHS, plan, mesh=mesh), weight, plan, mesh=mesh)

    with pytest.raises(ValueError, match=r"work under jax\.set_mesh\(mesh\), or place all"):
        two_layers(placed)
    with jax.set_mesh(mesh):
        same([two_layers(placed)], [OUT @ np.ones((32, 16), np.int64)])


def test_an_auto_mesh_for_operands_on_explicit_axes_of_the_same_devices():
    plan = PLANS["ls"]
    lhs = jax.device_put(LHS, NamedSharding(mesh_of("explicit"), P("row", "col")))
    same(jax.jit(step(plan, mesh_of("auto")))(lhs, RHS))
    with pytest.raises(ValueError, match="an operand is placed on a mesh with Explicit axes"):
        ms.matmul(lhs, RHS, plan, mesh=ms.make_mesh((4, 2)))


@pytest.mark.parametrize(
    "types", ["EAA", "AEE", "AEA", "EEA"], ids=lambda types: f"data,row,col={types}"
)
def test_meshes_of_mixed_axis_types_in_context(types):
    kinds = {"E": AxisType.Explicit, "A": AxisType.Auto}
    mesh = jax.make_mesh((2, 2, 4), ("data", "row", "col"), tuple(kinds[t] for t in types))
    with jax.set_mesh(mesh):
        for plan in (PLANS["os"], dataclasses.replace(PLANS["ls"], batch_axes=("data",))):
            same(jax.jit(step(plan))(LHS, RHS))


def test_a_mesh_that_is_none():
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, got \(2, 4\)"):
        ms.matmul(LHS, RHS, PLANS["os"], mesh=(2, 4))


def test_inside_a_shard_map_over_its_own_axes_is_refused():
    mesh = mesh_of("auto")
    with pytest.raises(ValueError, match=r"already manual over \['row', 'col'\]; call it outside"):
        jax.shard_map(
            lambda a, b: (
                ms.matmul(a, b, ms.GemmPlan(), mesh=None)
                if a.shape[1] == b.shape[0]
                else ms.matmul(a, a.T, ms.GemmPlan())
            ),
            mesh=mesh,
            in_specs=(P("row", "col"), P("row", "col")),
            out_specs=P("row", "col"),
        )(np.ones((8, 8), np.float32), np.ones((8, 8), np.float32))


STACKED_LHS = np.stack([LHS, -LHS, np.zeros_like(LHS)])
STACKED_RHS = np.stack([RHS, 2 * RHS, RHS])


@pytest.mark.parametrize("axes", [(0, None), (0, 0), (None, 0)], ids=str)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("dataflow", PLANS)
def test_vmap(dataflow, kind, axes):
    mesh, plan = mesh_of(kind), PLANS[dataflow]
    lhs = STACKED_LHS if axes[0] == 0 else LHS
    rhs = STACKED_RHS if axes[1] == 0 else RHS
    pairs = [
        (lhs if axes[0] is None else lhs[i], rhs if axes[1] is None else rhs[i]) for i in range(3)
    ]
    wanted = [np.stack(x) for x in zip(*(derivatives(a, b)[0][:3] for a, b in pairs), strict=True)]
    same(jax.jit(jax.vmap(step(plan, mesh), axes))(lhs, rhs), wanted)
    with jax.set_mesh(mesh):
        same(jax.jit(jax.vmap(step(plan), axes))(lhs, rhs), wanted)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("dataflow", PLANS)
def test_vmap_over_a_mesh_axis(dataflow, kind):
    mesh, plan = mesh_of(kind, 2), PLANS[dataflow]
    lhs, rhs = STACKED_LHS[:2], STACKED_RHS[:2]
    wanted = [
        np.stack(x)
        for x in zip(
            *(derivatives(a, b)[0][:3] for a, b in zip(lhs, rhs, strict=True)), strict=True
        )
    ]
    run = functools.partial(jax.vmap, spmd_axis_name="data")
    same(jax.jit(run(step(plan, mesh)))(lhs, rhs), wanted)
    with jax.set_mesh(mesh):
        same(jax.jit(run(step(plan)))(lhs, rhs), wanted)


def test_vmap_over_a_captured_operand():
    mesh, plan = mesh_of("auto"), PLANS["os"]
    found = jax.vmap(lambda a: ms.matmul(a, RHS, plan, mesh=mesh))(STACKED_LHS)
    assert (np.asarray(found) == STACKED_LHS @ RHS).all()


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("dataflow", PLANS)
def test_scan_of_remat(dataflow, kind):
    mesh, plan = mesh_of(kind), PLANS[dataflow]
    weights = np.stack([small_integers(s, 24, 24) for s in (5, 6, 7)])

    def loss(product, lhs, weights):
        out, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(product)(x, w), None), lhs, weights)
        return (out**2).sum()

    wanted = jax.grad(functools.partial(loss, jnp.matmul), (0, 1))(LHS, weights)
    assert max(np.abs(x).max() for x in wanted) < 2**24
    placed = jax.device_put(LHS, NamedSharding(mesh, ms.placements(plan)[2]))
    with jax.set_mesh(mesh):
        run = jax.jit(jax.grad(functools.partial(loss, lambda a, b: ms.matmul(a, b, plan)), (0, 1)))
        same(run(LHS, weights), wanted)  # a carry that was never placed
        same(run(placed, weights), wanted)


@pytest.mark.parametrize("argument", [0, 1])
def test_remat_with_one_gradient_dropped_under_vmap(argument):
    mesh, plan = mesh_of("auto"), PLANS["ls"]

    def loss(product, a, b):
        return (jax.checkpoint(product)(a, b) ** 2).sum()

    run = functools.partial(loss, lambda a, b: ms.matmul(a, b, plan, mesh=mesh))
    found = jax.jit(jax.vmap(jax.grad(run, argument)))(STACKED_LHS, STACKED_RHS)
    wanted = jax.vmap(jax.grad(functools.partial(loss, jnp.matmul), argument))(
        STACKED_LHS, STACKED_RHS
    )
    same([found], [wanted])


def test_remat_policies_see_names():
    from jax.ad_checkpoint import checkpoint_name

    mesh, plan = mesh_of("auto"), PLANS["os"]

    def layer(a, b):
        return jnp.sin(checkpoint_name(ms.matmul(a, b, plan, mesh=mesh), "product"))

    policy = jax.checkpoint_policies.save_only_these_names("product")
    _, back = jax.vjp(jax.checkpoint(layer, policy=policy), LHS, RHS)
    sizes = sorted(x.size for x in jax.tree.leaves(back))
    assert sizes == sorted([LHS.size, RHS.size, OUT.size])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_donated_weights(kind):
    mesh, plan = mesh_of(kind), PLANS["ls"]
    places = [NamedSharding(mesh, spec) for spec in ms.placements(plan)]
    weight = jax.device_put(RHS, places[1])

    @functools.partial(jax.jit, donate_argnums=1)
    def update(lhs, rhs):
        return rhs - jax.grad(lambda b: (ms.matmul(lhs, b, plan) ** 2).sum())(rhs)

    with jax.set_mesh(mesh):
        new = update(jax.device_put(LHS, places[0]), weight)
    assert weight.is_deleted() and new.sharding.is_equivalent_to(places[1], 2)
    same([new], [RHS - GRAD_RHS])


def test_gradient_of_a_scalar_inside():
    mesh, plan = mesh_of("auto"), PLANS["rs"]
    found = jax.jit(jax.grad(lambda s: ms.matmul(s * LHS, RHS, plan, mesh=mesh).sum()))(2.0)
    assert float(found) == float(OUT.sum())


def test_jacobian_in_reverse():
    mesh = ms.make_mesh((2, 2))
    a, b = small_integers(1, 4, 8), small_integers(2, 8, 8)
    found = jax.jacrev(lambda b: ms.matmul(a, b, PLANS["ls"], mesh=mesh))(b)
    assert (np.asarray(found) == np.asarray(jax.jacrev(lambda b: a @ b)(b))).all()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jvp(f, (LHS,), (LHS,)),
        lambda f: jax.hessian(lambda x: f(x).sum())(LHS),
        lambda f: jax.linearize(f, LHS)[1](LHS),
    ],
    ids=["jvp", "hessian", "linearize"],
)
def test_forward_mode_is_refused_by_jax(transform):
    mesh = mesh_of("auto")
    with pytest.raises(TypeError, match=r"(?i)forward-mode|custom_vjp"):
        transform(lambda a: ms.matmul(a, RHS, PLANS["os"], mesh=mesh))


def test_export_and_reload():
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialize")
    mesh, plan = ms.make_mesh((2, 2)), PLANS["ls"]
    places = [NamedSharding(mesh, spec) for spec in ms.placements(plan)]
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for x, place in zip((LHS, RHS), places, strict=False)
    ]
    run = jax.jit(lambda a, b: ms.matmul(a, b, plan, mesh=mesh))
    loaded = jax.export.deserialize(jax.export.export(run)(*types).serialize())
    placed = [jax.device_put(x, place) for x, place in zip((LHS, RHS), places, strict=False)]
    same([jax.jit(loaded.call)(*placed)], [OUT])


@pytest.mark.parametrize("names", [("fsdp", "tensor"), ("tensor", "tensor_transpose")], ids=str)
def test_axis_names_are_free(names):
    plan = ms.GemmPlan(dataflow="rs", slice_count=2, row_axis=names[0], col_axis=names[1])
    same(jax.jit(step(plan, ms.make_mesh((2, 4), names)))(LHS, RHS))


def test_meshes_of_equal_shape_and_other_devices():
    plan, run = PLANS["os"], {}
    for start in (0, 4):
        mesh = ms.make_mesh((2, 2), devices=jax.devices()[start : start + 4])
        run[start] = jax.jit(step(plan, mesh))(LHS, RHS)
        same(run[start])
        assert run[start][0].sharding.device_set == set(jax.devices()[start : start + 4])
