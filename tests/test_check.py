"""Checks: what is refused says every role, size and axis, and what would fit."""

import dataclasses
import itertools
import pathlib
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshslice_jax as ms
from census import census
from meshslice_jax import algorithms, gemm
from meshslice_jax.algorithms.meshslice import units
from meshslice_jax.problem import GemmProblem
from meshslice_jax.site import find_site

MESH = (2, 4)

TAPERS = re.findall(
    r'(?m)^\| `"(head|ends|graded)"` \| (.*) \|$',
    (pathlib.Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(),
)


@pytest.mark.parametrize(("taper", "row"), TAPERS)
def test_units_of_a_taper_are_those_of_the_docs(taper, row):
    *widths, total = row.split(" | ")
    formula, _, least = total.partition(" where S >= ")
    for count, text in enumerate(widths, 1):
        found = units(ms.GemmPlan(slice_count=count, taper=taper))[1]
        assert ", ".join(map(str, found)) == text
        if count >= int(least or 1):
            factor, less = map(int, formula.split(" S - "))
            assert sum(found) == factor * count - less


def test_every_dimension_at_fault_is_named_at_once():
    plan = ms.GemmPlan(algorithm="collective", dataflow="os", row_axis="x", col_axis="y")
    with pytest.raises(ValueError) as caught:
        ms.check(plan, 3, 6, 10, MESH)
    message = str(caught.value)
    for fault in (
        "lhs dimension m = 3 is not divisible by mesh axis 'x' of size 2",
        "lhs dimension k = 10 is not divisible by mesh axis 'y' of size 4",
        "rhs dimension n = 6 is not divisible by mesh axis 'y' of size 4",
        "out dimension m = 3 is not divisible by mesh axis 'x' of size 2",
        "out dimension n = 6 is not divisible by mesh axis 'y' of size 4",
    ):
        assert fault in message
    assert "rhs dimension k = 10" not in message  # 10 divides by 2


def test_what_would_fit_is_named():
    plan = ms.GemmPlan(algorithm="meshslice", slice_count=5)
    with pytest.raises(ValueError, match="slice_count 5 x block_size 1 does not divide") as caught:
        ms.check(plan, 8, 8, 32, MESH)
    assert "slice_count in 1, 2, 4, 8" in str(caught.value)
    assert "algorithms collective, summa, wang" in str(caught.value)
    with pytest.raises(ValueError, match="mesh shapes 1x8, 2x4") as caught:
        ms.check(ms.GemmPlan(algorithm="collective"), 2, 8, 8, (4, 2))
    with pytest.raises(ValueError, match="nothing of the same extents fits"):
        ms.check(ms.GemmPlan(algorithm="collective"), 7, 7, 7, MESH)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (ms.GemmPlan(algorithm="cannon"), "axis 'row' has size 2, axis 'col' has size 4"),
        (ms.GemmPlan(algorithm="cannon", slice_count=2), "cannon has no slices: slice_count must"),
        (ms.GemmPlan(algorithm="collective", slice_count=2), "collective has no slices"),
        (ms.GemmPlan(algorithm="wang", slice_count=3), "does not divide the ring of 4 chips"),
        (ms.GemmPlan(algorithm="summa", slice_count=3), "does not divide the 4 panels"),
        (ms.GemmPlan(algorithm="summa", packets=3), "packets 3 does not divide both halves"),
        (ms.GemmPlan(algorithm="fsdp", slice_count=3), "does not divide the ring of 8 chips"),
        (ms.GemmPlan(algorithm="fsdp", dataflow="rs"), "no forward product with dataflow 'rs'"),
        (ms.GemmPlan(algorithm="tp1d", dataflow="os"), "no forward product .* it has 'rs'"),
        (ms.GemmPlan(algorithm="tp1d", dataflow="ls"), "no forward product with dataflow 'ls'"),
        (ms.GemmPlan(algorithm="systolic"), "unknown algorithm 'systolic'; there are meshslice"),
        (ms.GemmPlan(algorithm="mesh_slice"), "did you mean 'meshslice'[?] There are meshslice"),
        (ms.GemmPlan(block_size=3), "slice_count 1 x block_size 3 does not divide"),
        (
            ms.GemmPlan(reduce_scatter="ring", scatter_group=3, dataflow="rs"),
            "scatter_group 3 does not divide the 2 chips .* what fits: scatter_group=1 or 2$",
        ),
        (
            ms.GemmPlan(scatter_group=2),
            "2 needs reduce_scatter 'ring', the plan has 'native'; use scatter_group=1$",
        ),
        (
            ms.GemmPlan(algorithm="wang", scatter_group=2),
            "needs ring_form 'whole' or 'one_way', the plan has 'joined'; use scatter_group=1$",
        ),
    ],
    ids=lambda value: "" if isinstance(value, ms.GemmPlan) else value[:25],
)  # fmt: skip
def test_faults_of_algorithms(plan, words):
    words = "(?m)" + words
    with pytest.raises(ValueError, match=words):
        ms.check(plan, 16, 16, 16, MESH)
    with pytest.raises(ValueError, match=words):
        ms.matmul(
            np.ones((16, 16), np.float32),
            np.ones((16, 16), np.float32),
            plan,
            mesh=ms.make_mesh(MESH),
        )


