"""The tuner: against plain enumeration, against the paper, and on what cannot work."""

import dataclasses
import functools
import inspect
import itertools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshslice_jax import algorithms
from meshslice_jax.algorithms import view
from meshslice_jax.autotune import (
    memory,
    overlap,
    replicas,
    reprice,
    search,
    space,
    tune,
    tune_report,
)
from meshslice_jax.autotune.compare import compare
from meshslice_jax.autotune.product import OPTION_VALUES, TWO_D, Pins, Pricer
from meshslice_jax.autotune.relayout import placement, relayout_s
from meshslice_jax.cost import seconds
from meshslice_jax.dataflow import Contraction, Dataflow
from meshslice_jax.gemm import matmul
from meshslice_jax.hardware import HARDWARE
from meshslice_jax.mesh import MeshShape, divisors, factorisations, make_mesh
from meshslice_jax.model_plan import PASSES
from meshslice_jax.models import MODELS, fc_layers
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.problem import GemmProblem

PAPER = HARDWARE["tpu_v4_paper"]
TINY = dataclasses.replace(
    MODELS["gpt3-125m"], name="tiny", hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256
)
GATED = dataclasses.replace(
    MODELS["llama3-8b"], name="gated", hidden=96, heads=6, kv_heads=2, head_dim=16, ffn=160
)
#: Layers that agree on a dataflow and disagree on placements.
RS = {"algorithm": "meshslice", "dataflow": "rs", "row_axis": "row", "col_axis": "col"}
TWINS = {"qkv": RS, "out": RS}


# --- plain enumeration ---------------------------------------------------------------------


def settings_of(name: str, split: str):
    """Every setting of an algorithm's options, as fields of GemmPlan."""
    found = [{}]
    for field, values in OPTION_VALUES.items():
        if field in algorithms.ALGORITHMS[name].options:
            found = [one | {field: value} for one in found for value in values]
    return [one | {"split": split} for one in found]


@functools.cache
def best_pass(problem, dataflow, names, split, sizes, hardware):
    """Seconds of the fastest legal plan of one product, or None."""
    best = None
    streamed = problem.extent(Contraction(dataflow=dataflow).streamed)
    for name in names:
        for fields in settings_of(name, split):
            for count in {*divisors(streamed), *divisors(sizes.num_chips)}:
                plan = GemmPlan(
                    algorithm=name,
                    dataflow=dataflow,
                    slice_count=count,
                    reduce_dtype="output",
                    block_size=8 if name == "meshslice" and count > 1 else None,
                    **fields,
                )
                if algorithms.fits(problem, plan, sizes):
                    plan = dataclasses.replace(plan, block_size=None)
                    found = algorithms.schedule(problem, plan, sizes)
                    total = seconds(found, problem, hardware).total_s
                    best = total if best is None else min(best, total)
    return best


def layer_ways(problem, shape, hardware):
    """Every (seconds, lhs placement, out placement) of a layer on one mesh."""
    families = [(TWO_D, "column", flow, twin) for flow in Dataflow for twin in (False, True)]
    families += [(("fsdp",), "column", flow, False) for flow in (Dataflow.OS, Dataflow.LS)]
    families += [(("tp1d",), split, Dataflow.RS, False) for split in ("column", "row")]
    for names, split, flow, twin in families:
        axes = {"row_axis": "col", "col_axis": "row"} if twin else {}
        forward = GemmPlan(algorithm=names[0], dataflow=flow, split=split, **axes)
        own = algorithms.layer_problems(problem, forward)
        layer = LayerPlan(forward=forward)
        parts = [
            best_pass(
                own[part],
                getattr(layer, part).dataflow,
                names,
                split,
                view(forward, shape),
                hardware,
            )
            for part in PASSES
        ]
        if None not in parts:
            yield sum(parts), placement(forward, "lhs", shape), placement(forward, "out", shape)


def enumerated(model, problems, shape, hardware) -> float:
    """Seconds of the best block on one mesh, over all combinations of its layers' ways."""
    ways = {name: list(layer_ways(problem, shape, hardware)) for name, problem in problems.items()}
    places = {place for found in ways.values() for way in found for place in way[1:]}
    best = float("inf")
    for stream in places:
        total = 0.0
        for branch in model.branches:
            shortest = float("inf")
            for chosen in itertools.product(*(ways[name] for name in branch)):
                place, spent = stream, 0.0
                for name, (own, lhs, out) in zip(branch, chosen, strict=True):
                    size = problems[name].bytes("lhs")
                    spent += own + 2 * relayout_s(size, place, lhs, shape, hardware)
                    place = out
                size = problems[branch[-1]].bytes("out")
                spent += 2 * relayout_s(size, place, stream, shape, hardware)
                shortest = min(shortest, spent)
            total += shortest
        best = min(best, total)
    return best


