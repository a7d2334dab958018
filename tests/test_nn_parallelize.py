"""Models that others wrote, unmodified, on a plan: values, gradients, placements, reports."""

import dataclasses
import io

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshslice_jax as ms
from flax_callers import mixing
from meshslice_jax.nn import rewrite
from meshslice_jax.nn.rules import DEFAULT_RULES, assign
from reference import small_integers

PLANS = {
    "qkv": ms.GemmPlan(slice_count=2),
    "out": ms.GemmPlan(dataflow="ls", slice_count=2),
    "ff1": ms.GemmPlan(algorithm="collective"),
    "ff2": ms.GemmPlan(algorithm="wang", dataflow="rs"),
}
X = small_integers(1, 4, 4, 24)


def mesh():
    return ms.make_mesh((2, 4))


class Conv(nn.Module):
    """A layer without a hook, its kernel stored transposed, as in transformers' GPT-2."""

    features: int

    @nn.compact
    def __call__(self, x, scale=None, train=False):
        assert train is True and scale is None
        kernel = self.param("kernel", nn.initializers.normal(), (self.features, x.shape[-1]))
        return jax.lax.dot_general(x, kernel.T, (((x.ndim - 1,), (0,)), ((), ())))


class Block(nn.Module):
    """Attention, a layer in remat, one in jit, one without a hook, one without a rule."""

    @nn.compact
    def __call__(self, x, _=None):
        x = nn.MultiHeadDotProductAttention(3, attention_fn=mixing, name="attn")(x) % 3
        h = nn.relu(nn.remat(nn.Dense)(32, name="fc1")(x)) % 3
        h = nn.jit(nn.Dense)(32, name="up")(h) % 3
        return Conv(24, name="fc2")(h, train=True) - nn.Dense(24, name="other")(x), None


class Linen(nn.Module):
    """Two blocks in a scan, and one product with a tied embedding."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x = layers(name="layers")(x, None)[0]
        return jnp.dot(x, self.param("table", nn.initializers.normal(), (24, 8)))


class Plain(nnx.Module):
    """A layer without a hook that draws random numbers."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((32, 24)))
        self.noise = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, train=False):
        assert train is True
        return self.noise(x @ self.w[...])


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.attn = nnx.MultiHeadAttention(3, 24, attention_fn=mixing, decode=False, rngs=rngs)
        self.mlp = nnx.List([nnx.Linear(24, 32, rngs=rngs), Plain(rngs)])
        self.mix = nnx.Einsum("bsh,hnd->bsnd", (24, 4, 2), rngs=rngs)

    def __call__(self, x):
        x = self.attn(x) % 3
        x = self.mlp[1](nnx.relu(self.mlp[0](x)) % 3, train=True) % 3
        return self.mix(x)


NNX_RULES = [(r"mlp/0$", "ff1"), (r"mlp/1$", "ff2"), (r"^mix$", "qkv"), *DEFAULT_RULES]


def integers(tree):
    """A tree of the same shapes that holds small integers."""
    leaves, structure = jax.tree.flatten(tree)
    filled = [small_integers(i, *leaf.shape) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, filled)


def same(found, expected):
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert (np.asarray(got) == np.asarray(want)).all()


