"""The closed form: hand-worked times, the calibration's vectors, bounds and monotony."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from meshslice_jax import algorithms
from meshslice_jax.cost import CostBreakdown, product_s, seconds, transfer_s
from meshslice_jax.hardware import HardwareSpec, hardware_spec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Product, Schedule, Step, Transfer

# A machine of round numbers: 1 MFLOP/ms, 1 kB/ms each way round a ring, no tiles, no HBM limit.
TOY = HardwareSpec(
    name="toy",
    peak_flops_per_s={"float32": 1e9, "bfloat16": 4e9},
    mxu_efficiency=1.0,
    mxu_tile=(1, 1, 1),
    product_launch_s=0.5e-3,
    hbm_bytes=2**30,
    hbm_bytes_per_s=1e18,
    links_per_axis=2,
    link_bytes_per_s=1e6,
    link_efficiency=1.0,
    idle_link_efficiency=1.0,
    gather_launch_s=1e-3,
    scatter_launch_s=2e-3,
    permute_launch_s=3e-3,
    gather_hop_s=0.1e-3,
    scatter_hop_s=0.2e-3,
    permute_hop_s=0.3e-3,
    accumulates_in_hbm=True,
    hbm_bytes_per_link_byte=2.0,
    contention=0.0,
    wrap_around="always",
)
#: 100^3 in float32: on four chips every shard has 10 kB, 5 ms for both ring directions.
CUBE = GemmProblem.uniform(100, 100, 100)


def cost(problem: GemmProblem, shape: tuple[int, int], spec: HardwareSpec, **plan) -> CostBreakdown:
    schedule = algorithms.schedule(problem, GemmPlan(**plan), shape)
    return seconds(schedule, problem, spec)


# On 2x2: gather of a shard 1 + 0.1 + 5 = 6.1 ms, of half a shard 3.6 ms; reduce-scatter of half a
# shard 2 + 0.2 + 2.5 = 4.7 ms; one-way shift 3 + 0.3 + 10 = 13.3 ms, two-way 8.3 ms; product of
# 50 x 50 x 100 0.5 + 0.5 = 1 ms, half of it 0.25 + 0.5 = 0.75 ms.
HAND_WORKED = [
    ("collective", "os", {}, 6.1 + 1),
    ("collective", "ls", {}, 6.1 + 1 + 7.2),
    ("meshslice", "os", {}, 6.1 + 1),
    ("meshslice", "os", {"slice_count": 2}, 3.6 + 3.6 + 0.75),
    ("meshslice", "ls", {"slice_count": 2}, 3.6 + 4.7 + 0.75 + 4.7),
    ("meshslice", "rs", {"slice_count": 2}, 3.6 + 4.7 + 0.75 + 4.7),
    # the blocked gather, then a send beside the first of two products
    ("wang", "os", {}, 6.1 + 8.3 + 0.75),
    ("wang", "os", {"ring": "row"}, 6.1 + 8.3 + 0.75),
    # two panels of 10 kB; a chain of one hop
    ("summa", "os", {}, 8.3 + 8.3 + 0.75),
    # ... in five packets: 3 + 5 (0.3 + 1)
    ("summa", "os", {"packets": 5}, 9.5 + 9.5 + 0.75),
    # a skew over one hop, then a shift beside the first of two products
    ("cannon", "os", {}, 13.3 + 13.3 + 0.75),
    # a ring of four: three sends beside products of a quarter, 0.125 + 0.5
    ("fsdp", "os", {}, 3 * 8.3 + 0.625),
    ("tp1d", "rs", {}, 3 * 8.3 + 0.625),
    ("tp1d", "rs", {"split": "row"}, 3 * 8.3 + 0.625),
    # merged in two: one send alone, two beside the first product of a half
    ("fsdp", "os", {"slice_count": 2}, 8.3 + 2 * 8.3 + 0.75),
]


@pytest.mark.parametrize(("algorithm", "dataflow", "fields", "total_ms"), HAND_WORKED)
def test_hand_worked_times_on_four_chips(algorithm, dataflow, fields, total_ms):
    found = cost(CUBE, (2, 2), TOY, algorithm=algorithm, dataflow=dataflow, **fields)
    assert found.total_s == pytest.approx(total_ms * 1e-3, rel=1e-12)


def test_every_field_of_a_hand_worked_breakdown():
    found = cost(CUBE, (2, 2), TOY, dataflow="ls", slice_count=2)
    assert dataclasses.asdict(found) == pytest.approx(
        {
            "total_s": 13.75e-3,
            "math_s": 1.5e-3,  # two products
            "comm_row_s": 7.2e-3,  # rhs gathered twice
            "comm_col_s": 9.4e-3,  # out reduce-scattered twice
            "stall_s": 0.0,
            "exposed_s": 12.25e-3,
            "prologue_s": 3.6e-3,
            "steady_s": 4.7e-3,
            "epilogue_s": 0.75e-3 + 4.7e-3,
            "lower_bound_s": 9.4e-3,
            "upper_bound_s": 18.1e-3,
        }
    )


def test_nothing_overlaps_in_collective():
    found = cost(CUBE, (2, 2), TOY, algorithm="collective", dataflow="ls")
    assert (found.prologue_s, found.steady_s) == (pytest.approx(6.1e-3), 0.0)
    assert found.epilogue_s == pytest.approx(1e-3 + 7.2e-3)


def test_link_traffic_stalls_the_product_beside_it():
    # Free links: the steady step is a product of 0.75 ms beside 4 x 5 kB of HBM traffic.
    spec = dataclasses.replace(
        TOY,
        contention=0.5,
        hbm_bytes_per_s=1e9,
        link_bytes_per_s=1e15,
        gather_launch_s=0.0,
        gather_hop_s=0.0,
    )
    found = cost(CUBE, (2, 2), spec, dataflow="os", slice_count=2)
    assert found.stall_s == pytest.approx(0.5 * 20e3 / 1e9)
    assert found.total_s == pytest.approx(0.75e-3 + 0.01e-3 + 0.75e-3)
    assert found.exposed_s == pytest.approx(0.01e-3)


def test_links_are_faster_while_no_product_runs():
    spec = dataclasses.replace(TOY, link_efficiency=0.5)
    found = cost(CUBE, (2, 2), spec, dataflow="os", slice_count=2)
    assert (found.prologue_s, found.steady_s) == pytest.approx((3.6e-3, 6.1e-3))


def test_products_are_priced_in_whole_tiles():
    spec = dataclasses.replace(TOY, mxu_tile=(8, 128, 128), mxu_efficiency=0.5)
    tiny = Product(m=1, n=1, k=129)
    assert product_s(tiny, CUBE, spec) == pytest.approx(2 * 8 * 128 * 256 / 0.5e9 + 0.5e-3)


def test_products_are_bound_by_memory_where_it_is_slower():
    spec = dataclasses.replace(TOY, hbm_bytes_per_s=1e6)
    mixed = GemmProblem(m=1, n=1, k=1, lhs_dtype="bfloat16", out_dtype="bfloat16")
    skinny = Product(m=10, n=1000, k=2)
    # lhs and out in two bytes, rhs in four
    assert product_s(skinny, mixed, spec) == pytest.approx((20 * 2 + 2000 * 4 + 10000 * 2) / 1e6
                                                           + 0.5e-3)  # fmt: skip


def test_products_that_accumulate_read_and_write_their_result():
    spec = dataclasses.replace(TOY, hbm_bytes_per_s=1e6)
    half = GemmProblem.uniform(1, 1, 1, "bfloat16")
    thin = Product(m=100, n=100, k=1, accumulates=True)
    # lhs and rhs in two bytes; the float32 result twice
    assert product_s(thin, half, spec) == pytest.approx((400 + 10000 * 8) / 1e6 + 0.5e-3)
    kept = dataclasses.replace(spec, accumulates_in_hbm=False)
    assert product_s(thin, half, kept) == pytest.approx((400 + 10000 * 2) / 1e6 + 0.5e-3)


@pytest.mark.parametrize(
    ("plan", "accumulates"),
    [
        ({"dataflow": "os", "slice_count": 2}, True),
        ({"dataflow": "os"}, False),
        ({"dataflow": "ls", "slice_count": 2}, False),
        ({"dataflow": "os", "algorithm": "wang"}, True),
        ({"dataflow": "os", "algorithm": "collective"}, False),
    ],
)
def test_only_slices_of_a_stationary_output_accumulate(plan, accumulates):
    schedule = algorithms.schedule(CUBE, GemmPlan(**plan), (2, 2))
    found = {step.product.accumulates for step, _ in schedule.steps if step.product}
    assert found == {accumulates}


def test_the_dtype_of_the_operands_sets_the_rate():
    cube = Product(m=100, n=100, k=100)
    half = GemmProblem.uniform(100, 100, 100, "bfloat16")
    assert product_s(cube, CUBE, TOY) == pytest.approx(2e-3 + 0.5e-3)
    assert product_s(cube, half, TOY) == pytest.approx(0.5e-3 + 0.5e-3)
    mixed = GemmProblem(m=100, n=100, k=100, lhs_dtype="bfloat16")
    assert product_s(cube, mixed, TOY) == product_s(cube, CUBE, TOY)
    with pytest.raises(ValueError, match="no FLOP/s for operands of int8; it has bfloat16, float"):
        product_s(cube, GemmProblem.uniform(1, 1, 1, "int8"), TOY)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_throughput_bound_collective_takes_twice_as_long_on_a_line(kind):
    transfer = Transfer(kind=kind, role="lhs", axis="col", ring=8, bytes=7e9, hops=7)
    line = dataclasses.replace(TOY, wrap_around="axes_of_16")
    ratio = transfer_s(transfer, line, overlapped=True) / transfer_s(transfer, TOY, overlapped=True)
    assert ratio == pytest.approx(2, rel=1e-4)


def test_a_shift_on_a_line_travels_back_past_all_chips():
    shift = Transfer(kind="permute", role="lhs", axis="col", ring=8, bytes=0, hops=1)
    line = dataclasses.replace(TOY, wrap_around="never")
    assert transfer_s(shift, TOY, overlapped=True) == pytest.approx(3e-3 + 0.3e-3)
    assert transfer_s(shift, line, overlapped=True) == pytest.approx(3e-3 + 7 * 0.3e-3)


def test_an_empty_schedule_takes_no_time():
    empty = Schedule(steps=(), argument_bytes=0, output_bytes=0, temporary_bytes=0)
    assert seconds(empty, CUBE, TOY).total_s == 0
    alone = Transfer(kind="all_gather", role="lhs", axis="col", ring=2, bytes=1e4, hops=1)
    only = dataclasses.replace(empty, steps=((Step(transfers=(alone,)), 1),))
    assert seconds(only, CUBE, TOY).prologue_s == pytest.approx(6.1e-3)


# GPT-3 on 32x8 chips, in microseconds: dataflow, (m, n, k), S, then one slice's transfer along the
# columns and the rows, its product, its stall, and the totals of MeshSlice and Collective.
VECTORS = [
    ("os", (262144, 36864, 12288), 6, 459.1, 658.5, 573.5, 79.4, 4524.3, 5622.5),
    ("ls", (262144, 12288, 36864), 6, 472.1, 658.5, 573.5, 79.4, 4996.4, 7382.3),
    ("rs", (12288, 36864, 262144), 6, 459.1, 671.5, 573.5, 79.4, 5061.4, 7382.3),
    ("ls", (262144, 12288, 12288), 4, 646.9, 549.6, 289.2, 88.6, 3426.4, 4237.8),
    ("os", (262144, 12288, 12288), 4, 633.9, 549.6, 289.2, 88.6, 2824.8, 3348.7),
    ("ls", (262144, 12288, 49152), 6, 472.1, 731.0, 762.9, 89.6, 6228.6, 8954.5),
]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v[0]}-{'x'.join(map(str, v[1]))}")
def test_the_calibrations_regression_vectors(vector):
    dataflow, extents, count, col, row, product, stall, sliced, whole = vector
    problem, spec = GemmProblem.uniform(*extents, "bfloat16"), hardware_spec("tpu_v4_paper")
    plan = {"dataflow": dataflow, "reduce_dtype": "output"}
    found = cost(problem, (32, 8), spec, slice_count=count, **plan)
    collective = cost(problem, (32, 8), spec, algorithm="collective", **plan)
    microseconds = [
        found.comm_col_s / count,
        found.comm_row_s / count,
        found.math_s / count,
        found.stall_s / (count - 1),
        found.total_s,
        collective.total_s,
    ]
    expected = [col, row, product, stall, sliced, whole]
    assert [round(1e6 * value, 1) for value in microseconds] == expected


MESHES = (MeshShape(2, 2), MeshShape(4, 4), MeshShape(2, 8), MeshShape(4, 1), MeshShape(1, 1))
CASES = [
    (name, dataflow, shape, count)
    for name, algorithm in algorithms.ALGORITHMS.items()
    for dataflow in algorithm.forward_dataflows
    for shape in MESHES
    for count in (1, 2, 4)
    if algorithms.fits(
        GemmProblem.uniform(256, 256, 256),
        GemmPlan(algorithm=name, dataflow=dataflow, slice_count=count),
        shape,
    )
]
_positive = st.floats(min_value=1e-3, max_value=1e3)
_small = st.floats(min_value=0, max_value=1e-3)
MACHINES = st.builds(
    lambda flops, hbm, link, idle, launch, hop, contention, wraps: dataclasses.replace(
        TOY,
        peak_flops_per_s={"float32": 1e9 * flops, "bfloat16": 1e9 * flops},
        hbm_bytes_per_s=1e9 * hbm,
        link_bytes_per_s=1e6 * link,
        idle_link_efficiency=idle,
        gather_launch_s=launch,
        permute_hop_s=hop,
        contention=contention,
        wrap_around=wraps,
    ),
    _positive,
    _positive,
    _positive,
    st.floats(min_value=0.1, max_value=1),
    _small,
    _small,
    st.floats(min_value=0, max_value=2),
    st.sampled_from(["always", "never", "multiples_of_4"]),
)


@hypothesis.given(st.sampled_from(CASES), MACHINES)
@hypothesis.settings(deadline=None, max_examples=150)
def test_the_total_lies_between_its_bounds(case, spec):
    algorithm, dataflow, shape, count = case
    plan = {"algorithm": algorithm, "dataflow": dataflow, "slice_count": count}
    found = cost(GemmProblem.uniform(256, 256, 256), shape, spec, **plan)
    assert found.lower_bound_s <= found.total_s * (1 + 1e-12)
    assert found.total_s <= found.upper_bound_s * (1 + 1e-12)
    assert found.total_s == pytest.approx(found.prologue_s + found.steady_s + found.epilogue_s)
    assert found.exposed_s >= -1e-12 * found.total_s


@hypothesis.given(
    st.sampled_from(CASES), MACHINES, st.sampled_from("mnk"), st.floats(min_value=1, max_value=9)
)
@hypothesis.settings(deadline=None, max_examples=150)
def test_time_grows_with_flops_and_bytes_and_shrinks_with_rates(case, spec, label, factor):
    algorithm, dataflow, shape, count = case
    plan = {"algorithm": algorithm, "dataflow": dataflow, "slice_count": count}
    problem = GemmProblem.uniform(256, 256, 256, "bfloat16")
    base = cost(problem, shape, spec, **plan)
    wider = cost(dataclasses.replace(problem, lhs_dtype="float32"), shape, spec, **plan)
    larger = cost(dataclasses.replace(problem, **{label: 512}), shape, spec, **plan)
    for slower in (wider, larger):
        assert slower.total_s >= base.total_s * (1 - 1e-12)
        assert slower.math_s >= base.math_s * (1 - 1e-12)
    for field in ("link_bytes_per_s", "hbm_bytes_per_s"):
        faster = dataclasses.replace(spec, **{field: factor * getattr(spec, field)})
        assert cost(problem, shape, faster, **plan).total_s <= base.total_s * (1 + 1e-12)
    rates = {dtype: factor * rate for dtype, rate in spec.peak_flops_per_s}
    faster = dataclasses.replace(spec, peak_flops_per_s=rates)
    assert cost(problem, shape, faster, **plan).total_s <= base.total_s * (1 + 1e-12)