@pytest.mark.parametrize(
    ("model", "chips", "batch", "hardware"),
    [
        (TINY, 4, 1, "tpu_v4_paper"),
        (GATED, 2, 16, "tpu_v4_paper_3"),
        (GATED, 4, 2, "tpu_v4"),
        (TINY, 4, 32, "tpu_v5e"),
        (GATED, 8, 2, "tpu_v4_lowlat"),
        (MODELS["gpt3-125m"], 4, 64, "tpu_v4_paper"),
        (MODELS["gpt3-6.7b"], 8, 2048, "tpu_v4"),
    ],
)
def test_exact_search_equals_enumeration(model, chips, batch, hardware):
    seq_len = 32
    problems = fc_layers(model, batch * seq_len)
    spec = HARDWARE[hardware]
    expected = {shape: enumerated(model, problems, shape, spec) for shape in factorisations(chips)}
    report = tune_report(model, chips, batch=batch, seq_len=seq_len, hardware=hardware)
    assert report.plan.predicted.block_s == pytest.approx(min(expected.values()), rel=1e-9)
    for one in report.meshes:
        if one.status == "bounded":  # a true floor, and rightly not searched
            assert one.block_s <= expected[one.mesh_shape] * (1 + 1e-9)
            assert one.block_s > report.plan.predicted.block_s
        else:
            assert one.block_s == pytest.approx(expected[one.mesh_shape], rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    extents=st.tuples(*(st.sampled_from([64, 192, 1024, 8192, 65536]),) * 3),
    dataflow=st.sampled_from(list(Dataflow)),
    shape=st.sampled_from([(1, 1), (2, 2), (1, 8), (4, 2), (4, 16)]),
    hardware=st.sampled_from(list(HARDWARE)),
)
def test_floors_lie_under_every_algorithm(extents, dataflow, shape, hardware):
    m, n, k = extents
    problem = GemmProblem.uniform(m=m, n=n, k=k, dtype="bfloat16")
    floor = Pricer(HARDWARE[hardware], {}).floor_s(problem, dataflow, MeshShape(*shape))
    for name in TWO_D:
        for fields in settings_of(name, "column"):
            plan = GemmPlan(algorithm=name, dataflow=dataflow, **fields)
            for count in (1, 2, 4, 16):
                tried = dataclasses.replace(plan, slice_count=count)
                if algorithms.fits(problem, tried, MeshShape(*shape)):
                    found = algorithms.schedule(problem, tried, shape)
                    assert floor <= seconds(found, problem, HARDWARE[hardware]).total_s


def test_prediction_adds_up_from_the_plan_itself():
    """What the plan says is what was priced: schedules and seconds made anew from it."""
    plan = tune("llama3-8b", 64, batch=4)
    found = plan.predicted
    total = 0.0
    for name, problem in plan.problems().items():
        layer = plan.layers[name]
        for part, own in algorithms.layer_problems(problem, layer.forward).items():
            gemm = getattr(layer, part)
            made = algorithms.schedule(own, gemm, view(gemm, plan.mesh_shape))
            cost = seconds(made, own, HARDWARE["tpu_v4"])
            one = found.layers[name][part]
            assert one.total_s == cost.total_s
            assert (one.bytes_row, one.bytes_col) == (
                made.bytes_along("row"),
                made.bytes_along("col"),
            )
            assert one.peak_bytes == made.peak_bytes
            assert one.exposed_s == cost.total_s - cost.math_s
            total += cost.total_s
    assert found.fc_s == pytest.approx(total)
    assert found.block_s == pytest.approx(found.fc_s + found.relayout_s + found.data_parallel_s)