#: A value of each option that is not its default.
SET = {
    "block_size": 2,
    "taper": "head",
    "rhs_layout": "sliced",
    "reduce_scatter": "ring",
    "scatter_group": 2,
    "gather_order": "ordered",
    "loop": "unrolled",
    "ring": "row",
    "ring_form": "whole",
    "split": "row",
    "packets": 2,
}


@pytest.mark.parametrize("name", ms.ALGORITHMS)
def test_options_that_an_algorithm_does_not_read_are_refused(name):
    options = {field for algorithm in ms.ALGORITHMS.values() for field in algorithm.options}
    assert options == set(SET)
    dataflow = ms.ALGORITHMS[name].forward_dataflows[0]
    plain = ms.GemmPlan(algorithm=name, dataflow=dataflow)
    problem, shape = GemmProblem(m=64, n=64, k=64), ms.MeshShape(2, 2)
    for field, value in SET.items():
        plan = dataclasses.replace(plain, **{field: value})
        wrong = list(algorithms.field_faults(plan))
        assert wrong == ([] if field in ms.ALGORITHMS[name].options else [field])
        if not wrong:
            continue
        readers = [one for one, a in ms.ALGORITHMS.items() if field in a.options]
        words = (
            f"{name} does not read {field}={value!r}, only {', '.join(readers)} can: leave it at "
            f"{getattr(plain, field)!r}"
        )
        with pytest.raises(ValueError, match=re.escape(words)):
            ms.check(plan, 64, 64, 64, shape)
        assert not algorithms.fits(problem, plan, shape)
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            ms.schedule(problem, plan, shape)
        assert "what fits: slice_count in 1" in str(caught.value)  # of the plan without it


@pytest.mark.parametrize(("old", "new"), list(itertools.product(ms.ALGORITHMS, repeat=2)))
def test_a_plan_of_everything_runs_with_another_algorithm(old, new):
    full = {field: SET[field] for field in ms.ALGORITHMS[old].options}
    common = {"row_axis": "y", "col_axis": "x", "batch_axes": ("d",), "reduce_dtype": "output"}
    common["dataflow"] = ms.ALGORITHMS[new].forward_dataflows[0]
    plan = ms.GemmPlan(algorithm=old, slice_count=4, **full, **common)
    split = {"split": plan.split} if new == "tp1d" else {}
    other = algorithms.with_algorithm(plan, new)
    assert other == ms.GemmPlan(algorithm=new, **common, **split)
    ms.check(other, 64, 64, 64, (2, 2))


def test_groups_are_of_the_product_whose_output_is_ringed():
    """The forward product of tp1d's column gathers; only its gradient of lhs has groups."""
    plan = ms.GemmPlan(algorithm="tp1d", dataflow="rs", ring_form="whole", scatter_group=2)
    ms.check(plan, 64, 64, 64, (2, 2))
    with pytest.raises(
        ValueError, match=r"grad_lhs: .*(?s:.)*scatter_group 3 does not divide the 4"
    ):
        ms.check(dataclasses.replace(plan, scatter_group=3), 64, 64, 64, (2, 2))


