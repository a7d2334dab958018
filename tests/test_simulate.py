"""The simulator against the closed form, against hand-worked cases, and against itself."""

import dataclasses
import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshslice_jax import algorithms, block_study, cost, fault_study, links
from meshslice_jax.block import OVERLAPPED_BLOCK, BlockSchedule
from meshslice_jax.faults import Faults
from meshslice_jax.hardware import hardware_spec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.models import model_layers
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.simulate import simulate, simulate_block, simulate_schedule
from meshslice_jax.task_graph import product_part
from meshslice_jax.timeline import RESOURCES, write_trace

PAPER = hardware_spec("tpu_v4_paper")
QUIET = dataclasses.replace(PAPER, contention=0.0)  # links leave products alone
LAYER = GemmProblem.uniform(m=8192, n=6144, k=1536, dtype="bfloat16")


def _cases():
    """Every algorithm x forward dataflow x pass x mesh shape x slice count that runs."""
    for name, algorithm in algorithms.ALGORITHMS.items():
        for dataflow in algorithm.forward_dataflows:
            plan = LayerPlan(forward=GemmPlan(algorithm=name, dataflow=dataflow))
            problems = algorithms.layer_problems(LAYER, plan.forward)
            for kind, problem in problems.items():
                for shape in ((4, 4), (2, 3), (1, 4), (4, 1), (8, 2), (1, 1)):
                    for count in (1, 2, 3, 4, 8):
                        own = dataclasses.replace(getattr(plan, kind), slice_count=count)
                        if algorithms.fits(problem, own, MeshShape(*shape)):
                            yield name, kind, problem, own, shape


CASES = list(_cases())


def _closed_form(problem, plan, shape, spec):
    return cost.seconds(product_part(problem, plan, shape).schedule, problem, spec)