@pytest.mark.parametrize(
    ("model", "chips", "arguments"),
    [
        ("llama3-8b", 64, {"batch": 4}),
        ("gpt3-125m", 4, {"mesh_shape": (2, 2), "overrides": TWINS}),
        ("gpt3-6.7b", 16, {"data_parallel": 2, "memory": "training"}),
        ("gpt3-175b", 256, {"hardware": "tpu_v4_paper", "allow_modelled": True}),
    ],
)
def test_a_plans_prediction_can_be_made_anew_and_compared(model, chips, arguments):
    plan = tune(model, chips, **arguments)
    assert reprice.stale(plan) == []
    edited = dataclasses.replace(plan.predicted, relayout_s=0.125)
    (line,) = reprice.stale(dataclasses.replace(plan, predicted=edited))
    assert line.startswith("$.predicted.relayout_s is 0.125, the model gives ")
    layers = {name: dict(passes) for name, passes in plan.predicted.layers.items()}
    layers["qkv"]["forward"] = dataclasses.replace(layers["qkv"]["forward"], bytes_row=-1.0)
    del layers["out"]["grad_rhs"]
    edited = dataclasses.replace(plan.predicted, layers=layers)
    lines = reprice.stale(dataclasses.replace(plan, predicted=edited))
    assert lines[0].startswith("$.predicted.layers.qkv.forward.bytes_row is -1, the model gives")
    assert lines[1].startswith("$.predicted.layers.out.grad_rhs.math_s is missing, the model")
    assert len(lines) == 1 + 8
    assert reprice.stale(dataclasses.replace(plan, hardware="unknown")) == []


def test_notes_say_what_no_number_says():
    assert tune_report(GATED, 4, seq_len=32, batch=4, mesh_shape=(2, 2)).notes == []
    columns = {name: {"row_axis": "row", "col_axis": "col", "dataflow": "os"} for name in ["qkv"]}
    report = tune_report(
        dataclasses.replace(GATED, seq_len=16),
        4,
        seq_len=32,
        batch=4,
        mesh_shape=(1, 4),
        overrides=columns,
    )
    long, attention = report.notes
    assert long.startswith("seq_len 32 is more than the 16 tokens that gated was made for")
    assert "kv_heads = 2 is not divisible by the 4 chips over which it would lie" in attention


# --- the paper -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "utilisation", "counts"),
    [("gpt3-175b", 67.5, [6, 4, 6, 6]), ("megatron-530b", 82.1, [10, 5, 20, 20])],
)
def test_paper_search_finds_the_papers_plan(model, utilisation, counts):
    """32x8, largest matrix stationary, the slice counts of the calibration."""
    plan = tune(model, 256, hardware="tpu_v4_paper", search="paper")
    assert plan.mesh_shape == (32, 8)
    assert plan.predicted.utilisation * 100 == pytest.approx(utilisation, abs=0.06)
    for layer, count in zip(plan.layers.values(), counts, strict=True):
        assert {getattr(layer, part).slice_count for part in PASSES} == {count}
        assert {getattr(layer, part).algorithm for part in PASSES} == {"meshslice"}
    flows = [layer.forward.dataflow.value for layer in plan.layers.values()]
    assert flows == ["os", "ls", "os", "ls"]


def test_largest_stationary():
    def flow(m, n, k):
        return space.largest_stationary(GemmProblem.uniform(m=m, n=n, k=k))

    assert flow(100, 20, 10) is Dataflow.OS
    assert flow(100, 10, 20) is Dataflow.LS
    assert flow(100, 10, 10) is Dataflow.LS  # a tie of lhs and out
    assert flow(5, 20, 10) is Dataflow.RS
    assert flow(5, 10, 20) is Dataflow.RS


@settings(max_examples=8, deadline=None)
@given(
    model=st.sampled_from(["gpt3-125m", "gpt3-6.7b", "llama3-8b", "gemma-2b", "qwen2-7b"]),
    chips=st.sampled_from([4, 16]),
    batch=st.sampled_from([1, 4, 64]),
    hardware=st.sampled_from(["tpu_v4", "tpu_v4_paper", "tpu_v5e"]),
)
def test_exact_is_never_worse_than_the_paper(model, chips, batch, hardware):
    common = {"batch": batch, "seq_len": 512, "hardware": hardware}
    exact = tune(model, chips, **common).predicted
    paper = tune(model, chips, search="paper", **common).predicted
    assert exact.block_s <= paper.block_s * (1 + 1e-9)


# --- choices -------------------------------------------------------------------------------


