import dataclasses

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from meshslice_jax import bench, cost, gemm
from meshslice_jax.algorithms import ALGORITHMS, schedule
from meshslice_jax.bench import measure, operands
from meshslice_jax.bench.candidates import sensible_dataflow, sensible_slices, sensible_split
from meshslice_jax.dataflow import Dataflow
from meshslice_jax.hardware import hardware_spec
from meshslice_jax.mesh import MeshShape, make_mesh
from meshslice_jax.plan import GemmPlan

#: The promise to those who read the JSON files.
FIELDS = """
    layer pass m n k dtype mesh algorithm dataflow slice_count block_size bytes_row bytes_col
    peak_bytes compile_s median_ms min_ms max_ms repeats ratio_to_gspmd ratio_to_dense check
    status reason projected_ms projected_hardware
"""


def options(shape=(2, 2), m=32, n=64, k=16, dtype="float32", **fields):
    layer = {"layer": bench.product(m, n, k, dtype)}
    fields = {"repeats": 2} | fields
    return bench.Options(layers=layer, mesh_shape=MeshShape(*shape), **fields)


def run(chosen):
    mesh = make_mesh(chosen.mesh_shape)
    return [row for _, _, rows in bench.run(chosen, mesh) for row in rows]


def test_the_fields_of_a_row_are_those_promised():
    row = bench.Row(
        layer="a", pass_="fwd", m=1, n=1, k=1, dtype="float32", mesh="1x1", algorithm="dense"
    )
    assert list(msgspec.to_builtins(row)) == FIELDS.split()


def test_every_algorithm_and_pass_is_checked_and_timed_beside_both_baselines():
    rows = run(options())
    for pass_ in bench.PASSES:
        found = [row for row in rows if row.pass_ == pass_]
        names = [row.algorithm for row in found]
        assert names[0] == "dense"
        assert "gspmd" in names
        assert [name for name in names if name in ALGORITHMS] == list(ALGORITHMS)
        for row in found:
            assert (row.check, row.status, row.reason) == ("pass", "ok", None), row
            assert 0 < row.min_ms <= row.median_ms <= row.max_ms
            assert row.compile_s > 0
            assert row.repeats == 2
            assert row.ratio_to_dense > 0
            assert (row.ratio_to_gspmd is None) == (row.algorithm == "dense")
        assert found[0].ratio_to_dense == 1.0
        assert all(row.ratio_to_gspmd == 1.0 for row in found if row.algorithm == "gspmd")


@pytest.mark.parametrize(
    "dtype, passes", [("bfloat16", ("fwd", "drhs")), ("float16", ("dlhs",)), ("int8", ("fwd",))]
)
def test_narrow_dtypes_are_compared_exactly(dtype, passes):
    flows = (Dataflow.OS, Dataflow.LS)
    rows = run(options(k=1024, dtype=dtype, names=("meshslice",), dataflows=flows, passes=passes))
    assert {row.check for row in rows} == {"pass"}
    assert {row.dtype for row in rows} == {dtype}


def test_mnk_dataflow_and_bytes_are_those_of_the_passs_own_product():
    rows = run(options(names=("meshslice",), dataflows=tuple(Dataflow), slices=(2,), repeats=1))
    by_pass = {
        pass_: [
            (row.dataflow, row.m, row.n, row.k)
            for row in rows
            if row.pass_ == pass_ and row.algorithm == "meshslice"
        ]
        for pass_ in bench.PASSES
    }
    # By hand from the table: forward m, n, k = 32, 64, 16.
    assert by_pass == {
        "fwd": [("os", 32, 64, 16), ("ls", 32, 64, 16), ("rs", 32, 64, 16)],
        "dlhs": [("ls", 32, 16, 64), ("os", 32, 16, 64), ("ls", 16, 32, 64)],
        "drhs": [("rs", 16, 64, 32), ("rs", 64, 16, 32), ("os", 16, 64, 32)],
    }
    for row in rows:
        if row.algorithm == "meshslice":
            plan = GemmPlan(dataflow=row.dataflow, slice_count=2)
            expected = schedule(bench.product(row.m, row.n, row.k, "float32"), plan, (2, 2))
            assert row.bytes_row == expected.bytes_along("row")
            assert row.bytes_col == expected.bytes_along("col")
            assert row.peak_bytes == expected.peak_bytes