def test_one_dimensional_algorithms_name_the_flattened_ring():
    with pytest.raises(
        ValueError, match=r"m = 4 is not divisible by mesh axis 'row\*col' of size 8"
    ):
        ms.check(ms.GemmPlan(algorithm="fsdp"), 4, 8, 8, MESH)


def test_one_and_two_dimensional_plans_do_not_mix():
    plan = ms.LayerPlan(
        forward=ms.GemmPlan(algorithm="collective", dataflow="os"),
        grad_rhs=ms.GemmPlan(algorithm="fsdp", dataflow="rs"),
    )
    with pytest.raises(ValueError, match="grad_rhs runs 'fsdp', which places matrices otherwise"):
        ms.check(plan, 16, 16, 16, MESH)
    column = ms.GemmPlan(algorithm="tp1d", dataflow="rs", split="column")
    plan = ms.LayerPlan(
        forward=column,
        grad_lhs=dataclasses.replace(column.gradient("lhs"), split="row"),
    )
    with pytest.raises(ValueError, match=r"grad_lhs runs 'tp1d', which .* nor do the two splits"):
        ms.check(plan, 16, 16, 16, MESH)


def test_one_dimensional_algorithms_on_the_same_ring_mix():
    forward = ms.GemmPlan(algorithm="tp1d", dataflow="rs", split="row")
    plan = ms.LayerPlan(
        forward=forward,
        grad_lhs=algorithms.with_algorithm(forward.gradient("lhs"), "fsdp"),
    )
    ms.check(plan, 16, 16, 16, MESH)


def test_negative_extents():
    with pytest.raises(ValueError, match="extent m must be a natural number, got -8"):
        ms.check(ms.GemmPlan(), -8, 8, 8, MESH)
    with pytest.raises(ValueError, match=r"extent k must be a natural number, got 8\.0"):
        ms.legal_slice_counts(ms.GemmPlan(), 8, 8, 8.0, MESH)


@pytest.mark.parametrize("shape", [(0, 2), (-1, -1), (2.0, 2), (2,), (2, 2, 2)], ids=str)
def test_mesh_shapes_that_are_none(shape):
    with pytest.raises(ValueError, match="mesh_shape must be two positive integers"):
        ms.check(ms.GemmPlan(), 8, 8, 8, shape)
    with pytest.raises(ValueError, match="mesh_shape must be two positive integers"):
        ms.legal_slice_counts(ms.GemmPlan(), 8, 8, 8, shape)
    with pytest.raises(ValueError, match="mesh_shape must be two positive integers"):
        ms.schedule(GemmProblem(m=8, n=8, k=8), ms.GemmPlan(), shape)


def test_legal_slice_counts():
    def legal(algorithm, **kw):
        plan = ms.GemmPlan(algorithm=algorithm, dataflow=kw.pop("dataflow", "os"), **kw)
        return ms.legal_slice_counts(plan, 16, 16, 96, MESH)

    assert legal("meshslice") == (1, 2, 3, 4, 6, 8, 12, 24)  # gcd(96 / 2, 96 / 4) = 24
    assert legal("meshslice", block_size=8) == (1, 3)
    assert legal("meshslice", dataflow="ls") == (1, 2, 4)  # n = 16
    assert legal("collective") == (1,)
    assert legal("wang") == legal("summa") == (1, 2, 4)
    assert legal("wang", ring="row") == (1, 2)
    assert legal("cannon") == ()
    assert legal("fsdp") == (1, 2, 4, 8)
    assert ms.legal_slice_counts(ms.GemmPlan(), 7, 7, 7, MESH) == ()


EXTENTS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24])