def best(m, n, k, dataflow, shape, hardware="tpu_v4"):
    pricer = Pricer(HARDWARE[hardware], {"reduce_dtype": "output"})
    problem = GemmProblem.uniform(m=m, n=n, k=k, dtype="bfloat16")
    return pricer.best(problem, Dataflow(dataflow), MeshShape(*shape), Pins())


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_small_products_are_not_sliced(dataflow):
    found = best(64, 64, 64, dataflow, (4, 4)).plan
    assert (found.algorithm, found.slice_count) == ("collective", 1)
    # On a ring of two Wang's one send is as short as a gather, so it may win, but with S = 1.
    assert best(64, 64, 64, dataflow, (2, 2)).plan.slice_count == 1
    large = best(262144, 36864, 12288, dataflow, (32, 8)).plan
    assert large.slice_count > 1


def test_a_product_with_a_skinny_output_splits_k_over_the_chips():
    """m = n = 8: with the output stationary, every chip streams all of a long k.

    (Below some k it is latency that counts, and OS has one collective less in a row.)
    """
    found = {flow: best(8, 8, 2**20, flow, (2, 4)) for flow in ("os", "ls", "rs")}
    fastest = min(found, key=lambda flow: found[flow].cost.total_s)
    assert fastest != "os"
    product = next(step.product for step, _ in found[fastest].schedule.steps if step.product)
    assert product.k < 2**20


def test_the_mesh_turns_with_the_batch():
    """Few tokens move the activations, many move the weights."""
    few = tune("gpt3-6.7b", 64, batch=1, mesh_shape=None, search="paper")
    many = tune("gpt3-6.7b", 64, batch=64, search="paper")
    assert few.mesh_shape.rows < many.mesh_shape.rows


def test_tuning_is_deterministic_and_knows_no_seed():
    first, second = (tune("llama3-8b", 64, batch=4, seq_len=32) for _ in range(2))
    assert first == second


def test_one_chip_needs_no_transfer():
    plan = tune("gpt3-125m", 1)
    assert (plan.batch, plan.mesh_shape) == (1, (1, 1))
    assert plan.predicted.layers["qkv"]["forward"].bytes == 0
    assert all(layer.forward.algorithm == "collective" for layer in plan.layers.values())


def test_layers_that_disagree_pay_a_relayout():
    plan = tune("gpt3-125m", 4, mesh_shape=(2, 2), overrides=TWINS)
    # qkv wants m along col and leaves it along row; out, pinned alike, wants it along col.
    assert plan.predicted.relayout_s > 0
    free = tune("gpt3-125m", 4, mesh_shape=(2, 2))
    assert free.predicted.block_s <= plan.predicted.block_s


def test_relayout_by_hand():
    """A shard of 1 MB on 4 x 2: both axes move; 1 MB x P / (4 x rate), launch and hops."""
    spec, shape = PAPER, MeshShape(4, 2)
    one = (("row",), ("col",))
    other = (("col",), ("row",))
    rate = 2 * 50e9 * 0.84
    by_hand = 2 * 13e-6 + (2 + 1) * 13.8e-6 + 1e6 * 4 / (4 * rate) + 1e6 * 2 / (4 * rate)
    assert relayout_s(8_000_000, one, other, shape, spec) == pytest.approx(by_hand)
    assert relayout_s(8_000_000, one, one, shape, spec) == 0
    flat = (("row", "col"), ())
    by_hand = 13e-6 + 13.8e-6 + 1e6 * 2 / (4 * rate)  # only col moves
    assert relayout_s(8_000_000, one, flat, shape, spec) == pytest.approx(by_hand)


# --- pins ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_an_algorithm_can_be_pinned(name):
    plan = tune("gpt3-125m", 16, algorithm=name)
    used = {getattr(layer, part).algorithm for layer in plan.layers.values() for part in PASSES}
    assert used == {name}
    if name == "cannon":
        assert plan.mesh_shape == (4, 4)


def test_a_mesh_shape_can_be_pinned():
    report = tune_report("gpt3-125m", 16, mesh_shape=(2, 8))
    assert report.plan.mesh_shape == (2, 8)
    assert len(report.meshes) == 1


def test_layers_can_be_pinned_in_part_or_whole():
    whole = LayerPlan(
        forward=GemmPlan(dataflow="ls", slice_count=2),
        grad_rhs=GemmPlan(dataflow="rs", algorithm="wang"),
    )
    fields = {"dataflow": "os", "slice_count": 3, "loop": "rolled", "algorithm": "meshslice"}
    gemm = GemmPlan(dataflow="os", slice_count=4, reduce_dtype="output")
    plan = tune(
        "gpt3-125m",
        16,
        mesh_shape=(4, 4),
        overrides={"qkv": whole, "out": fields, "ff1": gemm},
    )
    assert plan.layers["qkv"] == whole
    assert plan.layers["ff1"] == LayerPlan(forward=gemm)
    for part in PASSES:
        found = getattr(plan.layers["out"], part)
        assert (found.slice_count, found.loop, found.algorithm) == (3, "rolled", "meshslice")
    assert plan.layers["ff2"].forward.reduce_dtype == "output"


