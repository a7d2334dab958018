"""GPT on a plan: values, gradients, dtypes, placements, collectives, refusals."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import meshslice_jax as ms
from meshslice_jax import compat
from meshslice_jax.nn import GPT, GPTBlock, LinenGPTBlock, sharded
from meshslice_jax.nn.gpt import apply_block
from meshslice_jax.nn.layout import block_layout

SEQ = 16
PLAIN = ms.ModelShape(
    name="plain",
    hidden=32,
    heads=4,
    kv_heads=4,
    head_dim=8,
    ffn=64,
    layers=2,
    vocab=32,
    gated=False,
    tied_embeddings=True,
    seq_len=SEQ,
)
GATED = dataclasses.replace(
    PLAIN, name="gated", heads=8, kv_heads=4, head_dim=4, gated=True, tied_embeddings=False
)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, SEQ + 1)).astype(np.int32)
TWIN = {"row_axis": "col", "col_axis": "row"}


def plan_of(mesh_shape, model=PLAIN, data_parallel=1, batch=8, **fields):
    """A ModelPlan; `fields` are of GemmPlan, or layer -> fields under `layers`."""
    layers = fields.pop("layers", {})
    return ms.ModelPlan(
        model=model,
        num_chips=mesh_shape[0] * mesh_shape[1] * data_parallel,
        mesh_shape=mesh_shape,
        data_parallel=data_parallel,
        layers={
            name: ms.LayerPlan(forward=ms.GemmPlan(**(fields | layers.get(name, {}))))
            for name in model.fc_widths
        },
        batch=batch,
        seq_len=SEQ,
        dtype="float32",
    )


def mesh_of(plan):
    if plan.data_parallel == 1:
        return ms.make_mesh(plan.mesh_shape)
    return ms.make_mesh((plan.data_parallel, *plan.mesh_shape), ("data", "row", "col"))


def value_and_grad(plan, **arguments):
    """Loss and natural gradients of a GPT with the same first weights whatever the plan."""
    model = GPT(plan, mesh_of(plan), rngs=nnx.Rngs(3), **arguments)
    graph, weights = nnx.split(model, nnx.Param)

    @jax.jit
    @jax.value_and_grad
    def loss(weights, tokens):
        return nnx.merge(graph, weights).loss(tokens[:, :-1], tokens[:, 1:])

    value, gradient = loss(weights, TOKENS)
    return float(value), jax.tree.map(np.asarray, nnx.to_pure_dict(gradient)), weights


@functools.cache
def reference(model):
    """Loss and gradients written out on one device: no mesh, no scan, no shard_map."""
    plan = plan_of((1, 1), model)
    _, weights = nnx.split(GPT(plan, mesh_of(plan), rngs=nnx.Rngs(3)), nnx.Param)
    weights = jax.tree.map(np.asarray, nnx.to_pure_dict(weights))
    loss = jax.jit(jax.value_and_grad(functools.partial(dense_loss, model)))
    value, gradient = loss(weights, TOKENS[:, :-1], TOKENS[:, 1:])
    return float(value), jax.tree.map(np.asarray, gradient)


def dense_loss(model, weights, tokens, targets):
    def norm(x, p):
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p["scale"] + p["bias"]

    def dense(x, p):
        return jnp.matmul(x, p["kernel"], precision="highest") + p.get("bias", jnp.float32(0))

    table = weights["embedding"]["table"]
    x = table[tokens] + weights["positions"]["table"]
    names = list(model.fc_widths)
    queries = model.heads // model.kv_heads
    for layer in range(model.layers):
        p = jax.tree.map(lambda w, i=layer: w[i], weights["blocks"])
        qkv = dense(norm(x, p["attention_norm"]), p["qkv"])
        qkv = qkv.reshape(*tokens.shape, model.kv_heads, queries + 2, model.head_dim)
        q, k, v = qkv[..., :queries, :], qkv[..., queries, :], qkv[..., queries + 1, :]
        scores = jnp.einsum("bsgqd,btgd->bgqst", q, k) / jnp.float32(np.sqrt(model.head_dim))
        scores = jnp.where(np.tri(SEQ, dtype=bool), scores, -jnp.inf)
        heads = jnp.einsum("bgqst,btgd->bsgqd", jax.nn.softmax(scores), v)
        x = x + dense(heads.reshape(*tokens.shape, -1), p["out"])
        inner = dense(norm(x, p["mlp_norm"]), p[names[2]])
        if model.gated:
            inner = jax.nn.silu(inner[..., 0::2]) * inner[..., 1::2]
        else:
            inner = jax.nn.gelu(inner)
        x = x + dense(inner, p[names[3]])
    x = norm(x, weights["final_norm"])
    head = table.T if model.tied_embeddings else weights["head"]["kernel"]
    logits = jax.nn.log_softmax(jnp.matmul(x, head, precision="highest"))
    return -jnp.take_along_axis(logits, targets[..., None], -1).mean()


def assert_close(found, expected, bound):
    """Loss and every gradient within `bound`, relative to the largest entry of each array."""
    assert abs(found[0] - expected[0]) < bound
    flat = dict(jax.tree_util.tree_leaves_with_path(expected[1]))
    for path, value in jax.tree_util.tree_leaves_with_path(found[1]):
        scale = np.abs(flat[path]).max()
        assert np.abs(value - flat[path]).max() <= bound * scale, jax.tree_util.keystr(path)


# --- values and gradients -----------------------------------------------------------------

QUICK = {
    "twins, rs and ls in one block, relayouts": (
        (2, 2),
        GATED,
        {"layers": {"qkv": TWIN, "out": {"dataflow": "rs"}, "down": {"dataflow": "ls"}}},
    ),
    "replicas": ((2, 2), PLAIN, {"data_parallel": 2, "dataflow": "ls", "slice_count": 2}),
}
MORE = {
    "os, sliced": ((2, 4), PLAIN, {"slice_count": 2}),
    "1x4 is one row": ((1, 4), GATED, {"slice_count": 2}),
    "4x1 is one column": ((4, 1), GATED, {"slice_count": 2}),
    "rs everywhere": ((2, 4), PLAIN, {"dataflow": "rs"}),
    "cannon": ((2, 2), PLAIN, {"algorithm": "cannon"}),
    "summa": ((2, 4), GATED, {"algorithm": "summa"}),
    "wang": ((2, 4), PLAIN, {"algorithm": "wang", "dataflow": "ls"}),
    "fsdp": ((2, 4), GATED, {"algorithm": "fsdp"}),
    "tp1d": (
        (2, 2),
        PLAIN,
        {
            "algorithm": "tp1d",
            "dataflow": "rs",
            "layers": {"out": {"split": "row"}, "ff2": {"split": "row"}},
        },
    ),
    "replicas of fsdp": ((2, 2), PLAIN, {"algorithm": "fsdp", "data_parallel": 2}),
    "one chip": ((1, 1), GATED, {}),
}


def check_case(mesh_shape, model, fields, **arguments):
    found = value_and_grad(plan_of(mesh_shape, model, **fields), **arguments)
    assert_close(found, reference(model), 2e-5)


@pytest.mark.parametrize("case", QUICK.values(), ids=QUICK)
def test_loss_and_gradients_equal_those_of_a_dense_model(case):
    check_case(*case)


@pytest.mark.slow
def test_without_remat_and_scan():
    check_case((4, 1), PLAIN, {"dataflow": "rs"}, remat=False, unroll=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE.values(), ids=MORE)
def test_all_algorithms_and_meshes(case):
    check_case(*case)


def test_bfloat16_compute_keeps_float32_parameters_and_gradients():
    """Bound: a bfloat16 has 8 bits; the loss stays within 2^-8 of its value in float32."""
    value, gradient, weights = value_and_grad(plan_of((2, 2), slice_count=2), dtype=jnp.bfloat16)
    expected, dense = reference(PLAIN)
    assert {str(x.dtype) for x in jax.tree.leaves((gradient, weights))} == {"float32"}
    assert abs(value - expected) < 2**-8 * expected
    for name in ("qkv", "ff2"):
        kernel, exact = gradient["blocks"][name]["kernel"], dense["blocks"][name]["kernel"]
        assert np.linalg.norm(kernel - exact) < 0.03 * np.linalg.norm(exact), name


# --- placements and collectives -----------------------------------------------------------


def collectives(compiled):
    """Operands of each kind of collective in a compiled program; combined ones count apart."""
    found = collections.Counter()
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    text = re.sub(r"/\*.*?\*/", "", compiled.as_text())
    for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        found[kind] += max(1, len(re.findall(r"\w+\[[\d,]*\]", result)))
    return dict(found)


def planned(plan):
    """The collectives of the plan's products, forward and backward, by the schedule."""
    found = collections.Counter()
    for name, layer in plan.layers.items():
        problems = ms.algorithms.layer_problems(plan.problems()[name], layer.forward)
        for part, problem in problems.items():
            ops = ms.schedule(problem, getattr(layer, part), plan.mesh_shape).totals().ops
            for (kind, _), count in ops.items():
                found[kind.replace("_", "-").replace("permute", "collective-permute")] += count
    return dict(found)