@settings(max_examples=200, deadline=None)
@given(
    algorithm=st.sampled_from(sorted(ms.ALGORITHMS)),
    dataflow=st.sampled_from(list(ms.Dataflow)),
    mesh=st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 3), (4, 2), (3, 3)]),
    extents=st.tuples(EXTENTS, EXTENTS, EXTENTS),
    slice_count=st.integers(1, 4),
    block_size=st.sampled_from([None, 1, 2]),
    packets=st.integers(1, 2),
)
def test_check_accepts_exactly_what_runs(
    algorithm, dataflow, mesh, extents, slice_count, block_size, packets
):
    """What it refuses fails to trace, or drops a part of the product, when unchecked."""
    if slice_count == 1:
        block_size = None  # one slice has no blocks
    plan = ms.GemmPlan(
        algorithm=algorithm,
        dataflow=dataflow,
        slice_count=slice_count,
        **_read(algorithm, block_size=block_size, packets=packets),
    )
    problem, shape = GemmProblem(m=extents[0], n=extents[1], k=extents[2]), ms.MeshShape(*mesh)
    accepted = algorithms.fits(problem, plan, shape)
    if algorithm in ("cannon", "collective") and slice_count > 1:
        assert not accepted  # their kernels have no slices, so there is nothing to trace
    else:
        assert accepted == _traces(problem, plan, shape)


@settings(max_examples=200, deadline=None)
@given(
    algorithm=st.sampled_from(["meshslice", "wang", "tp1d", "fsdp"]),
    dataflow=st.sampled_from(list(ms.Dataflow)),
    mesh=st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 3), (4, 2)]),
    extents=st.tuples(EXTENTS, EXTENTS, EXTENTS),
    slice_count=st.integers(1, 4),
    taper=st.sampled_from(["none", "head", "ends", "graded"]),
    reduce_scatter=st.sampled_from(["native", "ring", "all_to_all"]),
    scatter_group=st.sampled_from([1, 2]),
    gather_order=st.sampled_from(["free", "ordered", "tied", "serial"]),
    ring=st.sampled_from(["row", "col"]),
    ring_form=st.sampled_from(["joined", "halves", "whole", "one_way"]),
)
def test_other_forms_that_check_accepts_run(
    algorithm, dataflow, mesh, extents, slice_count, **fields
):
    plan = ms.GemmPlan(
        algorithm=algorithm,
        dataflow=dataflow,
        slice_count=slice_count,
        **_read(algorithm, **fields),
    )
    problem, shape = GemmProblem(m=extents[0], n=extents[1], k=extents[2]), ms.MeshShape(*mesh)
    if algorithms.fits(problem, plan, shape):
        assert _traces(problem, plan, shape)


def _read(algorithm: str, **fields) -> dict[str, object]:
    """Those fields that the algorithm reads."""
    return {name: fields[name] for name in fields if name in ms.ALGORITHMS[algorithm].options}


def _traces(problem, plan, shape) -> bool:
    """Whether the unchecked kernel traces to the right shape and does all the FLOPs."""
    mesh = jax.sharding.AbstractMesh(shape, ("row", "col"))
    lhs = jax.ShapeDtypeStruct((problem.m, problem.k), np.float32)
    rhs = jax.ShapeDtypeStruct((problem.k, problem.n), np.float32)

    def unchecked(a, b):
        call = gemm._Call(
            contraction=plan.contraction,
            batched="m",
            plan=ms.LayerPlan(forward=plan),
            site=find_site(mesh, plan, (a, b)),
            out_dtype="float32",
            precision=None,
        )
        return gemm._product(call, a, b)

    try:
        shaped = jax.eval_shape(unchecked, lhs, rhs).shape == (problem.m, problem.n)
        return shaped and census(unchecked, lhs, rhs)[2] * shape.num_chips == problem.flops
    except Exception:
        return False


@pytest.mark.parametrize(("m", "n", "k"), list(itertools.product([0, 4], repeat=3)))
def test_empty_extents_are_legal(m, n, k):
    ms.check(ms.GemmPlan(algorithm="wang"), m, n, k, (2, 2))