def test_pins_of_the_axes_choose_the_twin():
    given_ = {name: {"row_axis": "col", "dataflow": "os"} for name in TINY.fc_widths}
    plan = tune(TINY, 4, seq_len=64, overrides=given_)
    assert {layer.forward.row_axis for layer in plan.layers.values()} == {"col"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"search": "fast"}, "search='fast' is not one of exact, paper"),
        ({"memory": "all"}, "memory='all' is not one of fc_block, training"),
        ({"algorithm": "fox"}, "unknown algorithm 'fox'; there are meshslice"),
        ({"algorithm": "fsdp", "search": "paper"}, 'fsdp is a 1D algorithm; use search="exact"'),
        ({"batch": 0}, "batch must be a positive integer, got 0"),
        ({"dtype": "floaty"}, "dtype 'floaty' is not a dtype"),
        ({"dtype": "float64"}, "no FLOP/s for operands of float64"),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype='bfloat16' is not one of"),
        ({"data_parallel": 3}, "data_parallel 3 must divide num_chips 16 and batch 8; 1, 2, 4, 8"),
        ({"mesh_shape": (3, 5)}, r"mesh_shape \(3, 5\) with data_parallel 1 does not make 16"),
        ({"overrides": {"up": {}}}, "unknown layers up; there are qkv, out, ff1, ff2"),
        ({"overrides": {"qkv": {"slices": 2}}}, "unknown fields slices; GemmPlan has algorithm"),
        ({"overrides": {"qkv": {"algorithm": "fox"}}}, "layer 'qkv': unknown algorithm 'fox'"),
        ({"overrides": {"qkv": GemmPlan(packets=2)}}, "layer 'qkv': forward: meshslice does not"),
        (
            {"algorithm": "wang", "overrides": {"qkv": {"packets": 2}}},
            "layer 'qkv': wang does not read packets=2, only summa can",
        ),
        ({"overrides": {"qkv": GemmPlan(row_axis="x")}}, "the axes 'x', 'col'"),
        ({"overrides": {"qkv": {"batch_axes": ("d",)}}}, r"batch_axes \('d',\); the mesh of one"),
        ({"overrides": {"qkv": {"ring": "up"}}}, "ring='up' is not one of"),
        ({"hardware": "tpu_v9"}, "unknown hardware 'tpu_v9'"),
        ({"seq_len": 4096}, "seq_len 4096 is more than the 2048 positions that model 'gpt3-125m'"),
    ],
)
def test_arguments_that_cannot_be_right(arguments, words):
    with pytest.raises(ValueError, match=words):
        tune("gpt3-125m", 16, **arguments)


def test_an_overridden_option_is_for_the_algorithms_that_read_it():
    plan = tune("gpt3-125m", 4, mesh_shape=(2, 2), overrides={"qkv": {"packets": 2}})
    for part in ("forward", "grad_lhs", "grad_rhs"):
        found = getattr(plan.layers["qkv"], part)
        assert (found.algorithm, found.packets) == ("summa", 2)


def test_an_override_of_the_wrong_kind():
    with pytest.raises(TypeError, match="must be a LayerPlan, a GemmPlan or a mapping"):
        tune("gpt3-125m", 16, overrides={"qkv": "os"})


def test_a_sequence_is_as_long_as_the_model_allows():
    short = dataclasses.replace(TINY, seq_len=256)
    assert tune(short, 4).seq_len == 256
    assert tune(TINY, 4).seq_len == 2048
    rotary = dataclasses.replace(GATED, seq_len=256)
    assert tune(rotary, 4, seq_len=512).seq_len == 512


def test_both_front_doors_have_the_same_defaults():
    given_ = inspect.signature(tune).parameters
    resolved = inspect.signature(search.Tuning.of).parameters
    assert {n: p.default for n, p in given_.items()} == {n: p.default for n, p in resolved.items()}


# --- nothing infeasible --------------------------------------------------------------------