def test_the_cases_cover_every_algorithm_and_pass():
    assert {(name, kind) for name, kind, *_ in CASES} == {
        (name, kind)
        for name in algorithms.ALGORITHMS
        for kind in ("forward", "grad_lhs", "grad_rhs")
    }


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
@pytest.mark.parametrize(
    ("spec", "tolerance"),
    [
        (QUIET, 1e-9),
        (PAPER, 0.025),
        (hardware_spec("tpu_v4"), 1e-9),
        (hardware_spec("tpu_v4_paper_3"), 0.025),
        (hardware_spec("tpu_v5e"), 1e-9),
        (hardware_spec("tpu_v4_compiled"), 1e-9),
        (hardware_spec("tpu_v6e_compiled"), 1e-9),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_it_agrees_with_the_closed_form(name, spec, tolerance):
    # tpu_v5e has lines here: no axis has 16 chips.
    for own, kind, problem, plan, shape in CASES:
        if own != name:
            continue
        expected = _closed_form(problem, plan, shape, spec)
        found = simulate(problem, plan, shape, spec)
        label = f"{kind} {plan.dataflow} {shape} S={plan.slice_count}"
        assert found.total_s == pytest.approx(expected.total_s, rel=tolerance), label
        assert found.math_s == pytest.approx(expected.math_s), label


GPT3 = {
    "FC1 fwd": ("os", 262144, 36864, 12288, 6, 4524.3),
    "FC1 dX": ("ls", 262144, 12288, 36864, 6, 4996.4),
    "FC1 dW": ("rs", 12288, 36864, 262144, 6, 5061.4),
    "FC2 fwd": ("ls", 262144, 12288, 12288, 4, 3426.4),
    "FC2 dX": ("os", 262144, 12288, 12288, 4, 2824.8),
}


@pytest.mark.parametrize("name", GPT3)
def test_products_of_gpt3_on_256_chips(name):
    dataflow, m, n, k, count, microseconds = GPT3[name]
    plan = GemmPlan(dataflow=dataflow, slice_count=count, reduce_dtype="output")
    problem = GemmProblem.uniform(m=m, n=n, k=k, dtype="bfloat16")
    found = simulate(problem, plan, (32, 8), PAPER)
    assert found.total_s * 1e6 == pytest.approx(microseconds, rel=0.01)


@given(
    data=st.data(),
    link_bytes_per_s=st.floats(1e9, 1e12),
    hop_s=st.floats(0, 1e-4),
    launch_s=st.floats(0, 1e-4),
    contention=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_it_lies_between_the_bounds(data, link_bytes_per_s, hop_s, launch_s, contention):
    _, _, problem, plan, shape = data.draw(st.sampled_from(CASES))
    # The links' HBM traffic must fit into HBM, or products would starve.
    contention *= min(1.0, PAPER.hbm_bytes_per_s / (8 * link_bytes_per_s))
    spec = dataclasses.replace(
        PAPER,
        link_bytes_per_s=link_bytes_per_s,
        contention=contention,
        gather_hop_s=hop_s,
        permute_hop_s=hop_s,
        scatter_launch_s=launch_s,
    )
    bounds = _closed_form(problem, plan, shape, spec)
    total = simulate(problem, plan, shape, spec).total_s
    assert bounds.lower_bound_s <= total * (1 + 1e-9)
    assert total <= bounds.upper_bound_s * (1 + 1e-9)


def _tiny_machine(**changes):
    """Numbers for working by hand: 64 FLOP/s, links of 16 B/s, no memory traffic."""
    return dataclasses.replace(
        QUIET,
        peak_flops_per_s={"float32": 64.0},
        mxu_tile=(1, 1, 1),
        product_launch_s=0.0,
        hbm_bytes_per_s=1280.0,
        link_bytes_per_s=16.0,
        link_efficiency=1.0,
        idle_link_efficiency=1.0,
        gather_launch_s=0.5,
        gather_hop_s=0.25,
        **changes,
    )


TINY = GemmProblem.uniform(m=8, n=8, k=8)
TINY_PLAN = GemmPlan(dataflow="os", slice_count=2)


def test_a_2x2_mesh_by_hand():
    # A slice of a shard is 4 x 2 floats: 32 bytes, over two links of 16 B/s: 1 s, so a
    # gather takes 0.5 + 0.25 + 1 = 1.75 s. A product is 2 * 4 * 4 * 4 FLOPs: 2 s.
    #   gather 0    0    - 1.75     product 0    1.75 - 3.75
    #   gather 1    1.75 - 3.5      product 1    3.75 - 5.75
    found = simulate(TINY, TINY_PLAN, (2, 2), _tiny_machine())
    np.testing.assert_allclose(found.finish_s, np.full((2, 2), 5.75))
    assert (found.total_s, found.math_s, found.exposed_s) == (5.75, 4.0, 1.75)
    np.testing.assert_allclose(found.busy_s["mxu"], np.full((2, 2), 4.0))
    for link in RESOURCES[1:]:
        np.testing.assert_allclose(found.busy_s[link], np.full((2, 2), 3.5))
    # Two gathered slices of 4 x 4 floats per operand, the accumulator and a partial result.
    assert found.peak_temporary_bytes == 2 * (64 + 64) + 2 * 64


def test_contention_on_a_2x2_mesh_by_hand():
    # Each gather moves 32 bytes, 64 with HBM's read and write: 0.05 s of 1280 B/s. Both
    # slow product 0 from 1.75 to 3.5 s, in which it does 1.75 - 0.1 = 1.65 s of its work;
    # the other 0.35 s end at 3.85, product 1 at 5.85.
    found = simulate(TINY, TINY_PLAN, (2, 2), _tiny_machine(), faults=Faults())
    contended = dataclasses.replace(_tiny_machine(), contention=1.0)
    slowed = simulate(TINY, TINY_PLAN, (2, 2), contended)
    assert found.total_s == pytest.approx(5.75)
    assert slowed.total_s == pytest.approx(5.85)


def test_a_slow_link_on_a_2x2_mesh_by_hand():
    # Chip (0, 0) sends to (0, 1) at a third of the rate: 0.5 + 3 * 1.25 = 4.25 s a gather
    # in mesh row 0. There: gathers 0 - 4.25 - 8.5, products 4.25 - 6.25 and 8.5 - 10.5.
    # Mesh row 1 shares only links along the other axis, which run at their pace.
    faults = Faults(slow_links=((0, 0, "col+", 3.0),))
    found = simulate(TINY, TINY_PLAN, (2, 2), _tiny_machine(), faults=faults)
    np.testing.assert_allclose(found.finish_s, [[10.5, 10.5], [5.75, 5.75]])


def test_a_slow_chip_delays_its_neighbours_at_the_next_gather():
    faults = Faults(slow_chips=((0, 1, 4.0),))
    plan = dataclasses.replace(TINY_PLAN, slice_count=4)
    found = simulate(TINY, plan, (2, 2), _tiny_machine(), faults=faults)
    healthy = simulate(TINY, plan, (2, 2), _tiny_machine())
    late = found.finish_s - healthy.finish_s
    # Gather 3 waits for product 1 of the slow chip (buffers), in its row and column.
    assert late[0, 1] == late.max() > 0
    assert late[0, 0] > 0 and late[1, 1] > 0


def _ring_by_loops(arrived, hops, hop_s, closed):
    """The recurrence of one direction of one ring, chip by chip."""
    count = len(arrived)
    nexts = [(i + 1) % count if closed else i + 1 for i in range(count)]
    links_ = [i for i in range(count) if nexts[i] < count]
    sent = {i: max(arrived[i], arrived[nexts[i]]) + hop_s[i] for i in links_}
    for _ in range(hops - 1):
        before = {nexts[i]: sent[i] for i in links_}
        sent = {i: max(sent[i], before.get(i, -np.inf)) + hop_s[i] for i in links_}
    over = [sent.get(i, -np.inf) for i in range(count)]
    for i in links_:
        over[nexts[i]] = max(over[nexts[i]], sent[i])
    return over


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_ring_is_the_recurrence(count, closed):
    generator = np.random.default_rng(count)
    arrived, hop_s = generator.random((2, 1, 2, 3, count))[:, 0]
    for hops in (1, 2, count - 1):
        found = links.ring(arrived, hops, lambda: hop_s, closed=closed)
        for direction in range(2):
            for other in range(3):
                expected = _ring_by_loops(
                    arrived[direction, other], hops, hop_s[direction, other], closed
                )
                if hops == 1 and not closed:
                    # A line's first chip has only what it sends, its last what it receives.
                    assert found[direction, other, -1] == expected[-1]
                np.testing.assert_allclose(found[direction, other], expected)


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_chain_runs_from_root_to_tail(count, pieces):
    generator = np.random.default_rng(count)
    arrived, hop_s = generator.random((2, 2, 3, count))
    starts = links.chain_starts("broadcast", 1, count, 2)
    found = links.chain(arrived, starts, pieces, lambda: hop_s)
    for direction in range(2):
        order = [(starts[direction] + j) % count for j in range(count)]
        for other in range(3):
            ready, hop = arrived[direction, other], hop_s[direction, other]
            link = {j: max(ready[order[j]], ready[order[j + 1]]) for j in range(count - 1)}
            for _ in range(pieces):
                at = -np.inf
                for j in range(count - 1):
                    at = link[j] = max(link[j], at) + hop[order[j]]
            np.testing.assert_allclose(found[direction, other], max(link.values()))


def test_chains_start_at_the_root_and_end_there():
    # Direction "-" is reversed: chip c of 4 has index 3 - c. Root 1: chips 1 2 3 0 | 1 0 3 2.
    assert links.chain_starts("broadcast", 1, 4, 2) == (1, 2)
    # A reduce goes 2 3 0 1 | 0 3 2 1.
    assert links.chain_starts("reduce", 1, 4, 2) == (2, 3)


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("directions", [1, 2])
def test_orient_and_settle_are_inverse(axis, directions):
    values = np.arange(6.0).reshape(2, 3)
    turned = links.orient(values, axis, directions)
    assert turned.shape == (directions, *((3, 2) if axis == "row" else (2, 3)))
    np.testing.assert_array_equal(links.settle(turned, axis), values)


FAULTY = {
    "slow chip": Faults(slow_chips=((1, 2, 1.5),)),
    "slow link": Faults(slow_links=((1, 2, "row-", 2.0), (1, 2, "col-", 2.0))),
    "product jitter": Faults(product_jitter=0.1, seed=3),
    "hop jitter": Faults(hop_jitter=0.1, seed=3),
}
ONE_PLAN_EACH = {
    name: GemmPlan(
        algorithm=name,
        dataflow=algorithm.forward_dataflows[-1],
        slice_count=1 if name in ("collective", "cannon") else 4,
    )
    for name, algorithm in algorithms.ALGORITHMS.items()
}


@pytest.mark.parametrize("fault", FAULTY)
@pytest.mark.parametrize("name", ONE_PLAN_EACH)
def test_faults_only_slow_down(name, fault):
    plan, faults = ONE_PLAN_EACH[name], FAULTY[fault]
    if name in ("tp1d", "fsdp"):  # their mesh is 16 x 1
        faults = dataclasses.replace(
            faults,
            slow_chips=tuple((6, 0, f) for *_, f in faults.slow_chips),
            slow_links=tuple((6, 0, "row-", f) for *_, f in faults.slow_links[:1]),
        )
    healthy = simulate(LAYER, plan, (4, 4), QUIET)
    faulty = simulate(LAYER, plan, (4, 4), QUIET, faults=faults)
    assert (faulty.finish_s >= healthy.finish_s - 1e-12).all()
    assert faulty.finish_s.sum() > healthy.finish_s.sum()


def test_more_jitter_takes_more_time():
    plan = ONE_PLAN_EACH["meshslice"]
    totals = [
        simulate(LAYER, plan, (4, 4), QUIET, faults=Faults(product_jitter=j, hop_jitter=j)).total_s
        for j in (0.0, 0.01, 0.05, 0.2)
    ]
    assert totals == sorted(totals) and len(set(totals)) == 4


def test_a_seed_decides_everything():
    plan, shape = ONE_PLAN_EACH["summa"], (4, 4)
    faults = Faults(product_jitter=0.1, hop_jitter=0.1, seed=7)
    first, second = (simulate(LAYER, plan, shape, PAPER, faults=faults) for _ in range(2))
    np.testing.assert_array_equal(first.finish_s, second.finish_s)
    other = simulate(LAYER, plan, shape, PAPER, faults=dataclasses.replace(faults, seed=8))
    assert other.total_s != first.total_s


def test_summa_synchronises_once_a_panel_and_meshslice_once_a_slice():
    # On a ring of 8, 2 x 8: SUMMA has lcm(2, 8) = 8 panels of 7 hops, MeshSlice 2 slices
    # of 7. With hops of a second nothing else counts.
    slow = dataclasses.replace(QUIET, gather_hop_s=1.0, permute_hop_s=1.0)
    for name, count, hops in (("summa", 8, 8 * 7), ("meshslice", 2, 2 * 7)):
        plan = GemmPlan(algorithm=name, dataflow="os", slice_count=count)
        found = simulate(LAYER, plan, (2, 8), slow)
        assert found.total_s == pytest.approx(hops, rel=0.01)


def test_a_chain_is_over_for_nobody_before_its_tail():
    # Chip (0, 0) is the last to hear of a panel that (0, 1) broadcasts upwards; what
    # slows it delays the product of every chip of its row, however early they heard.
    late = Faults(slow_links=((0, 3, "col+", 20.0),))
    plan = GemmPlan(algorithm="summa", dataflow="os", slice_count=4)
    found = simulate(LAYER, plan, (4, 4), QUIET, faults=late, record=True)
    healthy = simulate(LAYER, plan, (4, 4), QUIET, record=True)
    starts = [
        next(s.start_s for s in timeline.spans if s.what == "product" and s.step == 1)
        for timeline in (found, healthy)
    ]
    delay = starts[0] - starts[1]
    np.testing.assert_allclose(delay[0], delay[0, 0])
    assert delay[0, 0] > 0
    np.testing.assert_allclose(delay[1:], 0, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"product_jitter": -0.1},
            "product_jitter is a mean delay .* cannot be negative, got -0.1",
        ),
        ({"hop_jitter": -1}, "hop_jitter is a mean delay"),
        ({"hop_jitter": float("nan")}, "hop_jitter is a mean delay"),
        ({"product_jitter": float("inf")}, "product_jitter is a mean delay"),
        ({"slow_chips": ((0, 0, float("nan")),)}, "must be at least 1, got nan"),
        ({"slow_chips": ((0, 0, 0.5),)}, "must be at least 1, got 0.5"),
        ({"slow_links": ((0, 0, "up", 2.0),)}, r"link 'up' is not one of row\+, row-, col\+, col-"),
    ],
)
def test_impossible_faults_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Faults(**fields)