def test_projected_times_are_those_of_the_closed_form_on_the_named_hardware():
    spec = hardware_spec("tpu_v5e")
    rows = run(options(names=("meshslice",), dataflows=(Dataflow.OS,), hardware=spec, repeats=1))
    for row in rows:
        if row.algorithm == "gspmd":  # XLA's own choice has no schedule to price
            assert row.projected_ms is row.projected_hardware is None
            continue
        problem = bench.product(row.m, row.n, row.k, "float32")
        plan, shape = GemmPlan(algorithm="collective"), (1, 1)
        if row.algorithm == "meshslice":
            plan, shape = GemmPlan(dataflow=row.dataflow, slice_count=row.slice_count), (2, 2)
        expected = cost.seconds(schedule(problem, plan, shape), problem, spec)
        assert row.projected_ms == pytest.approx(expected.total_s * 1e3)
        assert row.projected_hardware == "tpu_v5e"
    assert {row.projected_ms for row in run(options(names=("wang",), repeats=1))} == {None}


def test_each_dataflow_has_its_own_gspmd_baseline_in_every_pass():
    chosen = options(names=("meshslice",), dataflows=tuple(Dataflow))
    for case in bench.cases(chosen):
        found = bench.candidates(chosen, case)
        bases = [c.base for c in found if c.row.algorithm == "gspmd"]
        assert bases == [("2x2", dataflow) for dataflow in Dataflow]
        assert {c.base for c in found if c.plan} == set(bases)


def test_a_1d_algorithm_is_compared_with_gspmd_placed_as_it_is():
    chosen = options(names=("tp1d", "fsdp"))
    found = bench.candidates(chosen, next(bench.cases(chosen)))
    meshes = {c.row.mesh for c in found if c.row.algorithm == "gspmd"}
    assert meshes == {"2x2", "1x4", "4x1"}
    assert {c.row.algorithm: c.base[0] for c in found if c.plan} == {"tp1d": "1x4", "fsdp": "4x1"}


def test_gspmd_moves_what_its_placement_makes_it_move():
    chosen = options(names=("collective",), dataflows=(Dataflow.OS,), passes=("fwd",))
    (case,) = bench.cases(chosen)
    data = operands.random_matrices(case.forward)
    gspmd = next(c for c in bench.candidates(chosen, case) if c.row.algorithm == "gspmd")
    function, args = measure.program(case, gspmd, data, make_mesh((2, 2)))
    assert args[0].sharding.spec == jax.P("row", "col")
    assert "all-gather" in function.lower(*args).compile().as_text()


def test_what_cannot_run_is_a_row_with_its_reason():
    rows = run(
        options(
            shape=(1, 3), m=32, n=66, k=16, passes=("fwd",), dataflows=(Dataflow.OS,), slices=(1, 2)
        )
    )
    skipped = [row for row in rows if row.status == "skipped"]
    assert {row.algorithm for row in skipped} >= {"gspmd", "meshslice", "cannon", "tp1d"}
    for row in skipped:
        assert row.reason
        assert row.check is row.median_ms is row.compile_s is row.ratio_to_dense is None
    reasons = {(row.algorithm, row.mesh): row.reason for row in skipped}
    fault = "lhs dimension k = 16 is not divisible by mesh axis 'col' of size 3"
    assert fault in reasons["gspmd", "1x3"]
    assert "no forward dataflow os in tp1d; it has rs" in reasons["tp1d", "1x3"]
    assert rows[0].algorithm == "dense"
    assert rows[0].status == "ok"


def test_a_wrong_answer_is_a_failed_row_without_a_time(monkeypatch):
    contract = gemm.contract
    monkeypatch.setattr(gemm, "contract", lambda *args, **fields: contract(*args, **fields) + 1)
    chosen = options(names=("meshslice", "collective"), passes=("fwd",))
    rows = run(chosen)
    assert [row.check for row in rows] == ["pass", "pass", "FAILED", "FAILED"]
    for row in rows[2:]:
        assert row.status == "failed"
        assert row.median_ms is None
        assert "elements on" in row.reason
        assert "are wrong" in row.reason


def test_a_device_that_gives_up_is_a_failed_row(monkeypatch):
    def out_of_memory(*args, **fields):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    monkeypatch.setattr(gemm, "contract", out_of_memory)
    rows = run(options(names=("meshslice",), passes=("fwd",)))
    assert (rows[-1].status, rows[-1].check) == ("failed", None)
    assert rows[-1].reason == "RESOURCE_EXHAUSTED: out of memory"