def test_linen_values_gradients_and_placements():
    module = Linen()
    plain = jax.eval_shape(module.init, jax.random.key(0), X)
    variables = integers(plain)
    model, shardings = ms.nn.parallelize(module, PLANS, mesh(), X)
    assert jax.eval_shape(model.init, jax.random.key(0), X) == plain

    def step(apply):
        def loss(variables, x):
            out = apply(variables, x)
            return (out**2).sum(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    placed = jax.device_put(variables, shardings(variables))
    # The module alone first: nn.jit keeps traces, which must not be taken for ours.
    expected = step(module.apply)(variables, X)
    same(step(model.apply)(placed, X), expected)

    specs = jax.tree.map(lambda s: s.spec, shardings(variables))["params"]
    layers = specs["layers"]
    assert layers["attn"]["query"] == {"bias": P(), "kernel": P(None, "row", None, None)}  # 3 heads
    assert layers["attn"]["out"]["kernel"] == P(None, None, None, "row")
    assert layers["fc1"]["kernel"] == layers["up"]["kernel"] == P(None, "row", "col")
    assert layers["fc2"]["kernel"] == P(None, "col", "row")  # stored transposed
    assert layers["other"]["kernel"] == specs["table"] == P()
    moments = shardings(jax.eval_shape(optax.adam(1e-3).init, variables["params"]))[0].mu
    assert moments["layers"]["fc2"]["kernel"].spec == P(None, "col", "row")


def test_linen_explain_and_strict():
    module, out = Linen(), io.StringIO()
    variables = integers(jax.eval_shape(module.init, jax.random.key(0), X))
    model, shardings = ms.nn.parallelize(module, PLANS, mesh(), X)
    found = ms.nn.explain(model, variables, X, file=out)
    assert str(found) + "\n" == out.getvalue()
    names = [row.product.layer for row in found.rows]
    block = ("attn/query", "attn/key", "attn/value", "attn/out", "fc1", "up", "fc2", "other")
    assert names == [*(f"layers/{name}" for name in block), ""]
    assert found.rows[-1].product.path == "table" and found.rows[-1].product.plan is None
    rows = dict(zip(block, found.rows[:-1], strict=True))
    assert rows["fc2"].product.plan.forward.algorithm == "wang"
    assert rows["attn/out"].product.problem == ms.GemmProblem(m=16, n=24, k=24)
    assert [p.path for p in found.trace.fallbacks] == ["layers/other", "table"]
    assert found.trace.others == ()
    problem, plan = rows["fc1"].product.problem, PLANS["ff1"]
    schedule = ms.schedule(problem, plan, (2, 4))
    hardware = ms.hardware_spec("tpu_v4")
    assert rows["fc1"].forward_s == ms.seconds(schedule, problem, hardware).total_s
    assert rows["fc1"].step_s > rows["fc1"].forward_s and rows["fc1"].sent_bytes > 0
    assert ("params/layers/fc2/kernel", 2 * 24 * 32 * 4) in found.replicated
    assert len(found.replicated) == 7
    assert dict(found.unplanned) == {"params/layers/other/kernel": 4608, "params/table": 768}
    text = out.getvalue()
    assert "lax.dot_general: no rule matches its path" in text and "7 of 9 products" in text
    assert "WARNING params/layers/fc2/kernel: 6.14 kB whole on every chip" in text

    placed = jax.device_put(variables, shardings(variables))
    assert not ms.nn.explain(model, placed, X, file=out).replicated
    words = r"2 of 9 products do not run[\s\S]*other: no rule[\s\S]*table: its"
    with pytest.raises(ValueError, match=words):
        ms.nn.explain(model, placed, X, strict=True, file=out)
    with pytest.raises(ValueError, match="do not run on a plan"):
        ms.nn.parallelize(module, PLANS, mesh(), X, strict=True)
    rules = [(r"/other$", None), ("^table$", None), *DEFAULT_RULES]
    ms.nn.parallelize(module, PLANS, mesh(), X, strict=True, rules=rules)


def test_explain_takes_functions_and_says_where_a_profile_has_no_rate():
    op, half = ms.dot_general(PLANS["qkv"], mesh=mesh()), jnp.ones((8, 8), jnp.float16)
    out = io.StringIO()
    found = ms.nn.explain(lambda x: op(x, x, (((1,), (0,)), ((), ()))), half, file=out)
    assert found.rows[0].forward_s is None and found.rows[0].sent_bytes > 0
    assert "no rate" in out.getvalue() and found.rows[0].product.layer == ""


@pytest.mark.slow
def test_nnx_in_place_values_gradients_and_placements():
    def made():
        model = Nnx(nnx.Rngs(0))
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return nnx.merge(graph, integers(params), rest)

    @nnx.jit
    def step(model, x):
        def loss(model, x):
            out = model(x)
            return (out**2).sum(), out

        return nnx.value_and_grad(loss, has_aux=True)(model, x)

    plain, model = made(), made()
    structure, cls = jax.tree.structure(nnx.state(model)), type(model.mlp[1])
    query = model.attn.query
    found = ms.nn.parallelize(model, PLANS, mesh(), X, rules=NNX_RULES)
    assert found is model and model.attn.query is query and isinstance(model.mlp[1], cls)
    assert jax.tree.structure(nnx.state(model)) == structure
    specs = [
        getattr(model.attn.query.kernel[...].sharding, "spec", None),
        model.attn.out.kernel[...].sharding.spec,
        model.mlp[0].kernel[...].sharding.spec,
        model.mlp[1].w[...].sharding.spec,
        model.mix.kernel[...].sharding.spec,
        model.mlp[0].bias[...].sharding.spec,
    ]
    assert specs == [
        P("row", None, None),
        P(None, None, "row"),
        P("row", "col"),
        P("row", "col"),
        P("row", "col", None),
        P(),
    ]
    for _ in range(2):  # the second call: random state was updated
        expected = step(plain, X)
        same(step(model, X), expected)
    explained = ms.nn.explain(model, X, strict=True, file=io.StringIO())
    layers = ["attn/query", "attn/key", "attn/value", "mlp/0", "mlp/1", "mix"]
    assert sorted(row.product.layer for row in explained.rows) == sorted([*layers, "attn/out"])
    assert not explained.replicated

    again = ms.GemmPlan(algorithm="summa")
    ms.nn.parallelize(model, again, mesh(), rules=[(r"attn/", "*"), (r".", None)])
    explained = ms.nn.explain(model, X, file=io.StringIO())
    plans = {row.product.layer: row.product.plan for row in explained.rows}
    assert plans["attn/query"].forward == again and plans["mlp/0"] is None
    assert type(model.mlp[1]) is cls and plans["mlp/1"] is None


def test_equal_nnx_models_trace_once():
    traced = []

    @nnx.jit
    def apply(model, x):
        traced.append(1)
        return model(x)

    for _ in range(2):
        model = nnx.Linear(24, 16, rngs=nnx.Rngs(0))
        apply(ms.nn.parallelize(model, ms.GemmPlan(), mesh()), X)
    assert len(traced) == 1


@pytest.mark.parametrize("flax", ["linen", "nnx"])
def test_a_class_of_products_is_made_only_where_it_is_used(flax):
    made = []

    def products():
        made.append(1)
        return jax.lax.dot_general

    out = io.StringIO()
    for target, count in ((None, 1), ("ff1", 0)):
        rules = [("fc1", target)]
        if flax == "linen":
            module = nn.Dense(24, dot_general_cls=products, name="fc1")
            variables = jax.eval_shape(module.init, jax.random.key(0), X)
            model, _ = ms.nn.parallelize(module, PLANS, mesh(), X, rules=rules)
            inputs = (variables, X)
        else:
            linear = nnx.LinearGeneral(24, 24, dot_general_cls=products, rngs=nnx.Rngs(0))
            model, inputs = nnx.Dict(fc1=linear), (X,)
            ms.nn.parallelize(model, PLANS, mesh(), rules=[("fc1", None)])
            ms.nn.parallelize(model, PLANS, mesh(), rules=rules)
            graph, state = nnx.split(model)
        made.clear()
        if flax == "linen":
            (row,) = ms.nn.explain(model, *inputs, file=out).rows
        else:
            call = lambda s, x, g=graph: nnx.merge(g, s)["fc1"](x)  # noqa: E731
            (row,) = ms.nn.explain(call, state, X, file=out).rows
        assert (row.product.plan is None) == (target is None) and len(made) == count
        assert row.product.layer == ("fc1" if target or flax == "linen" else "")


class Stack(nnx.Module):
    """Layers made by vmap and run by scan and remat."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(24, 24, rngs=rngs))
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(nnx.remat(lambda layer, x: x - layer(x) % 3))(self.layers, x)


def test_nnx_layers_in_a_scan():
    model, call = Stack(nnx.Rngs(0)), nnx.jit(lambda model, x: model(x))
    kernel = small_integers(3, 3, 24, 24)
    model.layers.kernel.set_value(kernel)
    expected = call(model, X)
    ms.nn.parallelize(model, PLANS["qkv"], mesh())
    assert model.layers.kernel.get_value().sharding.spec == P(None, "row", "col")
    same(call(model, X), expected)
    found = ms.nn.explain(model, X, strict=True, file=io.StringIO())
    assert [row.product.layer for row in found.rows] == ["layers"]


def test_explicit_axes():
    explicit = jax.make_mesh((2, 4), ("row", "col"))
    module = nn.Dense(32, name="fc1")
    with jax.set_mesh(explicit):
        model, shardings = ms.nn.parallelize(module, PLANS, explicit, X)
        variables = integers(jax.eval_shape(module.init, jax.random.key(0), X))
        placed = jax.device_put(variables, shardings(variables))
        x = jax.device_put(X, P("row", None, "col"))
        out = jax.jit(model.apply)(placed, x)
        assert jax.typeof(out).sharding.spec == P("row", None, "col")
        assert jax.typeof(placed["params"]["kernel"]).sharding.spec == P("row", "col")
    same(
        out,
        np.einsum("bsh,hn->bsn", X, variables["params"]["kernel"]) + variables["params"]["bias"],
    )


class Wrapper(nn.Module):
    """Named like a layer by those who use it, but its products are those of layers inside."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(24, dot_general=ms.dot_general(PLANS["qkv"], mesh=mesh()))(x)


class Wrapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Wrapper(name="out")(x)


def test_containers_and_layers_that_have_a_plan_already_are_left_alone():
    module = Wrapped()
    model, _ = ms.nn.parallelize(module, PLANS, mesh(), X)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert variables == jax.eval_shape(module.init, jax.random.key(0), X)
    (row,) = ms.nn.explain(model, variables, X, strict=True, file=io.StringIO()).rows
    assert row.product.plan.forward == PLANS["qkv"] and row.product.layer == "out/Dense_0"


def test_abstract_nnx_models_are_placed_too():
    model = nnx.eval_shape(lambda: nnx.Linear(24, 16, rngs=nnx.Rngs(0)))
    ms.nn.parallelize(model, ms.GemmPlan(), mesh())
    assert model.kernel.get_value().sharding.spec == P("row", "col")


def test_a_data_axis_is_found_in_the_mesh():
    replicated = ms.make_mesh((2, 2, 4), ("data", "row", "col"))
    module = nn.Dense(24, name="fc1")
    model, _ = ms.nn.parallelize(module, PLANS["ff1"], replicated, X)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    row = ms.nn.explain(model, variables, X, file=io.StringIO()).rows[0]
    assert row.product.plan.forward.batch_axes == ("data",) and row.product.replicas == 2
    assert row.product.problem.m == 16
    half = ms.GemmProblem(m=8, n=24, k=24)
    schedule = ms.schedule(half, PLANS["ff1"], (2, 4))
    assert row.forward_s == ms.seconds(schedule, half, ms.hardware_spec("tpu_v4")).total_s
    model, _ = ms.nn.parallelize(module, PLANS["ff1"], replicated, X, batch_axes=())
    row = ms.nn.explain(model, variables, X, file=io.StringIO()).rows[0]
    assert row.product.replicas == 1


def test_a_layer_that_cannot_run_is_named_or_falls_back():
    odd = nn.Sequential([nn.Dense(24), nn.Dense(7)])
    plan = ms.GemmPlan(slice_count=2)
    with pytest.raises(ValueError, match="n = 7 is not divisible by mesh axis 'col'") as caught:
        ms.nn.parallelize(odd, plan, mesh(), X)
    assert "in layer 'layers_1'" in caught.value.__notes__
    model, shardings = ms.nn.parallelize(odd, plan, mesh(), X, on_unsupported="dense")
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    found = ms.nn.explain(model, variables, X, file=io.StringIO())
    assert "n = 7 is not divisible" in found.trace.fallbacks[0].reason
    lines = str(found).splitlines()
    assert lines[2].endswith("cannot run on a 2x4 mesh ('row' x 'col')")
    assert sum("n = 7 is not divisible" in line for line in lines) == 2  # rhs, out: a note
    assert shardings(variables)["params"]["layers_1"]["kernel"].spec == P()
    model, shardings = ms.nn.parallelize(odd, plan, mesh(), X, pad=True)
    found = ms.nn.explain(model, variables, X, file=io.StringIO(), strict=True)
    assert found.rows[1].product.trimmed == (16, 7, 24) and "padded from 16, 7, 24" in str(found)
    assert shardings(variables)["params"]["layers_1"]["kernel"].spec == P("row", None)


def test_a_plan_for_chips_that_are_not_there_is_explained():
    plan, auto = ms.tune("gpt3-175b", 256), (jax.sharding.AxisType.Auto,) * 2
    chips = jax.sharding.AbstractMesh(tuple(plan.mesh_shape), ("row", "col"), axis_types=auto)
    layer = nn.Dense(4 * 12288, name="fc1", dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((128, 2048, 12288), jnp.bfloat16)
    model, shardings = ms.nn.parallelize(layer, plan, chips, x, strict=True)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert shardings(variables)["params"]["kernel"].spec == P("row", "col")
    (row,) = ms.nn.explain(model, variables, x, file=io.StringIO()).rows
    forward = plan.predicted.layers["ff1"]["forward"]
    assert row.forward_s == pytest.approx(forward.total_s, rel=1e-12)


def test_rules():
    table = {
        "h/0/attn/c_attn": "qkv",
        "h/0/attn/c_proj": "out",
        "h/0/mlp/c_fc": "ff1",
        "h/0/mlp/c_proj": "ff2",
        "model/layers/0/self_attn/q_proj": "qkv",
        "model/layers/0/self_attn/o_proj": "out",
        "model/layers/0/mlp/gate_proj": "ff1",
        "model/layers/0/mlp/down_proj": "ff2",
        "encoder/layer/1/attention/self/key": "qkv",
        "encoder/layer/1/attention/output/dense": "out",
        "encoder/layer/1/intermediate/dense": "ff1",
        "encoder/layer/1/output/dense": "ff2",
        "layers/3/attention/query_key_value": "qkv",
        "layers/3/attention/dense": "out",
        "layers/3/mlp/dense_h_to_4h": "ff1",
        "block/0/layer/0/SelfAttention/q": "qkv",
        "block/0/layer/0/SelfAttention/o": "out",
        "block/0/layer/1/DenseReluDense/wi_0": "ff1",
        "block/0/layer/1/DenseReluDense/wo": "ff2",
        "attn/query": "qkv",
        "attn/out": "out",
        "lm_head": "lm_head",
        "pooler/dense": None,
        "Dense_0": None,
    }
    plans = {name: ms.GemmPlan(slice_count=i + 1) for i, name in enumerate((*PLANS, "lm_head"))}
    found = assign(plans, None)
    for path, layer in table.items():
        op = found.choose(path, hooked=True).op
        assert (op and op.plan.forward) == (plans[layer] if layer else None), path
    gated = {"gate_up": PLANS["ff1"], "down": PLANS["ff2"]}
    assert assign(gated, None).choose("mlp/up_proj", hooked=True).op.plan.forward == PLANS["ff1"]
    choice = assign(gated, None).choose("lm_head", hooked=True)
    assert choice.op is None and choice.reason == "the plan has no layer 'lm_head'"
    assert assign(gated, None).choose("pooler", hooked=True).chosen
    one = assign(PLANS["ff1"], None)
    assert one.choose("Dense_0", hooked=True).op and not one.choose("Custom_0", hooked=False).op
    direct = assign(PLANS, None, rules=[("x", PLANS["out"])])
    assert direct.choose("x", hooked=True).op.plan.forward == PLANS["out"]
    assert hash(assign(PLANS, None)) == hash(assign(dict(PLANS), None))


def test_what_does_not_belong_together_is_refused():
    module = nn.Dense(24)
    with pytest.raises(ValueError, match="asks for layer 'ffn', and the plan has qkv, out"):
        ms.nn.parallelize(module, PLANS, mesh(), X, rules=[("x", "ffn")])
    with pytest.raises(ValueError, match="is no regular expression"):
        ms.nn.parallelize(module, PLANS, mesh(), X, rules=[("(", "ff1")])
    with pytest.raises(TypeError, match="plan must be a GemmPlan or a LayerPlan"):
        ms.nn.parallelize(module, "os", mesh(), X)
    with pytest.raises(TypeError, match="parameters are known by a call only"):
        ms.nn.parallelize(module, PLANS, mesh())
    with pytest.raises(TypeError, match=r"hold theirs as model\.module"):
        ms.nn.parallelize(lambda x: x, PLANS, mesh(), X)
    with pytest.raises(ValueError, match="strict=True needs the inputs"):
        ms.nn.parallelize(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), PLANS, mesh(), strict=True)
    with pytest.raises(TypeError, match="explain the model that parallelize returned"):
        ms.nn.explain(module, X)
    with pytest.raises(TypeError, match="takes a parallelized model or a function"):
        ms.nn.explain(3, X)
    plan = ms.tune("gpt3-125m", 8, mesh_shape=(2, 4))
    with pytest.raises(ValueError, match="for a 2x4 mesh with axes 'row' and 'col'"):
        ms.nn.parallelize(module, plan, ms.make_mesh((4, 2)), X)
    ms.nn.parallelize(module, dict(plan.layers), ms.make_mesh((4, 2)), X)


class Looped(nn.Module):
    """Its only product is inside a loop."""

    @nn.compact
    def __call__(self, x):
        w = self.param("kernel", nn.initializers.normal(), (24, 24))
        return jax.lax.fori_loop(0, 2, lambda i, x: x @ w, x)


def test_a_layer_with_no_product_to_replace_is_refused():
    with pytest.raises(NotImplementedError, match="has no product of its own parameters") as found:
        ms.nn.parallelize(Looped(name="fc1"), PLANS, mesh(), X, rules=[("", "ff1")])
    assert "rule None" in str(found.value)


def test_rewriting_finds_weights_on_either_side_and_through_jit():
    op = ms.dot_general(ms.GemmPlan(), mesh=ms.make_mesh((2, 2)))
    x, w = small_integers(1, 4, 6, 8), small_integers(2, 8, 4)

    @jax.jit
    def inner(x, w):
        return jnp.einsum("hn,bsh->nbs", w, x, precision=("high", "default"))

    def method(variables, x, flag):
        assert flag == "as it is"
        w = variables["w"].astype(jnp.float32)
        scores = jnp.einsum("bsh,bth->bst", x, x)  # no weight: stays
        return (inner(x, w), scores, x @ w), variables

    found, variables = rewrite.run(
        method, {"w": w}, (x,), {"flag": "as it is"}, op=op, path="p", name_of=lambda keys: "w"
    )
    same(found[0], np.einsum("hn,bsh->nbs", w, x))
    same(found[1], np.einsum("bsh,bth->bst", x, x))
    same(found[2], x @ w)
    same(variables, {"w": w})

    def rematerialised(variables):
        return jax.checkpoint(lambda w: (x @ w) ** 2)(variables["w"]).sum(), variables

    def gradient(function):
        return jax.jit(jax.grad(lambda w: function({"w": w})[0]))(w)

    same(
        gradient(
            lambda v: rewrite.run(
                rematerialised, v, (), {}, op=op, path="p", name_of=lambda keys: "w"
            )
        ),
        gradient(rematerialised),
    )
    traced = ms.nn.explain(
        lambda x: rewrite.run(
            method, {"w": w}, (x,), {"flag": "as it is"}, op=op, path="p", name_of=lambda k: "w"
        )[0],
        x,
        file=io.StringIO(),
    )
    assert [row.product.weight for row in traced.rows] == [("w", (0, 1))]
    assert traced.trace.others == (((4, 6, 8), (4, 6, 8), 1),)


class Hidden(nn.Module):
    """Products of parameters that no hook sees, and one of activations."""

    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(8, 24, name="embed")
        x = nn.Dense(24, name="fc1")(x + embed(jnp.zeros(x.shape[:2], int)))
        x = nn.Einsum((24, 24), "bti,ij->btj", name="ein")(x)
        raw = self.param("raw", nn.initializers.normal(), (24, 2, 12)).reshape(24, 24)
        scale = self.param("scale", nn.initializers.ones, (24,))
        stack = self.param("stack", nn.initializers.normal(), (2, 24, 24))
        x = jnp.einsum("ij,bti->btj", raw * scale, x)
        x = jax.lax.fori_loop(0, 2, lambda i, x: jax.jit(jnp.matmul)(x, stack[i]), x)
        return embed.attend(jnp.einsum("bst,btj->bsj", jnp.einsum("bsi,bti->bst", x, x), x))


def test_products_of_parameters_that_no_hook_sees_are_listed_and_fail_strict():
    module, out = Hidden(), io.StringIO()
    variables = jax.jit(module.init)(jax.random.key(0), X)
    model, _ = ms.nn.parallelize(module, ms.GemmPlan(), mesh(), X)
    found = ms.nn.explain(model, variables, X, file=out)
    hidden = ["ein", "raw", "stack", "embed/embedding"]
    assert [p.path for p in found.trace.fallbacks] == hidden
    assert "1 of 5 products of layers run on a plan" in out.getvalue()
    assert [lhs for lhs, *_ in found.trace.others] == [(4, 4, 24), (4, 4, 4)]
    paths = ("ein/kernel", "embed/embedding", "raw", "stack")
    assert sorted(path for path, _ in found.unplanned) == sorted(f"params/{p}" for p in paths)
    assert "WARNING params/raw: 2.3 kB whole on every chip; its product is on no pl" in str(found)
    with pytest.raises(ValueError, match=r"4 of 5 products[\s\S]*embed/embedding: its layer takes"):
        ms.nn.parallelize(module, ms.GemmPlan(), mesh(), X, strict=True)
    # A function of the model knows its rules too; a rule of a layer or of a parameter will do.
    rules = [("embed$", None), ("^(raw|stack)$", None), ("^ein$", "*"), *DEFAULT_RULES]
    model, _ = ms.nn.parallelize(module, ms.GemmPlan(), mesh(), X, strict=True, rules=rules)
    ms.nn.explain(lambda v, x: model.apply(v, x), variables, X, strict=True, file=out)


def test_products_of_parameters_of_nnx_modules_fail_strict():
    model, x = Plain(nnx.Rngs(0)), jnp.ones((4, 4, 32))
    for rules, words in (
        (None, "w: its layer takes no dot_general, and no rule"),
        ([("zzzz", None), ("^w$", None)], "^rule 'zzzz' matched no layer$"),
    ):
        with pytest.raises(ValueError, match=words):
            ms.nn.parallelize(model, PLANS, mesh(), x, rules=rules, strict=True, train=True)
    ms.nn.parallelize(model, PLANS, mesh(), x, rules=[("^w$", None)], strict=True, train=True)


def test_rules_that_match_or_name_nothing():
    module, rules = nn.Dense(24, name="fc1"), [("zzzz", None), *DEFAULT_RULES]
    model, _ = ms.nn.parallelize(module, PLANS, mesh(), X, rules=rules)
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    found = ms.nn.explain(model, variables, X, file=io.StringIO())
    assert found.trace.unmatched == ("zzzz",) and "rule 'zzzz' matched no layer" in str(found)
    with pytest.raises(ValueError, match=r"^rule 'zzzz' matched no layer$"):
        ms.nn.parallelize(module, PLANS, mesh(), X, rules=rules, strict=True)
    with pytest.raises(ValueError, match="asks for layer 'nolayer', and the plan is one for all"):
        ms.nn.parallelize(module, ms.GemmPlan(), mesh(), X, rules=[("fc1", "nolayer")])
    ms.nn.parallelize(module, ms.GemmPlan(), mesh(), X, rules=[("fc1", "ff1")], strict=True)


@pytest.mark.parametrize("flax", ["linen", "nnx"])
def test_axes_with_other_names(flax):
    other = ms.make_mesh((2, 4), ("x", "y"))
    plan = ms.tune("gpt3-125m", 8, mesh_shape=(2, 4))
    model = (
        nn.Dense(24, name="fc1")
        if flax == "linen"
        else nnx.Dict(fc1=nnx.Linear(24, 24, rngs=nnx.Rngs(0)))
    )
    inputs = (X,) if flax == "linen" else ()
    words = r"row_axis='\w+', col_axis='\w+', and the mesh has the axes 'x', 'y'; .*with_axes"
    for wrong in (plan, plan.layers, ms.GemmPlan()):
        with pytest.raises(ValueError, match=words):
            ms.nn.parallelize(model, wrong, other, *inputs)
    twin = ms.LayerPlan(forward=ms.GemmPlan(row_axis="col", col_axis="row"))
    plan = dataclasses.replace(plan, layers=dict(plan.layers) | {"ff1": twin})
    renamed = ms.nn.with_axes(plan, row="x", col="y")
    assert renamed["ff1"].forward == ms.GemmPlan(row_axis="y", col_axis="x")
    assert renamed["ff1"].grad_lhs.row_axis == "y" and renamed.keys() == plan.layers.keys()
    found = ms.nn.parallelize(model, renamed, other, *inputs)
    if flax == "nnx":
        assert model["fc1"].kernel[...].sharding.spec == P("y", "x")
        return
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert found[1](variables)["params"]["kernel"].spec == P("y", "x")
    explained = ms.nn.explain(found[0], variables, X, file=io.StringIO())
    assert "meshslice os twin S=1 on 2x4" in str(explained)


def test_explain_prices_on_the_profile_of_the_plan():
    module = nn.Dense(3072, name="fc1", dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((4, 2048, 768), jnp.bfloat16)
    plan = ms.tune("gpt3-125m", 8, mesh_shape=(2, 4), hardware="tpu_v5e")
    model, _ = ms.nn.parallelize(module, plan, mesh(), x)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    assert ms.nn.explain(model, variables, x, file=io.StringIO()).hardware == "tpu_v5e"
    given = ms.nn.explain(model, variables, x, hardware="tpu_v4", file=io.StringIO())
    assert given.hardware == "tpu_v4"