def test_a_fault_outside_the_mesh_is_refused():
    with pytest.raises(ValueError, match=r"chip \(4, 0\) is outside the simulated 4x4 mesh"):
        simulate(LAYER, GemmPlan(), (4, 4), faults=Faults(slow_chips=((4, 0, 2.0),)))


def test_a_product_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="slice_count 5"):
        simulate(LAYER, GemmPlan(slice_count=5), (4, 4))


def test_a_schedule_is_simulated_as_it_is():
    plan = ONE_PLAN_EACH["meshslice"]
    schedule = algorithms.schedule(LAYER, plan, (4, 4))
    found = simulate_schedule(schedule, LAYER, (4, 4), PAPER)
    assert found.total_s == simulate(LAYER, plan, (4, 4), PAPER).total_s


def test_the_twin_on_the_turned_mesh_takes_the_same_time():
    plan = GemmPlan(dataflow="ls", slice_count=4)
    twin = dataclasses.replace(plan, row_axis="col", col_axis="row")
    found = simulate(LAYER, plan, (8, 2), PAPER)
    turned = simulate(LAYER, twin, (2, 8), PAPER)
    assert turned.total_s == found.total_s
    np.testing.assert_allclose(turned.busy_s["row+"], found.busy_s["col+"].T)


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_peak_memory_is_what_the_schedule_says(dataflow, count):
    plan = GemmPlan(dataflow=dataflow, slice_count=count)
    schedule = algorithms.schedule(LAYER, plan, (4, 4))
    found = simulate(LAYER, plan, (4, 4), PAPER)
    assert 0 < found.peak_temporary_bytes <= schedule.temporary_bytes


