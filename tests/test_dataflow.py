"""The table against the paper, and the algebra of gradients."""

import doctest

import pytest

from meshslice_jax import dataflow
from meshslice_jax.dataflow import TABLE, Contraction, Dataflow
from meshslice_jax.problem import ROLES, GemmProblem

#: paper.md section 1: placements (mesh axis of each dimension), and the two gradients.
RC, CR = ("row", "col"), ("col", "row")
PAPER = {
    "os": ((RC, RC, RC), ("ls", "ct", "rhs"), ("rs", "lhs", "ct")),
    "ls": ((RC, CR, RC), ("os", "ct", "rhs"), ("rs", "ct", "lhs")),
    "rs": ((CR, RC, RC), ("ls", "rhs", "ct"), ("os", "lhs", "ct")),
}  # fmt: skip


@pytest.mark.parametrize("name", PAPER)
def test_placements_and_gradients_are_the_papers(name):
    contraction = Contraction(dataflow=Dataflow(name))
    places, grad_lhs, grad_rhs = PAPER[name]
    assert tuple(contraction.placement(role) for role in ROLES) == places
    for wrt, expected in (("lhs", grad_lhs), ("rhs", grad_rhs)):
        gradient = contraction.gradient(wrt)
        assert (gradient.contraction.dataflow, *gradient.operands) == expected


@pytest.mark.parametrize("name", PAPER)
def test_the_streamed_dimension_is_the_one_that_the_stationary_matrix_lacks(name):
    contraction = Contraction(dataflow=Dataflow(name))
    assert contraction.streamed not in contraction.indices(contraction.stationary)
    for mover in contraction.movers:
        assert contraction.indices(mover.role)[mover.dim] == contraction.streamed
    assert [mover.axis for mover in contraction.movers] == ["col", "row"]


def gradients(contraction, depth):
    yield contraction
    if depth:
        for wrt in ("lhs", "rhs"):
            yield from gradients(contraction.gradient(wrt).contraction, depth - 1)


@pytest.mark.parametrize("start", Dataflow)
def test_no_pass_of_any_order_moves_a_placed_matrix(start):
    for contraction in gradients(Contraction(dataflow=start), 3):
        for wrt in ("lhs", "rhs"):
            gradient = contraction.gradient(wrt)
            roles = dict(zip(("lhs", "rhs", "out"), (*gradient.operands, wrt), strict=True))
            for role, before in roles.items():
                source = "out" if before == "ct" else before
                assert gradient.contraction.placement(role) == contraction.placement(source)
            old = dict(gradient.labels)
            assert old[gradient.contraction.streamed] == contraction.streamed


@pytest.mark.parametrize("start", Dataflow)
def test_out_has_m_along_rows_in_every_pass(start):
    for contraction in gradients(Contraction(dataflow=start), 2):
        assert contraction.axis("out", "m") == "row" and contraction.axis("out", "n") == "col"


def test_extents_and_dtypes_of_gradients():
    forward = GemmProblem(m=2, n=3, k=5, lhs_dtype="bfloat16", out_dtype="float16")
    lhs = Contraction(dataflow=Dataflow.LS).gradient("lhs").problem(forward)
    assert lhs == GemmProblem(
        m=2, n=5, k=3, lhs_dtype="float16", rhs_dtype="float32", out_dtype="bfloat16"
    )
    rhs = Contraction(dataflow=Dataflow.LS).gradient("rhs").problem(forward)
    assert rhs == GemmProblem(  # the gradient of rhs transposed: n, k of the forward product
        m=3, n=5, k=2, lhs_dtype="float16", rhs_dtype="bfloat16", out_dtype="float32"
    )
    assert lhs.flops == rhs.flops == forward.flops == 60


def test_local_product_of_stored_matrices():
    assert Contraction(dataflow=Dataflow.OS).dimension_numbers() == (
        "lhs", "rhs", (((1,), (0,)), ((), ())),
    )  # fmt: skip
    transposed = Contraction(dataflow=Dataflow.OS, lhs="km", rhs="nk", out="nm")
    assert transposed.dimension_numbers() == ("rhs", "lhs", (((1,), (0,)), ((), ())))


def test_local_extents_keep_the_streamed_index_whole():
    problem = GemmProblem(m=8, n=12, k=20)
    found = {
        d.value: Contraction(dataflow=d).local_extents(problem, rows=2, cols=4) for d in Dataflow
    }
    assert found == {
        "os": {"m": 4, "n": 3, "k": 20},
        "ls": {"m": 4, "n": 12, "k": 5},
        "rs": {"m": 8, "n": 3, "k": 10},
    }


def test_the_table_has_one_row_for_each_role():
    assert {row.stationary for row in TABLE.values()} == set(ROLES)


def test_examples_in_the_text():
    assert doctest.testmod(dataflow).failed == 0
