"""Gathers that wait for those of the slice before, and what is computed all the same."""

import functools
import re

import jax
import numpy as np
import pytest

import meshslice_jax as ms
from meshslice_jax import collectives, compat


def product(order, flow="os", loop="unrolled", mesh=(2, 2)):
    plan = ms.GemmPlan(dataflow=flow, slice_count=4, loop=loop, gather_order=order)
    return jax.jit(functools.partial(ms.matmul, plan=plan, mesh=ms.make_mesh(mesh)))


def operands(size=32):
    random = np.random.default_rng(0)
    return [random.standard_normal((size, size), dtype=np.float32) for _ in range(2)]


@pytest.mark.parametrize("flow", ["os", "ls", "rs"])
def test_tied_gathers_change_no_bit_and_spread_no_nan(flow):
    lhs, rhs = operands()
    # Where ties take their element from, and somewhere else; an infinity as well.
    lhs[0, 0], lhs[16, 16], rhs[0, 0], rhs[5, 7] = np.nan, np.inf, np.nan, np.nan
    orders = ("free", "tied", "serial")
    free, tied, serial = (np.asarray(product(order, flow)(lhs, rhs)) for order in orders)
    assert free.tobytes() == tied.tobytes() == serial.tobytes()
    assert 0 < np.isnan(tied).sum() < tied.size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8", "bool"])
def test_a_tie_is_exact_in_every_dtype(dtype):
    x = np.arange(6).reshape(2, 3).astype(jax.numpy.dtype(dtype))
    for value in (0, 1, 2):
        found = jax.jit(collectives.tie)(x, np.full((4,), value, jax.numpy.dtype(dtype)))
        assert np.asarray(found).tobytes() == x.tobytes()


def lines(text):
    """Of each collective of a compiled program, how many collectives and products it waits for."""
    operands, ops = {}, {}
    for name, op, call in re.findall(r"^ *(?:ROOT )?%([\w.-]+) = \S+ ([\w-]+)\((.*)$", text, re.M):
        operands[name] = re.findall(r"%([\w.-]+)", call)
        ops[name] = "product" if "/product" in call and op in ("dot", "fusion") else op

    @functools.cache
    def before(name):
        direct = operands.get(name, ())
        return frozenset(direct).union(*(before(other) for other in direct))

    def count(name, kinds):
        return sum(ops.get(other) in kinds for other in before(name))

    moves = {"all-gather": "G", "reduce-scatter": "S"}
    found = [
        (count(name, moves), moves[op], count(name, ("product",)))
        for name, op in ops.items()
        if op in moves
    ]
    return [behind for behind, *_ in sorted(found)], " ".join(
        f"{kind}{products}" for _, kind, products in sorted(found)
    )


@pytest.mark.parametrize(
    "flow, order, line",
    [
        ("os", "free", "G0 G0 G0 G0 G0 G0 G0 G0"),
        ("os", "tied", "G0 G0 G0 G0 G0 G0 G0 G0"),
        ("os", "serial", "G0 G0 G1 G1 G2 G2 G3 G3"),
        ("rs", "tied", "G0 G0 S1 G1 S2 G2 S3 S4"),
        ("rs", "serial", "G0 S1 G1 S2 G2 S3 G3 S4"),
    ],
)
def test_the_compiler_keeps_the_line(flow, order, line):
    """Letters are collectives, numbers the products that they wait for."""
    text = product(order, flow).lower(*operands()).compile().as_text()
    behind, found = lines(text)
    assert found == line
    assert behind == (list(range(8)) if order != "free" else [0] * 8)


def test_what_an_order_cannot_be_combined_with():
    rolled = ms.GemmPlan(slice_count=4, loop="rolled", gather_order="tied")
    with pytest.raises(ValueError, match="gather_order='tied' is unrolled; loop='rolled'"):
        ms.check(rolled, 32, 32, 32, (2, 2))
    ringed = ms.GemmPlan(dataflow="ls", slice_count=4, reduce_scatter="ring", gather_order="serial")
    with pytest.raises(ValueError, match="'serial' orders reduce_scatter='native' only"):
        ms.check(ringed, 32, 32, 32, (2, 2))


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=str)
def test_between_cpu_processes_a_reduce_scatter_is_an_exchange_and_a_sum(mesh, monkeypatch):
    lhs, rhs = (np.sign(x).astype(np.float32) for x in operands(48))
    plan = ms.GemmPlan(algorithm="collective", dataflow="ls")
    monkeypatch.setattr(compat, "has_joined", lambda: True)
    function = jax.jit(functools.partial(ms.matmul, plan=plan, mesh=ms.make_mesh(mesh)))
    compiled = function.lower(lhs, rhs).compile()
    text = compiled.as_text()
    assert " all-to-all(" in text and " reduce-scatter(" not in text
    placed = [
        jax.device_put(x, sharding)
        for x, sharding in zip((lhs, rhs), compiled.input_shardings[0], strict=True)
    ]
    assert (np.asarray(compiled(*placed)) == lhs @ rhs).all()
    jax.clear_caches()  # nothing that was traced like this is used by others