class TestOperands:
    mesh = property(lambda self: ms.make_mesh(MESH))

    def test_k_differs(self):
        with pytest.raises(
            ValueError, match=r"lhs\[m=8, k=8\] and rhs\[k=16, n=8\] do not multiply"
        ):
            ms.matmul(np.ones((8, 8)), np.ones((16, 8)), ms.GemmPlan(), mesh=self.mesh)

    def test_rank(self):
        with pytest.raises(TypeError, match=r"lhs must be a matrix \[m, k\], got shape \(8,\)"):
            ms.matmul(np.ones(8), np.ones((8, 8)), ms.GemmPlan(), mesh=self.mesh)
        with pytest.raises(
            TypeError, match=r"rhs must be a matrix \[k, n\], got shape \(2, 8, 8\)"
        ):
            ms.matmul(np.ones((8, 8)), np.ones((2, 8, 8)), ms.GemmPlan(), mesh=self.mesh)

    def test_kind(self):
        with pytest.raises(
            TypeError, match="lhs has dtype bool, which is not a number; products are of"
        ):
            ms.matmul(np.ones((8, 8), bool), np.ones((8, 8)), ms.GemmPlan(), mesh=self.mesh)

    def test_plan(self):
        with pytest.raises(TypeError, match="plan must be a GemmPlan or a LayerPlan, got str"):
            ms.matmul(np.ones((8, 8)), np.ones((8, 8)), "meshslice", mesh=self.mesh)

    @pytest.mark.parametrize("plan", ["plan.json", pathlib.Path("plan.json")])
    def test_file_of_a_plan(self, plan):
        with pytest.raises(TypeError, match=r"got \w+; ms.load_plan reads the plan"):
            ms.matmul(np.ones((8, 8)), np.ones((8, 8)), plan, mesh=self.mesh)

    def test_plan_of_a_model(self):
        layers = dict.fromkeys(("qkv", "out", "ff1", "ff2"), ms.LayerPlan(forward=ms.GemmPlan()))
        plan = ms.ModelPlan(model="gpt3-125m", num_chips=4, mesh_shape=(2, 2), layers=layers)
        words = r"got ModelPlan; take that of one layer, plan.layers\[...\] of 'qkv', 'out'"
        with pytest.raises(TypeError, match=words):
            ms.matmul(np.ones((8, 8)), np.ones((8, 8)), plan, mesh=self.mesh)

    def test_a_plan_that_its_algorithm_cannot_run_is_refused_by_check(self):
        with pytest.raises(ValueError, match="collective"):
            ms.check(ms.GemmPlan(algorithm="collective", slice_count=4), 64, 64, 64, (2, 2))

    def test_no_mesh(self):
        with pytest.raises(ValueError, match="no mesh: pass mesh=, or call under"):
            ms.matmul(np.ones((8, 8)), np.ones((8, 8)), ms.GemmPlan())

    def test_axis_names(self):
        with pytest.raises(ValueError, match="'x' missing; set row_axis, col_axis and"):
            ms.matmul(np.ones((8, 8)), np.ones((8, 8)), ms.GemmPlan(row_axis="x"), mesh=self.mesh)

    def test_another_mesh_in_context(self):
        with (
            jax.set_mesh(ms.make_mesh((4, 2))),
            pytest.raises(ValueError, match="the mesh in context has"),
        ):
            ms.matmul(np.ones((8, 8)), np.ones((8, 8)), ms.GemmPlan(), mesh=self.mesh)

    def test_other_devices_in_context(self):
        other = ms.make_mesh(MESH, devices=jax.devices()[:8][::-1])
        with jax.set_mesh(other), pytest.raises(ValueError, match="but the mesh in context has"):
            ms.matmul(np.ones((8, 8)), np.ones((8, 8)), ms.GemmPlan(), mesh=self.mesh)

    def test_a_plan_used_on_another_mesh_is_checked_there(self):
        plan = ms.GemmPlan(algorithm="wang", slice_count=4)
        with pytest.raises(ValueError, match="slice_count 4 does not divide the ring of 2 chips"):
            ms.matmul(np.ones((8, 8)), np.ones((8, 8)), plan, mesh=ms.make_mesh((4, 2)))