def test_a_trace_loads_and_shows_what_was_found(tmp_path):
    found = simulate(LAYER, GemmPlan(slice_count=4), (2, 3), PAPER, record=True)
    write_trace(found, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    events = document["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == set(range(6))
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == set(RESOURCES)
    last = max(event["ts"] + event["dur"] for event in spans)
    assert last == pytest.approx(found.total_s * 1e6)
    mxu = sum(event["dur"] for event in spans if event["pid"] == 4 and event["tid"] == 0)
    assert mxu == pytest.approx(found.busy_s["mxu"][1, 1] * 1e6)
    for chip in range(6):  # nothing overlaps on one track
        for thread in range(len(RESOURCES)):
            track = [e for e in spans if e["pid"] == chip and e["tid"] == thread]
            track.sort(key=lambda event: event["ts"])
            for first, second in itertools.pairwise(track):
                assert first["ts"] + first["dur"] <= second["ts"] + 1e-6
    assert document["otherData"]["hardware"] == "tpu_v4_paper"
    assert document["otherData"]["chips left out"] == 0


def test_a_trace_shows_the_chips_that_it_is_told(tmp_path):
    found = simulate(LAYER, GemmPlan(slice_count=2), (8, 16), PAPER, record=True)
    write_trace(found, tmp_path / "all.json")
    write_trace(found, tmp_path / "one.json", chips=[(7, 3)])
    shown = {}
    for name in ("all", "one"):
        document = json.loads((tmp_path / f"{name}.json").read_text())
        shown[name] = {event["pid"] for event in document["traceEvents"]}
    assert shown["all"] == set(range(64))
    assert shown["one"] == {7 * 16 + 3}
    with pytest.raises(ValueError, match=r"chip \(8, 0\) to trace is outside the 8x16 mesh"):
        write_trace(found, tmp_path / "no.json", chips=[(8, 0)])
    with pytest.raises(ValueError, match="simulate with record=True"):
        write_trace(simulate(LAYER, GemmPlan(), (2, 2)), tmp_path / "no.json")


# Whole blocks.


def _gpt_block(slice_counts, chips=256, name="gpt3-175b", **fields):
    """The block's layers with the paper's dataflows: Y stationary where out > in, else X."""
    problems = model_layers(name, batch=chips // 2, seq_len=2048, dtype="bfloat16")
    return {
        layer: (
            problem,
            LayerPlan(
                forward=GemmPlan(
                    dataflow="os" if problem.n > problem.k else "ls",
                    slice_count=count,
                    reduce_dtype="output",
                    **fields,
                )
            ),
        )
        for (layer, problem), count in zip(problems.items(), slice_counts, strict=True)
    }


def test_a_plain_block_is_the_sum_of_its_products():
    layers = _gpt_block([6, 4, 6, 6])
    found = simulate_block(layers, (32, 8), PAPER)
    alone = 0.0
    for problem, plan in layers.values():
        for kind, part in algorithms.layer_problems(problem, plan.forward).items():
            alone += simulate(part, getattr(plan, kind), (32, 8), PAPER).total_s
    assert found.total_s == pytest.approx(alone)
    assert found.total_s == pytest.approx(60.65e-3, rel=0.005)
    assert sum(seconds for _, seconds in found.part_s) == pytest.approx(found.total_s)
    assert [name for name, _ in found.part_s[:5]] == [
        "qkv/forward",
        "out/forward",
        "ff1/forward",
        "ff2/forward",
        "ff2/grad_rhs",
    ]
    flops = sum(3 * problem.flops for problem, _ in layers.values())
    assert found.utilisation(flops, 272e12) == pytest.approx(0.674, abs=0.005)


OPTIONS = [
    {"grad_lhs_first": True},
    {"prefetch_weight": True},
    {"prefetch_saved": True},
    {"overlap_grad_rhs": True},
    {"share_cotangent": True},
]


@pytest.mark.parametrize(
    ("model", "slice_counts", "gains"),
    [
        ("gpt3-175b", [[6, 4, 6, 6], [3, 2, 3, 3]], [0.0, 2.3, 5.4, 10.6, 13.2]),
        ("megatron-530b", [[10, 5, 20, 20], [5, 2, 10, 10], [4] * 4], [0.0, 1.5, 3.3, 4.5, 6.0]),
    ],
)
def test_opening_the_borders_gains_what_is_expected(model, slice_counts, gains):
    layers = [_gpt_block(counts, name=model) for counts in slice_counts]
    plain = min(simulate_block(each, (32, 8), PAPER).total_s for each in layers)
    fields = {}
    for option, gain in zip(OPTIONS, gains, strict=True):
        fields |= option
        block = BlockSchedule(**fields)
        best = min(simulate_block(each, (32, 8), PAPER, block=block).total_s for each in layers)
        assert 100 * (plain / best - 1) == pytest.approx(gain, abs=0.15), block


def test_a_deeper_buffer_is_faster_and_larger():
    layers = _gpt_block([3, 2, 3, 3])
    deep = dataclasses.replace(OVERLAPPED_BLOCK, buffer_depth=3)
    two, three = (simulate_block(layers, (32, 8), PAPER, block=b) for b in (OVERLAPPED_BLOCK, deep))
    assert three.total_s < two.total_s
    assert three.peak_temporary_bytes > two.peak_temporary_bytes


def test_sharing_gathers_the_cotangent_once():
    layers = {"out": _gpt_block([4] * 4)["out"]}
    shared = BlockSchedule(share_cotangent=True)
    once, twice = (
        simulate_block(layers, (32, 8), PAPER, block=b, record=True)
        for b in (shared, BlockSchedule())
    )

    def gathers(timeline):
        return [span for span in timeline.spans if span.what.startswith("all_gather")]

    assert len(gathers(twice)) - len(gathers(once)) == 4
    # The gathered cotangent, tokens / 32 x 12288 in bfloat16, stays for the second product.
    assert once.peak_temporary_bytes > twice.peak_temporary_bytes
    assert once.total_s < twice.total_s


def test_slices_that_differ_share_the_whole_cotangent():
    problem, plan = _gpt_block([4] * 4)["out"]
    other = dataclasses.replace(plan, grad_rhs=dataclasses.replace(plan.grad_rhs, slice_count=2))
    block = BlockSchedule(share_cotangent=True, grad_lhs_first=True, prefetch_saved=True)
    found = simulate_block({"out": (problem, other)}, (32, 8), PAPER, block=block, record=True)
    ends = {
        (span.name, span.what.split()[0], span.step): (span.start_s[0, 0], span.end_s[0, 0])
        for span in found.spans
    }
    last_gather = max(
        end
        for (name, what, _), (_, end) in ends.items()
        if (name, what) == ("out/grad_lhs", "all_gather")
    )
    assert ends["out/grad_rhs", "product", 0][0] >= last_gather


def test_nothing_is_shared_where_the_cotangent_stays_put():
    layers = {"qkv": _gpt_block([6] * 4)["qkv"]}  # Y stationary: only dW's rhs, dX's lhs
    plain, shared = (
        simulate_block(layers, (32, 8), PAPER, block=BlockSchedule(share_cotangent=share))
        for share in (False, True)
    )
    assert plain.total_s == shared.total_s


@given(
    flags=st.fixed_dictionaries(
        dict.fromkeys([next(iter(option)) for option in OPTIONS], st.booleans())
    ),
    depth=st.sampled_from([2, 3]),
)
@settings(max_examples=25, deadline=None)
def test_no_option_loses_and_none_beats_the_math(flags, depth):
    layers = _gpt_block([3, 2, 3, 3])
    plain = simulate_block(layers, (32, 8), QUIET)
    found = simulate_block(layers, (32, 8), QUIET, block=BlockSchedule(buffer_depth=depth, **flags))
    assert plain.math_s < found.total_s <= plain.total_s * (1 + 1e-9)


def test_blocks_of_every_algorithm_run():
    for name in ("collective", "summa", "wang", "cannon", "fsdp"):
        problems = model_layers("gpt3-125m", batch=16, dtype="bfloat16")
        plan = LayerPlan(forward=GemmPlan(algorithm=name, dataflow="os"))
        layers = {layer: (problem, plan) for layer, problem in problems.items()}
        plain = simulate_block(layers, (4, 4), QUIET)
        overlapped = simulate_block(layers, (4, 4), QUIET, block=OVERLAPPED_BLOCK)
        assert plain.math_s <= overlapped.total_s <= plain.total_s * (1 + 1e-9), name


def test_a_block_without_layers_is_refused():
    with pytest.raises(ValueError, match="at least one layer"):
        simulate_block({}, (4, 4))


def test_1d_and_2d_products_are_not_mixed():
    problem = GemmProblem.uniform(m=256, n=256, k=256, dtype="bfloat16")
    layers = {
        "a": (problem, LayerPlan(forward=GemmPlan())),
        "b": (problem, LayerPlan(forward=GemmPlan(algorithm="fsdp"))),
    }
    with pytest.raises(ValueError, match="1D and 2D algorithms use the chips as different meshes"):
        simulate_block(layers, (4, 4))


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"buffer_depth": 1}, ValueError, "buffer_depth must be 2 .* got 1"),
        ({"buffer_depth": "2"}, TypeError, "buffer_depth must be an int"),
        ({"prefetch_weight": 1}, TypeError, "prefetch_weight must be True or False, got 1"),
    ],
)
def test_impossible_block_schedules_are_refused(fields, error, words):
    with pytest.raises(error, match=words):
        BlockSchedule(**fields)