def test_compiled_blocks_hold_the_planned_collectives_and_those_of_their_norms():
    """In a scan, as a GPT runs them: outside of loops XLA shares gathers between passes."""
    layers = {"qkv": {"dataflow": "ls"}, "out": {"dataflow": "ls"}}
    plan = plan_of((2, 2), layers=layers, slice_count=2, loop="unrolled")
    blocks = GPTBlock(plan, mesh_of(plan), rngs=nnx.Rngs(0), count=2)
    layout = blocks.layout

    def loss(weights, x):
        step = lambda x, w: (apply_block(layout, w, x), None)  # noqa: E731
        return (jax.lax.scan(step, x, weights)[0] ** 2).sum()

    place = layout.sharding(jax.P("row", None, "col"))
    x = jax.ShapeDtypeStruct((8, SEQ, 32), jnp.float32, sharding=place)
    found = collectives(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(blocks.weights, x).compile())
    # Two norms: two sums over features (forward and backward), scale and bias over tokens;
    # four layers with a bias, summed over tokens. Attention: none.
    expected = planned(plan) | {"all-reduce": 2 * (1 + 1 + 2) + 4}
    # dX and dW of the two LS layers both gather the cotangent, in two slices; XLA does it once.
    expected["all-gather"] -= 2 * 2
    assert found == expected


