"""Every caller of a product in Flax gets what `lax.dot_general` gives, bit for bit."""

import functools
import itertools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshslice_jax as ms
from flax_callers import CALLERS, arguments, support_table, value_and_gradients
from meshslice_jax import product_log

MESHES = {
    "2x4": ((2, 4), ("row", "col")),
    "2x2": ((2, 2), ("row", "col")),
    "1x4": ((1, 4), ("row", "col")),
    "4x1": ((4, 1), ("row", "col")),
    "data": ((2, 2, 4), ("data", "row", "col")),
}
#: Flattening does not depend on the algorithm: all plans run these, one plan runs all.
FEW = tuple(
    caller
    for caller in CALLERS
    if caller.name in ("linen.Dense, odd sizes", "nnx.LinearGeneral((3, 8), 24, axis=(-2, -1))")
)


def case(algorithm, dataflow, mesh):
    """The product of a plan on a mesh, or None where the algorithm has none."""
    shape, names = MESHES[mesh]
    found = ms.ALGORITHMS[algorithm]
    if dataflow not in found.forward_dataflows or (algorithm == "cannon" and mesh != "2x2"):
        return None
    plan = ms.GemmPlan(
        algorithm=algorithm,
        dataflow=dataflow,
        slice_count=2 if algorithm == "meshslice" else 1,
        batch_axes=tuple(name for name in names if name == "data"),
    )
    made = ms.make_mesh(shape, names)
    return ms.dot_general(plan, mesh=made, pad=True, on_unsupported="dense")


@functools.cache
def expected(callers):
    given = [arguments(caller, caller.build(jax.lax.dot_general)[0]) for caller in callers]
    return given, value_and_gradients(callers, jax.lax.dot_general)(given)


def conforms(callers, product):
    given, want = expected(callers)
    found = value_and_gradients(callers, product)(given)
    flat = [jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (found, want)]
    for (keys, got), (_, right) in zip(*flat, strict=True):
        assert got.dtype == right.dtype and got.shape == right.shape, keys
        assert (np.asarray(got) == np.asarray(right)).all(), (keys, product.plan.forward)


def test_every_caller_daily():
    conforms(CALLERS, case("meshslice", "os", "2x4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "dataflow"), [("2x2", "ls"), ("1x4", "rs"), ("4x1", "ls"), ("data", "rs")]
)
def test_every_caller_on_other_meshes(mesh, dataflow):
    conforms(CALLERS, case("meshslice", dataflow, mesh))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ms.ALGORITHMS)
def test_every_algorithm_dataflow_and_mesh(algorithm):
    for dataflow, mesh in itertools.product(ms.Dataflow, MESHES):
        if (product := case(algorithm, dataflow, mesh)) is not None:
            # Rings unroll into large programs: one caller is enough for them.
            conforms(FEW[:1] if algorithm in ("wang", "summa") else FEW, product)
            jax.clear_caches()


def test_only_batch_dimensions_fall_back():
    product, fallen = case("meshslice", "os", "2x4"), []
    for caller in CALLERS:
        params, function = caller.build(product)
        with product_log.recording() as log:
            jax.eval_shape(function, params, jax.ShapeDtypeStruct(caller.shape, jnp.float32))
        assert log, caller.name
        fallen += [caller.name for p in log if p.plan is None]
    assert fallen == ["linen.DenseGeneral(batch_dims=(0,))"]


def test_attention_with_a_softmax_agrees_to_rounding():
    # Sums of 24 products and a softmax: 16 units in the last place of the largest gradient.
    product = case("meshslice", "os", "2x4")
    x = jax.random.normal(jax.random.key(1), (4, 4, 24))
    params = jax.jit(nn.MultiHeadDotProductAttention(3).init)(jax.random.key(0), x)
    found = []
    for f in (product, jax.lax.dot_general):
        module = nn.MultiHeadDotProductAttention(3, qkv_dot_general=f, out_dot_general=f)
        loss = lambda p, x, m=module: (m.apply(p, x) ** 2).sum()  # noqa: E731
        found.append(jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(params, x)))
    bound = 16 * np.finfo(np.float32).eps * max(np.abs(want).max() for want in found[1])
    for got, want in zip(*found, strict=True):
        assert np.abs(got - want).max() <= bound


def test_the_documentation_shows_this_table():
    text = (Path(__file__).parents[1] / "docs" / "flax.md").read_text()
    assert support_table() in text, "run python tests/flax_callers.py and paste its table"