def test_the_default_block_schedule_is_plain():
    assert BlockSchedule().is_plain
    assert not OVERLAPPED_BLOCK.is_plain


@pytest.mark.parametrize(
    ("chips", "shape", "slice_counts", "limit_s"),
    [(256, (32, 8), [6, 4, 6, 6], 2.0), (4096, (64, 64), [3, 3, 3, 3], 30.0)],
)
def test_a_block_is_simulated_in_time(chips, shape, slice_counts, limit_s):
    faults = Faults(product_jitter=0.05, hop_jitter=0.05)
    layers = _gpt_block(slice_counts, chips)
    begin = time.perf_counter()
    simulate_block(layers, shape, PAPER, faults=faults)
    assert time.perf_counter() - begin < limit_s


@pytest.mark.slow
@pytest.mark.parametrize("study", block_study.STUDIES[:2], ids=lambda study: study.model)
def test_the_documented_tables_are_the_programs(study):
    text = (Path(__file__).parents[1] / "docs" / "simulator.md").read_text()
    assert block_study.table(study) in text


@pytest.mark.slow
def test_the_documented_losses_are_the_programs():
    text = (Path(__file__).parents[1] / "docs" / "simulator.md").read_text()
    assert fault_study.table() in text


def test_slice_counts_of_the_plain_order_are_the_papers_tuned_ones():
    assert block_study.closed_form_counts(block_study.STUDIES[0]) == (6, 4, 6, 6)
    assert block_study.closed_form_counts(block_study.STUDIES[1]) == (10, 5, 20, 20)