def test_loss_and_embedding_gather_no_logits():
    plan = plan_of((2, 2), slice_count=2)
    model = GPT(plan, mesh_of(plan), rngs=nnx.Rngs(0))
    graph, weights = nnx.split(model, nnx.Param)
    assert model.embedding.table[...].sharding.spec == jax.P("col", "row")
    assert model.blocks.qkv.kernel[...].sharding.spec == jax.P(None, "row", "col")
    compiled = jax.jit(lambda w, t: nnx.merge(graph, w)(t)).lower(weights, TOKENS[:, :-1]).compile()
    assert compiled.output_shardings.spec == jax.P("row", None, "col")
    shapes = re.findall(r"f32\[([\d,]+)\]\S* all-gather", compiled.as_text())
    assert shapes and all(
        int(np.prod([int(n) for n in s.split(",")])) < 8 * SEQ * 32 for s in shapes
    )


@pytest.mark.parametrize("joined", [False, True], ids=["one process", "several"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedding_reduce_scatters_but_between_processes_it_exchanges(
    monkeypatch, joined, dtype
):
    """Forward and transposed, bit for bit: integers, of which bfloat16 holds the sums."""
    monkeypatch.setattr(compat, "has_joined", lambda: joined)
    plan = plan_of((2, 4))
    layout = block_layout(plan, mesh_of(plan))
    random, tokens = np.random.default_rng(0), TOKENS[:, :-1]
    table = random.integers(-3, 4, (32, 32)).astype(dtype)
    ct = random.integers(-1, 2, (*tokens.shape, 32)).astype(dtype)

    def both(table, ct):
        rows, transposed = jax.vjp(lambda table: sharded.embed(tokens, table, layout), table)
        return rows, *transposed(ct)

    step = jax.jit(both).lower(table, ct).compile()
    rows, gradient = (np.asarray(x) for x in step(table, ct))
    assert (rows == table[tokens]).all()
    sums = np.zeros((32, 32), np.float32)
    np.add.at(sums, tokens, ct.astype(np.float32))
    assert abs(sums).max() < 256 and (gradient == sums.astype(dtype)).all()
    kinds = collectives(step)
    assert ("reduce-scatter" in kinds, "all-to-all" in kinds) == (not joined, joined)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["os, sliced", "twins, rs and ls in one block, relayouts"])
def test_between_processes_nothing_in_a_loss_and_its_gradient_reduce_scatters(monkeypatch, case):
    mesh_shape, model, fields = (QUICK | MORE)[case]
    monkeypatch.setattr(compat, "has_joined", lambda: True)
    jax.clear_caches()  # products that were traced in one process
    plan = plan_of(mesh_shape, model, **fields)
    graph, weights = nnx.split(GPT(plan, mesh_of(plan), rngs=nnx.Rngs(3)), nnx.Param)

    def loss(weights, tokens):
        return nnx.merge(graph, weights).loss(tokens[:, :-1], tokens[:, 1:])

    step = jax.jit(jax.value_and_grad(loss)).lower(weights, TOKENS).compile()
    jax.clear_caches()
    assert "reduce-scatter" not in step.as_text() and collectives(step)["all-to-all"] > 0
    value, gradient = step(weights, TOKENS)
    found = float(value), jax.tree.map(np.asarray, nnx.to_pure_dict(gradient))
    assert_close(found, reference(model), 2e-5)


# --- linen --------------------------------------------------------------------------------


def test_the_linen_block_is_the_nnx_block():
    plan = plan_of((2, 2), slice_count=2)
    mesh = mesh_of(plan)
    block = GPTBlock(plan, mesh, rngs=nnx.Rngs(0))
    x = np.random.default_rng(1).normal(size=(8, SEQ, 32)).astype(np.float32)
    linen_block = LinenGPTBlock(plan, mesh)
    variables = jax.jit(linen_block.init)(jax.random.key(0), x)
    own = linen.unbox(variables["params"])
    assert jax.tree.structure(own) == jax.tree.structure(block.weights)
    assert variables["params"]["qkv"]["kernel"].names == ("row", "col")
    assert linen_block == LinenGPTBlock(plan, mesh) and hash(linen_block) is not None
    found = jax.jit(linen_block.apply)({"params": block.weights}, x)
    assert (found == jax.jit(lambda w, x: block(x))(0, x)).all()


# --- refusals -----------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_all_at_once():
    odd = dataclasses.replace(PLAIN, heads=3, kv_heads=3, vocab=33)
    plan = plan_of((2, 4), dataclasses.replace(odd, head_dim=16, hidden=48), batch=3)
    with pytest.raises(ValueError) as error:
        GPT(plan, mesh_of(plan), rngs=nnx.Rngs(0))
    for words in (
        "batch = 3 is not divisible by mesh axis 'row' of size 2 (whole sequences of",
        "kv_heads = 3 is not divisible by mesh axis 'col' of size 4 (whole groups of heads)",
        "vocab = 33 is not divisible by mesh axis 'col' of size 4",
        "another mesh_shape",
    ):
        assert words in str(error.value)


def test_other_refusals():
    plan = plan_of((2, 2))
    with pytest.raises(ValueError, match=r"for a 2x2 mesh .* and the mesh is \{'row': 1, 'col': 2"):
        block_layout(plan, ms.make_mesh((1, 2)))
    modelled = dataclasses.replace(plan, block_schedule=ms.OVERLAPPED_BLOCK)
    with pytest.raises(NotImplementedError, match="allow_modelled=False"):
        block_layout(modelled, mesh_of(plan))
    model = GPT(plan, mesh_of(plan), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="batch = 5 is not divisible"):
        model(np.zeros((5, SEQ), np.int32))
    with pytest.raises(ValueError, match="length 17, and the model has seq_len = 16"):
        model(np.zeros((8, SEQ + 1), np.int32))


def test_of_an_explicit_mesh_the_devices_are_used_and_one_in_context_is_refused():
    plan = plan_of((2, 2), slice_count=2)
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("row", "col"), axis_types=explicit)
    block = GPTBlock(plan, mesh, rngs=nnx.Rngs(0))
    assert block.layout == block_layout(plan, mesh_of(plan))
    x = jax.device_put(np.ones((8, SEQ, 32), np.float32), jax.NamedSharding(mesh, jax.P("row")))
    assert jax.jit(lambda x: block(x))(x).sharding.mesh == mesh_of(plan)
    with jax.set_mesh(mesh):
        with pytest.raises(NotImplementedError, match=r"make and call it outside of that"):
            block(x)
        with pytest.raises(NotImplementedError, match=r"or under jax.set_mesh\(ms.make_mesh"):
            block_layout(plan, mesh)


def test_explain_shows_every_product_of_a_gpt(capsys):
    plan = plan_of((2, 2), slice_count=2)
    model = GPT(plan, mesh_of(plan), rngs=nnx.Rngs(0))
    found = ms.nn.explain(model, TOKENS[:, :-1], strict=True)
    names = [row.product.layer for row in found.rows]
    assert names == ["qkv", "out", "ff1", "ff2", "head"]
    assert not found.replicated and not found.trace.others
    assert "meshslice os S=2 on 2x2" in capsys.readouterr().out