class TestPlans:
    @pytest.mark.parametrize(
        ("fields", "error", "words"),
        [
            ({"dataflow": "ws"}, ValueError, "dataflow='ws' is not one of os, ls, rs"),
            ({"reduce_dtype": "bfloat16"}, ValueError, "reduce_dtype='bfloat16' is not one of"),
            (
                {"reduce_scatter": "magic"},
                ValueError,
                "reduce_scatter='magic' is not one of native",
            ),
            ({"loop": "while"}, ValueError, "loop='while' is not one of auto, unrolled, rolled"),
            ({"ring": "diagonal"}, ValueError, "ring='diagonal' is not one of row, col"),
            ({"split": "both"}, ValueError, "split='both' is not one of column, row"),
            ({"slice_count": 0}, ValueError, "slice_count must be at least 1, got 0"),
            ({"slice_count": 2.0}, TypeError, "slice_count must be an int, got 2.0"),
            ({"slice_count": True}, TypeError, "slice_count must be an int, got True"),
            ({"block_size": -8}, ValueError, "block_size must be at least 1, got -8"),
            (
                {"batch_axes": "data"},
                TypeError,
                "batch_axes must be a tuple of axis names",
            ),
            (
                {"batch_axes": ("row",)},
                ValueError,
                "batch_axes holds 'row', an axis",
            ),
            ({"batch_axes": ("d", "d")}, ValueError, "batch_axes names an axis twice"),
            ({"packets": 0}, ValueError, "packets must be at least 1, got 0"),
            ({"row_axis": "col"}, ValueError, "row_axis and col_axis are both 'col'"),
            ({"row_axis": 0}, TypeError, "row_axis must be a string, got 0"),
            ({"algorithm": None}, TypeError, "algorithm must be a string, got None"),
        ],
        ids=str,
    )
    def test_wrong_fields(self, fields, error, words):
        with pytest.raises(error, match=words):
            ms.GemmPlan(**fields)

    def test_wrong_layers(self):
        forward = ms.GemmPlan(dataflow="os")
        with pytest.raises(
            ValueError, match=r"grad_lhs.dataflow is rs, but the gradient .* needs ls"
        ):
            ms.LayerPlan(forward=forward, grad_lhs=ms.GemmPlan(dataflow="rs"))
        with pytest.raises(ValueError, match=r"grad_rhs\.row_axis is x"):
            ms.LayerPlan(forward=forward, grad_rhs=ms.GemmPlan(dataflow="rs", row_axis="x"))
        with pytest.raises(TypeError, match="forward must be a GemmPlan"):
            ms.LayerPlan(forward="os")

    def test_plans_are_values(self):
        import copy
        import pickle

        plan = ms.GemmPlan(dataflow="ls", slice_count=4)
        assert plan == ms.GemmPlan(dataflow=ms.Dataflow.LS, slice_count=4)
        assert hash(plan) == hash(ms.GemmPlan(dataflow="ls", slice_count=4))
        assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan
        layer = ms.LayerPlan(forward=plan)
        assert pickle.loads(pickle.dumps(layer)) == layer and hash(layer) == hash(
            ms.LayerPlan(forward=plan)
        )
        assert (layer.grad_lhs.dataflow, layer.grad_rhs.dataflow) == ("os", "rs")
        with pytest.raises(AttributeError):
            plan.slice_count = 8

    def test_placements(self):
        P = jax.sharding.PartitionSpec
        plan = ms.GemmPlan(dataflow="ls", row_axis="x", col_axis="y")
        assert ms.placements(plan) == (P("x", "y"), P("y", "x"), P("x", "y"))
        assert ms.placements(ms.GemmPlan(algorithm="fsdp")) == (
            P(("row", "col"), None), P(("row", "col"), None), P(("row", "col"), None),
        )  # fmt: skip
        column = ms.GemmPlan(algorithm="tp1d", dataflow="rs", split="column")
        both = ("row", "col")
        assert ms.placements(column) == (P(both, None), P(None, both), P(None, both))
        row = ms.GemmPlan(algorithm="tp1d", dataflow="rs", split="row")
        assert ms.placements(row) == (P(None, both), P(both, None), P(both, None))