def test_an_answer_of_another_shape_or_dtype_is_wrong():
    out = jnp.zeros((2, 3), jnp.float32)
    assert operands.find_error(out, np.zeros((2, 3), np.float32)) is None
    assert "expected float32[3, 2]" in operands.find_error(out, np.zeros((3, 2), np.float32))
    assert "expected int32" in operands.find_error(out, np.zeros((2, 3), np.int32))
    assert "1 of 6 elements" in operands.find_error(out, np.eye(2, 3, 2, dtype=np.float32))


@pytest.mark.parametrize("dtype, limit", [("bfloat16", 256), ("float16", 2048)])
def test_no_sum_of_absolute_terms_leaves_the_exact_integers(dtype, limit):
    assert operands.exact_limit(dtype) == limit
    problem = bench.product(64, 64, 16384, dtype)
    host = operands.random_matrices(problem).host
    lhs, rhs = (np.abs(host[role].astype(np.float32)) for role in ("lhs", "rhs"))
    largest = (lhs @ rhs).max()
    assert limit / 4 < largest <= limit


def test_sums_that_are_not_exact_are_not_used_as_a_reference():
    problem = bench.product(4, 4, 512, "bfloat16")
    ones = {role: np.ones(shape, jnp.bfloat16) for role, shape in _shapes(problem).items()}
    case = bench.Pass(layer="a", name="fwd", forward=problem)
    with pytest.raises(RuntimeError, match="a sum of 512 terms is not exact in bfloat16"):
        operands.reference(case, operands.Data(host=ones))


def _shapes(problem):
    return {"lhs": (problem.m, problem.k), "rhs": (problem.k, problem.n)}


@pytest.mark.parametrize(
    "m, n, k, dataflow",
    [(2048, 2304, 768, "os"), (2048, 768, 768, "ls"), (2048, 768, 3072, "ls"), (16, 64, 64, "rs")],
)
def test_the_largest_matrix_stays_in_place(m, n, k, dataflow):
    problem = bench.product(m, n, k, "float32")
    assert sensible_dataflow(problem, "meshslice") == dataflow
    assert sensible_dataflow(problem, "tp1d") == "rs"
    assert sensible_dataflow(problem, "fsdp") in ("os", "ls")


def test_1d_layers_that_widen_are_split_by_column():
    assert sensible_split(bench.product(32, 64, 16, "float32")) == "column"
    assert sensible_split(bench.product(32, 16, 16, "float32")) == "row"


@pytest.mark.parametrize("k, count", [(64, 4), (12, 3), (8, 4), (4, 2), (2, 1)])
def test_one_slice_count_is_the_largest_legal_up_to_four(k, count):
    problem = bench.product(8, 8, k, "float32")
    assert sensible_slices(problem, GemmPlan(), MeshShape(2, 1)) == count
    assert sensible_slices(problem, GemmPlan(algorithm="summa"), MeshShape(2, 1)) == 1


def test_a_block_size_reaches_meshslice_only_and_is_reported():
    rows = run(options(k=64, block_size=2, slices=(4,), passes=("fwd",), names=("meshslice",)))
    assert rows[-1].block_size == 2
    rows = run(options(k=64, slices=(4,), passes=("fwd",), dataflows=(Dataflow.OS,), repeats=1))
    by_name = {row.algorithm: row.block_size for row in rows}
    assert by_name["meshslice"] == 64 // 2 // 4
    assert by_name["collective"] is None


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"names": ("warp",)}, "unknown algorithm 'warp'; there are meshslice, collective"),
        ({"passes": ("back",)}, "unknown pass back; there are fwd, dlhs, drhs"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"dtype": "int8"}, "int8 has no gradients: passes must be fwd alone"),
        ({"m": 0}, "layer layer: m, n and k must be at least 1"),
    ],
)
def test_options_that_can_never_run_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        options(**fields)


def test_progress_is_told_once_a_candidate_and_once_for_the_timing():
    chosen, told = options(names=("meshslice",), passes=("fwd",)), []
    list(bench.run(chosen, make_mesh((2, 2)), told.append))
    assert told == ["layer fwd dense", "layer fwd gspmd", "layer fwd meshslice", "layer fwd timing"]


def test_a_pass_by_itself_is_checked_before_it_is_traced():
    plan = dataclasses.replace(GemmPlan(), slice_count=3)
    lhs, rhs = jnp.ones((4, 8)), jnp.ones((8, 4))
    with pytest.raises(ValueError, match="slice_count 3 x block_size 1 does not divide"):
        gemm.contract(lhs, rhs, plan, plan.contraction, mesh=make_mesh((2, 2)), out_dtype="float32")