def test_a_prime_number_of_chips_is_explained_mesh_by_mesh():
    with pytest.raises(ValueError, match="no mesh of 7 chips runs gpt3-175b") as caught:
        tune("gpt3-175b", 7)
    text = str(caught.value)
    for mesh in ("1x7", "7x1"):
        (line,) = (line for line in text.splitlines() if line.strip().startswith(mesh))
        assert "qkv: forward rs: lhs dimension" in line
        assert "is not divisible by mesh axis" in line
        assert "of size 7" in line
        assert "cannon" not in line  # what all algorithms share is enough
    assert text.endswith("ways out: 6 chips; or 8 chips; or data_parallel 7 with batch 7")
    for chips in (6, 8):
        assert tune("gpt3-175b", chips).num_chips == chips
    assert tune("gpt3-175b", 7, data_parallel=7, batch=7).mesh_shape == (1, 1)


def test_pins_that_are_to_blame_are_named():
    with pytest.raises(ValueError, match=r"ways out: without algorithm$"):
        tune("gpt3-125m", 6, algorithm="cannon")


@pytest.mark.parametrize("search_", [pytest.param("exact", marks=pytest.mark.slow), "paper"])
def test_a_limit_below_the_shards_names_what_would_fit(search_):
    def with_(chips=4, limit=8 * 10**5, **changed):
        sizes = {"batch": 8, "seq_len": 512} | changed
        return tune(TINY, chips, memory_limit_bytes=limit, search=search_, **sizes)

    with pytest.raises(ValueError, match="shards alone") as told:
        with_()
    ways = str(told.value).splitlines()[-1]
    least, shape = re.search(
        r"a memory limit of ([\d,]+) bytes, the smallest that works \(on (\dx\d)\)", ways
    ).groups()
    least = int(least.replace(",", ""))
    assert str(with_(limit=least).mesh_shape) == shape
    with pytest.raises(ValueError, match="its leanest plan is 1 bytes over"):
        with_(limit=least - 1)
    batch, seq_len, chips = map(
        int,
        re.search(r"batch (\d+); or seq_len (\d+); or (\d+) chips with batch 8", ways).groups(),
    )
    for changed in ({"batch": batch}, {"seq_len": seq_len}, {"chips": chips}):
        assert with_(**changed).predicted.memory_bytes <= 8 * 10**5


def test_a_slice_count_that_fits_nowhere_is_explained():
    with pytest.raises(ValueError, match="slice_count 7 x block_size 1 does not divide"):
        tune("gpt3-125m", 4, overrides={"ff1": {"slice_count": 7, "algorithm": "meshslice"}})


def test_cannon_rejects_all_but_square_meshes():
    report = tune_report("gpt3-125m", 16, algorithm="cannon")
    assert {one.mesh_shape for one in report.rejected} == {(1, 16), (2, 8), (8, 2), (16, 1)}
    assert all("cannon needs a square mesh" in one.reason for one in report.rejected)


def test_a_limit_that_nothing_meets_says_by_how_many_bytes():
    """fc_block of a GPT on 4 chips: lhs 7 H m and twice 12 H^2 weights, in bfloat16."""
    h, m = 64, 2 * 2048
    shards = (2 * 7 * h * m + 2 * 2 * 12 * h * h) // 4
    with pytest.raises(ValueError, match=f"{shards:,} bytes of a chip, {shards - 10**5:,} over"):
        tune(TINY, 4, memory_limit_bytes=10**5)


@pytest.mark.slow
def test_a_limit_between_shards_and_the_leanest_plan_names_layer_and_pass():
    shards = memory.resident_bytes("fc_block", TINY, fc_layers(TINY, 2 * 2048), 4)
    # The worst product is named: that much more is what fits, and a byte less is not.
    with pytest.raises(ValueError) as told:
        tune(TINY, 4, memory_limit_bytes=shards + 1)
    found = re.findall(
        r"ff\d \w+ \(fc_block\): its leanest plan is ([\d,]+) bytes", str(told.value)
    )
    least = shards + 1 + min(int(over.replace(",", "")) for over in found)
    assert tune(TINY, 4, memory_limit_bytes=least).predicted.memory_bytes <= least
    with pytest.raises(ValueError, match="its leanest plan is 1 bytes over"):
        tune(TINY, 4, memory_limit_bytes=least - 1)


@pytest.mark.parametrize("share", [0.95, 0.8, 0.7])
def test_a_memory_limit_is_kept_and_costs_time(share):
    free = tune("gpt3-6.7b", 16)
    limit = int(free.predicted.memory_bytes * share)
    tight = tune("gpt3-6.7b", 16, memory_limit_bytes=limit)
    assert tight.predicted.memory_bytes <= limit < free.predicted.memory_bytes
    assert tight.predicted.block_s >= free.predicted.block_s


