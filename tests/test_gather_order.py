"""Gathers that wait for those of the slice before, and what is computed all the same."""

import functools
import re

import jax
import numpy as np
import pytest

import meshslice_jax as ms
from meshslice_jax import collectives


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
    rolled = np.asarray(product("tied", flow, "rolled")(lhs, rhs))
    assert (np.isnan(rolled) == np.isnan(tied)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8", "bool"])
def test_a_tie_is_exact_in_every_dtype(dtype):
    x = np.arange(6).reshape(2, 3).astype(jax.numpy.dtype(dtype))
    for value in (0, 1, 2):
        found = jax.jit(collectives.tie)(x, np.full((4,), value, jax.numpy.dtype(dtype)))
        assert np.asarray(found).tobytes() == x.tobytes()


def waits(text, for_op):
    """Of each all-gather in a compiled program, how many of some operation it waits for."""
    operands, ops = {}, {}
    for name, op, call in re.findall(r"^ *(?:ROOT )?%([\w.-]+) = \S+ ([\w-]+)\((.*)$", text, re.M):
        operands[name], ops[name] = re.findall(r"%([\w.-]+)", call), op

    @functools.cache
    def before(name):
        direct = operands.get(name, ())
        return frozenset(direct).union(*(before(other) for other in direct))

    gathers = [name for name, op in ops.items() if op == "all-gather"]
    return sorted(sum(ops.get(b) == for_op for b in before(name)) for name in gathers)


def test_the_compiler_sees_the_order_and_does_not_drop_it():
    texts = {
        order: product(order).lower(*operands()).compile().as_text()
        for order in ("free", "tied", "serial")
    }
    assert waits(texts["free"], "all-gather") == [0] * 8
    # Both gathers of a slice wait for the last one of the slice before, and so for all of
    # its line; the other input's line hangs off it.
    assert waits(texts["tied"], "all-gather") == [0, 0, 1, 1, 2, 2, 3, 3]
    assert waits(texts["tied"], "dot") == [0] * 8
    assert waits(texts["serial"], "dot") == [0, 0, 1, 1, 2, 2, 3, 3]