def test_memory_of_a_block_by_hand():
    """Collective OS on 2x2, bfloat16: see the formula of `autotune.memory`."""
    plan = tune(TINY, 4, batch=1, seq_len=64, algorithm="collective", mesh_shape=(2, 2))
    widths = TINY.fc_widths.values()
    inputs = sum(64 * k for k, _ in widths)
    weights = sum(k * n for k, n in widths)
    resident = 2 * (inputs + 2 * weights) // 4
    most = 0
    for name, problem in plan.problems().items():
        forward = plan.layers[name].forward
        for part, own in algorithms.layer_problems(problem, forward).items():
            gemm = getattr(plan.layers[name], part)
            held = algorithms.schedule(own, gemm, view(gemm, plan.mesh_shape)).temporary_bytes
            out, lhs = problem.bytes("out") // 4, problem.bytes("lhs") // 4
            extra = {"forward": out, "grad_lhs": out + lhs, "grad_rhs": out}[part]
            most = max(most, extra + held)
    assert plan.predicted.memory_bytes == resident + most


def test_training_memory_by_hand():
    """Per weight 2 + 2 + 8 bytes; block inputs of 96 layers; inputs of one block."""
    shape = MODELS["gpt3-175b"]
    m = 128 * 2048
    found = memory.resident_bytes("training", shape, fc_layers(shape, m), 256)
    weights = 96 * 12 * 12288**2 + 50257 * 12288
    by_hand = (12 * weights + 96 * 2 * m * 12288 + 2 * m * 12288 * 7) / 256
    assert found == pytest.approx(by_hand, abs=1)


def test_the_default_limit_is_the_chips_memory():
    report = tune_report("gpt3-125m", 4, hardware="tpu_v5e")
    assert report.memory_limit_bytes == HARDWARE["tpu_v5e"].hbm_bytes
    with pytest.raises(ValueError, match=r"over the limit of 34,359,738,368"):
        tune("gpt3-175b", 16, memory="training")


# --- data parallelism ----------------------------------------------------------------------


def test_replicas_take_part_in_the_search():
    report = tune_report("gpt3-6.7b", 16, data_parallel="auto", memory="training")
    plan = report.plan
    assert {one.data_parallel for one in report.meshes} == {1, 2, 4, 8}
    assert plan.data_parallel * plan.mesh_shape.num_chips == 16
    fixed = [
        tune("gpt3-6.7b", 16, data_parallel=degree, memory="training").predicted.block_s
        for degree in (1, 2, 4)
    ]
    assert plan.predicted.block_s <= min(fixed)
    # Eight replicas hold 8 x 6.65e9 x 12 bytes on 16 chips: more than 32 GiB each.
    assert all("shards alone" in one.reason for one in report.rejected)
    assert {one.data_parallel for one in report.rejected} >= {8}


def test_gradients_all_reduce_by_hand():
    """Reduce-scatter and all-gather of 24 MB over 4 replicas on a ring."""
    problems = {"one": GemmProblem.uniform(m=8, n=12_000_000, k=4, dtype="bfloat16")}
    rate = 2 * 50e9 * 0.84
    by_hand = 13e-6 + 26e-6 + 6 * 13.8e-6 + 2 * 3 / 4 * 24e6 / rate
    assert replicas.all_reduce_s(problems, 4, 4, PAPER) == pytest.approx(by_hand)
    assert replicas.all_reduce_s(problems, 1, 4, PAPER) == 0
    assert replicas.degrees(12, 8) == [1, 2, 4]


# --- reports -------------------------------------------------------------------------------


def test_reports_say_why_the_others_lost():
    report = tune_report("gpt3-175b", 256, hardware="tpu_v4_paper", search="paper")
    assert {one.mesh_shape for one in report.meshes} == set(factorisations(256))
    first, *others = report.meshes
    assert (first.status, first.block_s) == ("chosen", report.plan.predicted.block_s)
    slower = {one.mesh_shape: one for one in report.runners_up if one.status == "slower"}
    assert slower[(16, 16)].reason.startswith("+28.1%")
    assert "exposed communication +17" in slower[(16, 16)].reason
    assert all(one.block_s >= first.block_s for one in others)


def test_equal_meshes_are_said_to_be_equal():
    report = tune_report("gpt3-175b", 256, hardware="tpu_v4_paper")
    assert report.plan.mesh_shape == (32, 8)  # of 32x8 and its mirror image, the one without twins
    mirror = next(one for one in report.runners_up if one.mesh_shape == (8, 32))
    assert mirror.reason.startswith("equally fast")


# --- beyond the runtime --------------------------------------------------------------------


def test_modelled_options_need_a_word_and_are_marked():
    plain = tune("gpt3-175b", 256, hardware="tpu_v4_paper")
    assert plain.block_schedule.is_plain
    assert not plain.modelled_only
    report = tune_report("gpt3-175b", 256, hardware="tpu_v4_paper", allow_modelled=True)
    plan = report.plan
    assert plan.modelled_only
    assert plan.predicted.block_s < plain.predicted.block_s
    assert plan.predicted.memory_bytes > plain.predicted.memory_bytes
    assert "only the model knows" in report.meshes[0].reason


def test_modelled_options_keep_the_memory_limit():
    plain = tune("gpt3-6.7b", 16, hardware="tpu_v4_paper")
    limit = plain.predicted.memory_bytes
    plan = tune(
        "gpt3-6.7b", 16, hardware="tpu_v4_paper", allow_modelled=True, memory_limit_bytes=limit
    )
    assert plan.predicted.memory_bytes <= limit


def test_the_ladder_starts_plain_and_opens_everything():
    rungs = list(overlap.ladder())
    assert rungs[0].is_plain
    assert all(getattr(rungs[-1], name) for name in overlap.LADDER)
    assert len(rungs) == len(set(rungs)) == 7


# --- running what was tuned ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "names"), [({}, ["out", "ff1"]), ({"qkv": {"dataflow": "rs"}}, ["qkv", "out"])]
)
def test_tuned_layers_run_exactly(given_, names):
    """Integer operands through tuned layers, forward and both gradients."""
    plan = tune(
        TINY, 8, batch=2, seq_len=32, dtype="float32", reduce_dtype="float32", overrides=given_
    )
    mesh = make_mesh(plan.mesh_shape)
    rng = np.random.default_rng(0)
    for name in names:
        problem = plan.problems()[name]
        lhs = rng.integers(-1, 2, (problem.m, problem.k)).astype("float32")
        rhs = rng.integers(-1, 2, (problem.k, problem.n)).astype("float32")

        def loss(lhs, rhs, layer=plan.layers[name]):
            return (matmul(lhs, rhs, layer, mesh=mesh) ** 2).sum()

        grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(lhs), jnp.asarray(rhs))
        ct = 2 * (lhs @ rhs)
        np.testing.assert_array_equal(grads[0], ct @ rhs.T)
        np.testing.assert_array_equal(grads[1], lhs.T @ ct)


# --- speed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("chips", "limit_s"), [(256, 1.0), (4096, 10.0)])
def test_tuning_is_quick(chips, limit_s):
    """Seconds of processor time, so that a busy machine does not count."""
    start = time.process_time()
    tune("gpt3-175b", chips)
    assert time.process_time() - start < limit_s


def test_the_table_of_the_docs_is_made_of_comparisons():
    one = compare("gpt3-125m", 4, "small", batch=1)
    assert one.gain is not None
    assert one.gain >= 0
    assert compare("gpt3-125m", 4, batch=1, memory_share=1.0).exact_s == one.exact_s
    nothing = compare("gpt3-125m", 7)
    assert (nothing.paper_s, nothing.exact_s, nothing.gain) == (None, None, None)
    assert nothing.changes == "nothing fits"


def test_hardware_that_waits_for_its_reduce_scatters_gets_other_forms():
    """On v4 as compiled, every product whose output moves is scattered by sends or exchanges."""
    nominal = tune("gpt3-175b", 16, mesh_shape=(4, 4))
    compiled = tune("gpt3-175b", 16, mesh_shape=(4, 4), hardware="tpu_v4_compiled")
    native = tune(
        "gpt3-175b", 16, mesh_shape=(4, 4), hardware="tpu_v4_compiled",
        overrides={name: {"reduce_scatter": "native"} for name in nominal.layers},
    )  # fmt: skip
    scattered = [
        own
        for layer in compiled.layers.values()
        for own in vars(layer).values()
        if own.algorithm == "meshslice" and own.dataflow is not Dataflow.OS
    ]
    assert scattered
    assert {own.reduce_scatter for own in scattered} <= {"ring", "all_to_all"}
    assert nominal.predicted.block_s <= compiled.predicted.block_s < native.predicted.block_s
