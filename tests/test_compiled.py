"""Topologies, options and candidates; and the TPU compiler itself where libtpu is installed."""

import collections
import dataclasses
import importlib.util
import itertools
import math
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import meshslice_jax as ms
from meshslice_jax.compiled import candidates, hlo, peak, program, run
from meshslice_jax.compiled.candidates import Space
from meshslice_jax.compiled.compiler import Compiler
from meshslice_jax.compiled.jobs import Answer, BlockJob, ProbeJob, ProductJob
from meshslice_jax.compiled.layout import lay_out
from meshslice_jax.compiled.options import (
    ASYNC_ALL_TO_ALLS,
    ASYNC_GATHERS,
    GSPMD_MODES,
    KEEP_SLICES,
    compiler_options,
    options_of_plans,
    probe_options,
)
from meshslice_jax.compiled.program import Move
from meshslice_jax.compiled.topology import (
    GENERATIONS,
    environment,
    parse_topology,
    require_libtpu,
)
from meshslice_jax.hardware import HARDWARE
from meshslice_jax.plan import as_layer_plan

live = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install libtpu",
)
DATA = Path(__file__).parent / "data"
V4 = parse_topology("v4:4x4")
SHAPE = ms.MeshShape(4, 4)


# --- topologies -----------------------------------------------------------------------------


def test_names_of_topologies():
    assert str(parse_topology("v4:4x8x8")) == "v4:4x8x8"
    assert str(parse_topology("v4:4x4")) == "v4:4x4x1"
    assert parse_topology("v5e:16x16").num_chips == 256
    assert parse_topology("v6e:2x4").hardware is HARDWARE["tpu_v6e"]


@pytest.mark.parametrize(
    "text, telling",
    [
        ("v9:4x4", "no known generation; there are v4, v5e, v5p, v6e"),
        ("v4", "has no sizes of the form"),
        ("v4:4xfour", "has no sizes of the form"),
        ("v5e:4x4x4", "has 3 sizes, and the torus of v5e has 2"),
    ],
)
def test_names_that_are_none(text, telling):
    with pytest.raises(ValueError, match=telling):
        parse_topology(text)


def test_clocks_follow_from_the_peak():
    clocks = {g.name: g.clock_hz(HARDWARE[g.hardware]) / 1e9 for g in GENERATIONS.values()}
    expected = {"v4": 1.049, "v5e": 1.503, "v5p": 1.751, "v6e": 1.751}
    assert clocks == pytest.approx(expected, abs=1e-3)


def test_the_environment_names_the_accelerator_by_its_cores():
    assert environment(parse_topology("v4:4x8x8"))["TPU_ACCELERATOR_TYPE"] == "v4-512"
    assert environment(parse_topology("v5e:4x4"))["TPU_ACCELERATOR_TYPE"] == "v5litepod-16"
    assert environment(V4)["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    "dims, shape",
    [
        ((4, 4, 1), (4, 4)),
        ((4, 4, 1), (16, 1)),
        ((4, 8, 8), (32, 8)),
        ((4, 8, 8), (8, 32)),
        ((4, 4, 16), (16, 16)),
        ((3, 4), (12, 1)),
        ((16, 16), (16, 16)),
    ],
)
def test_a_mesh_axis_is_dimensions_of_the_torus_in_row_major_order(dims, shape):
    layout = lay_out(dims, shape)
    assert set(layout.places) == set(itertools.product(*map(range, dims)))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    for axis, name in enumerate(("row", "col")):
        own = [d for d in range(len(dims)) if layout.names[d].startswith(name)]
        for line in np.moveaxis(numbers, axis, -1).reshape(-1, shape[axis]):
            places = [layout.places[chip] for chip in line]
            assert set(layout.spanned(tuple(line))) <= set(own)
            along = [tuple(place[d] for d in own) for place in places]
            assert along == list(itertools.product(*(range(dims[d]) for d in own)))


def test_an_axis_of_two_dimensions_has_groups_and_rings_between_them():
    layout = lay_out((4, 8, 8), (32, 8))
    assert layout.names == ("row0", "row1", "col")
    group = tuple(8 * row for row in range(8))  # the first column's first eight rows
    ring = tuple(8 * row for row in range(0, 32, 8))
    assert (layout.spanned(group), layout.spanned(ring)) == ((1,), (0,))


def test_a_mesh_that_does_not_lie_on_a_torus():
    with pytest.raises(ValueError, match=r"16x16 mesh does not lie on a 4x8x8 torus.*32x8"):
        lay_out((4, 8, 8), (16, 16))


def test_without_libtpu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install libtpu"):
        require_libtpu()


# --- options --------------------------------------------------------------------------------


def test_options_by_generation_and_plan():
    os4, ls1 = ms.GemmPlan(slice_count=4), ms.GemmPlan(dataflow="ls")
    ls4 = ms.GemmPlan(dataflow="ls", slice_count=4)
    assert compiler_options("tpu_v4", os4) == dict(ASYNC_GATHERS)
    assert compiler_options("tpu_v4", ls1) == dict(ASYNC_GATHERS)
    assert compiler_options("tpu_v4", ls4) == dict(ASYNC_GATHERS) | dict(KEEP_SLICES)
    assert compiler_options("tpu_v5e", os4) == {}
    assert compiler_options("tpu_v6e", ls4) == dict(KEEP_SLICES)
    assert options_of_plans("tpu_v5p", (os4, ls4)) == dict(KEEP_SLICES)
    with pytest.raises(ValueError, match="no compiler options are known for hardware 'tpu_7x'"):
        compiler_options("tpu_7x", os4)


# --- candidates -----------------------------------------------------------------------------


def space(**changes):
    return Space(mesh_shape=SHAPE, hardware=V4.hardware, **changes)


def settings(found):
    return [(c.algorithm, c.plan.slice_count, c.form, c.option_set) for c in found]


PROBLEM = ms.GemmProblem.uniform(256, 512, 1024, "bfloat16")


def test_every_algorithm_gets_its_forms_and_both_option_sets():
    found = candidates.candidates(space(slice_counts=(2, 3)), PROBLEM, ms.GemmPlan(), "os")
    sets = ("tuned", "default")
    assert settings(found) == [
        *(("meshslice", 2, "native", s) for s in sets),  # 3 does not divide
        *(("meshslice", 2, "weight sliced", s) for s in sets),
        *(("meshslice", 3, "tapered ends", s) for s in sets),  # four halves do
        *(("meshslice", 3, "tapered ends, weight sliced", s) for s in sets),
        *(
            ("wang", count, f"{form}, ring along {ring}", s)
            for ring in ("row", "col")
            for form, count in (
                ("joined", 1),
                ("joined", 2),
                ("halves", 1),
                ("whole", 1),
                ("one_way", 1),
            )
            for s in sets
        ),
        *(("gspmd", 1, mode, s) for mode in GSPMD_MODES for s in sets),
        *(("collective", 1, "native", s) for s in sets),
    ]
    whole = [c for c in found if c.form == "whole" and c.option_set == "tuned"]
    assert whole[0].options == dict(ASYNC_GATHERS) | dict(GSPMD_MODES["whole"])


def test_equal_option_sets_are_tried_once_and_given_ones_alone():
    v5e = Space(mesh_shape=SHAPE, hardware=HARDWARE["tpu_v5e"], algorithms=("collective",))
    assert settings(candidates.candidates(v5e, PROBLEM, ms.GemmPlan(), "os")) == [
        ("collective", 1, "native", "tuned")
    ]
    given = space(algorithms=("collective",), given={"xla_a": 1})
    (one,) = candidates.candidates(given, PROBLEM, ms.GemmPlan(), "os")
    assert (one.option_set, one.options) == ("given", {"xla_a": 1})


def test_a_twin_plan_sees_the_mesh_with_its_axes_exchanged():
    wide = Space(
        mesh_shape=ms.MeshShape(2, 8), hardware=V4.hardware, algorithms=("wang",),
        option_sets=("tuned",),
    )  # fmt: skip
    twin = ms.GemmPlan(row_axis="col", col_axis="row")
    found = candidates.candidates(wide, PROBLEM, twin, "os")
    joined = [c.plan for c in found if c.plan.ring_form == "joined"]
    counts = {ring: [p.slice_count for p in joined if p.ring == ring] for ring in ("row", "col")}
    assert counts == {"row": [1, 4, 2], "col": [1]}


def test_moving_outputs_are_tried_in_every_form():
    def forms(shape):
        long = Space(
            mesh_shape=ms.MeshShape(*shape), hardware=V4.hardware, algorithms=("meshslice",),
            slice_counts=(2,), option_sets=("tuned",), layouts=("natural",),
        )  # fmt: skip
        found = candidates.candidates(long, PROBLEM, ms.GemmPlan(dataflow="ls"), "ls")
        return {
            c.form: (c.plan.slice_count, "xla_tpu_force_async_all_to_all" in c.options)
            for c in found
        }

    short = {"native": (2, False), "ring": (2, False), "all_to_all": (2, True)}
    tapers = ("tapered ends", "tapered graded")
    rings = {f"ring, {taper}": (3, False) for taper in tapers}
    assert forms((4, 4)) == short | rings | {f"all_to_all, {taper}": (3, True) for taper in tapers}
    levels = {"ring, in groups of 4": (2, True)}
    levels |= {f"ring, {taper}, in groups of 4": (3, True) for taper in tapers}
    assert forms((4, 16)) == {"native": (2, False)} | levels


def test_algorithms_without_a_forward_dataflow_are_left_out():
    names = tuple(n for n, a in ms.ALGORITHMS.items() if ms.Dataflow.LS not in a.forward_dataflows)
    assert names
    found = candidates.candidates(
        space(algorithms=names), PROBLEM, ms.GemmPlan(dataflow="ls"), ms.Dataflow.LS
    )
    assert found == []


@pytest.mark.parametrize(
    "changes, telling",
    [
        ({"algorithms": ("systolic",)}, "unknown algorithm 'systolic'; there are .*gspmd"),
        ({"option_sets": ("fast",)}, "unknown option set 'fast'; there are tuned, default"),
        ({"slice_counts": ()}, "nothing to try"),
    ],
)
def test_spaces_that_are_none(changes, telling):
    with pytest.raises(ValueError, match=telling):
        space(**changes)


def test_options_of_a_layer_and_of_a_model_are_those_of_all_products():
    plan = ms.GemmPlan(slice_count=4, reduce_scatter="all_to_all")
    one, layer = compiler_options("tpu_v4", plan), compiler_options("tpu_v4", as_layer_plan(plan))
    assert one == dict(ASYNC_GATHERS) and layer == one | dict(ASYNC_ALL_TO_ALLS)
    native = compiler_options("tpu_v4", ms.tune("gpt3-125m", 4))
    assert dict(ASYNC_GATHERS).items() <= native.items()
    with pytest.raises(TypeError, match="plan must be a GemmPlan, a LayerPlan or a ModelPlan"):
        compiler_options("tpu_v4", "meshslice")


# --- studies, with answers from files --------------------------------------------------------


class Recorded:
    """A compiler that answers every OS product with a recorded schedule."""

    def __init__(self):
        self.jobs = []

    def compile(self, job):
        self.jobs.append(job)
        if job.gspmd:
            return Answer(error="XlaRuntimeError: no GSPMD today", compile_s=1.0)
        name = f"v4_{job.plan.algorithm}_os"
        return Answer(hlo=(DATA / f"{name}.hlo").read_text(), peak_bytes=7, compile_s=2.0)


LAYER = ms.GemmProblem.uniform(6144, 6144, 6144, "bfloat16")


def study(**changes):
    fields = {
        "topology": V4,
        "layers": {"ff1": LAYER},
        "plans": {"ff1": as_layer_plan(ms.GemmPlan())},
        "space": space(
            algorithms=("meshslice", "collective", "gspmd"),
            slice_counts=(2,),
            layouts=("natural",),
            option_sets=("tuned",),
        ),
        "passes": ("forward",),
    }
    return run.Study(**fields | changes)


def test_rows_hold_what_the_replay_found():
    told, compiler = [], Recorded()
    found = run.run(study(), compiler, told.append)
    ours, tapered, collective = found.rows
    assert tapered.candidate.plan.slice_count == 3
    assert len(told) == 6 and len(found.failed) == 3
    assert found.failed[0].reason.endswith("no GSPMD today")
    assert found.tried(("ff1", "forward"), "gspmd") == 3
    # 2 x 6144^3 FLOPs on 16 chips of 275 TFLOP/s.
    assert ours.ideal_s == pytest.approx(2 * 6144**3 / 16 / 275e12)
    # Two gathers of 3 shards at 100 GB/s, each 5 us + 2 hops; the product 128339 cycles.
    shard = 6144 * 6144 * 2 / 16
    sync_s = 3 * shard / 100e9 + 7e-6
    assert collective.replay.exposed_s == pytest.approx(2 * sync_s)
    assert collective.projected_s == pytest.approx(2 * sync_s + 128339 / found.study.clock_hz)
    assert ours.projected_s < collective.projected_s
    assert ours.variants["half-rate links"] > ours.projected_s
    assert all(job.mesh_shape == (4, 4) for job in compiler.jobs)


def test_totals_choose_by_rule():
    rows = run.run(study(), Recorded()).rows
    slow = dataclasses.replace(
        rows[0], candidate=dataclasses.replace(rows[0].candidate, option_set="default"),
        replay=dataclasses.replace(rows[0].replay, projected_s=1.0),
    )  # fmt: skip
    found = run.Findings(study=study(), rows=(slow, *rows), failed=())
    chosen = {rule: [r.candidate.algorithm for r in rows] for rule, rows in found.choices().items()}
    assert chosen == {
        "meshslice": ["meshslice"],
        "natural": ["meshslice"],
        "fixed": ["meshslice"],
        "tuned": ["meshslice"],
        "collective": ["collective"],
    }
    assert found.choices()["fixed"] == [rows[0]]
    assert found.best() == [rows[0], rows[2]]


def test_one_fixed_setting_a_dataflow():
    first, other, _ = run.run(study(), Recorded()).rows
    ls = dataclasses.replace(first.candidate.plan, dataflow="ls")

    def row(base, pass_, projected_s, plan=None):
        candidate = dataclasses.replace(base.candidate, plan=plan or base.candidate.plan)
        replay = dataclasses.replace(base.replay, projected_s=projected_s)
        return dataclasses.replace(base, pass_=pass_, candidate=candidate, replay=replay)

    def stored(base):
        plan = base.candidate.plan
        return dataclasses.replace(
            base,
            candidate=dataclasses.replace(
                base.candidate, plan=dataclasses.replace(plan, rhs_layout="sliced")
            ),
        )

    rows = [row(first, "forward", 1.0), row(first, "grad_lhs", 5.0)]  # 6 in all
    rows += [row(other, "forward", 2.0), row(other, "grad_lhs", 2.0)]  # 4: better together
    rows += [row(first, "grad_rhs", 7.0, ls)]  # another dataflow may have another setting
    found = run.Findings(
        study=study(passes=("forward", "grad_lhs", "grad_rhs")), rows=tuple(rows), failed=()
    )
    assert found.choices()["fixed"] == rows[2:]
    # A weight that is stored in slices is so in all passes, or in none.
    mixed = [*rows[:4], stored(row(first, "forward", 0.1)), stored(row(first, "grad_lhs", 0.1))]
    two = run.Findings(study=study(passes=("forward", "grad_lhs")), rows=tuple(mixed), failed=())
    assert two.choices()["meshslice"] == mixed[-2:]
    three = dataclasses.replace(two, study=found.study, rows=(*mixed, rows[4]))
    assert three.choices()["meshslice"] == three.choices()["natural"]


def test_a_rule_that_does_not_cover_every_product_is_not_there():
    rows = run.run(study(), Recorded()).rows
    both = study(passes=("forward", "grad_lhs"))
    assert run.Findings(study=both, rows=rows, failed=()).choices() == {}
    with pytest.raises(ValueError, match="no plan for grad_lhs of layer ff1"):
        run.plans_of(rows, ["ff1"])


def test_a_plan_is_compiled_as_it_is():
    plan = ms.LayerPlan(forward=ms.GemmPlan(slice_count=2, block_size=8))
    found = run.jobs(study(plans={"ff1": plan}, as_planned=True), "ff1", "forward")
    assert [job.plan for _, job in found] == [plan.forward]
    assert found[0][0].options == dict(ASYNC_GATHERS)


@pytest.mark.parametrize(
    "changes, telling",
    [
        ({"passes": ("backward",)}, "unknown pass backward; there are forward"),
        ({"plans": {}}, "no plan for layer ff1"),
        ({"topology": parse_topology("v4:2x8")}, "4x4 mesh does not lie on a 2x8x1 torus"),
    ],
)
def test_studies_that_are_none(changes, telling):
    with pytest.raises(ValueError, match=telling):
        study(**changes)


# --- the child process ------------------------------------------------------------------------


def compiler_with_child(tmp_path, monkeypatch, script, limit_s):
    """A compiler whose child is a shell script."""
    path = tmp_path / "child"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr("meshslice_jax.compiled.compiler.require_libtpu", lambda: None)
    return Compiler(V4, limit_s)


PROBE = ProbeJob(topology=str(V4), mesh_shape=(4, 4))


def test_a_child_that_dies_is_a_failed_job_with_its_last_words(tmp_path, monkeypatch):
    script = "echo noise >&2; echo 'F0101 check failed: emitter' >&2; read job; exit 3"
    with compiler_with_child(tmp_path, monkeypatch, script, 30.0) as compiler:
        for options in ({}, {"a": 1}):  # the second job gets a child of its own
            error = compiler.compile(msgspec.structs.replace(PROBE, options=options)).error
            assert error == "the compiler ended with exit code 3: F0101 check failed: emitter"


def test_a_child_that_hangs_is_ended(tmp_path, monkeypatch):
    with compiler_with_child(tmp_path, monkeypatch, "exec sleep 60", 0.2) as compiler:
        assert compiler.compile(PROBE).error == "compilation took longer than 0.2 s"


# --- the compiler itself ---------------------------------------------------------------------


def product_job(plan, options=None, wrt=None, extent=2048, **changes):
    problem = ms.GemmProblem.uniform(extent, extent, extent, "bfloat16")
    own = plan.gradient(wrt) if wrt else plan
    return ProductJob(
        topology=str(V4),
        mesh_shape=(4, 4),
        problem=problem,
        plan=own,
        forward=plan.dataflow,
        wrt=wrt,
        options=compiler_options("tpu_v4", own) if options is None else options,
        **changes,
    )


def moves(answer):
    assert answer.error is None
    found = program.events(hlo.parse(answer.hlo))
    return [event for event in found if isinstance(event, Move)]


@live
def test_a_tiny_program_compiles_and_options_are_checked():
    with Compiler(V4) as compiler:
        job = ProbeJob(topology=str(V4), mesh_shape=(4, 4), options={"xla_no_such": True})
        assert "No such compile option: 'xla_no_such'" in compiler.compile(job).error
        answer = compiler.compile(ProbeJob(topology=str(V4), mesh_shape=(4, 4)))
        assert answer.error is None and answer.peak_bytes > 0
        assert compiler.compile(ProbeJob(topology=str(V4), mesh_shape=(4, 4))) is answer
        with pytest.raises(ValueError, match="this compiler is for v4:4x4x1"):
            compiler.compile(ProbeJob(topology="v5e:4x4", mesh_shape=(4, 4)))
    with pytest.raises(ValueError, match="must be above 0 s, got 0"):
        Compiler(V4, 0)


@live
@pytest.mark.slow
def test_a_compilation_that_takes_too_long_fails_and_the_next_one_runs():
    with Compiler(V4, 0.2) as compiler:
        job = product_job(ms.GemmPlan(slice_count=4))
        assert compiler.compile(job).error == "compilation took longer than 0.2 s"
        compiler.limit_s = 120.0
        other = ProbeJob(topology=str(V4), mesh_shape=(4, 4))
        assert compiler.compile(other).error is None


@live
@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_options_of_every_generation_are_accepted(generation):
    target = parse_topology(f"{generation}:2x2")
    options = dict(ASYNC_GATHERS) | dict(KEEP_SLICES) | dict(GSPMD_MODES["post_spmd"])
    assert probe_options(target, options) == {}
    (refused,) = probe_options(
        target, {"xla_tpu_all_gather_collective_matmul_mode": "nonsense"}
    ).values()
    assert "POST_SPMD" in refused  # the compiler lists what is legal


@live
@pytest.mark.slow
@pytest.mark.parametrize("dataflow", ms.Dataflow)
def test_v4_gathers_are_asynchronous_with_the_options_and_scatters_never(dataflow):
    plan = ms.GemmPlan(dataflow=dataflow, slice_count=4)
    with Compiler(V4) as compiler:
        tuned = moves(compiler.compile(product_job(plan, extent=4096)))
        default = moves(compiler.compile(product_job(plan, extent=4096, options={})))
    slices = 8 if dataflow == "os" else 4
    gathers = [move for move in tuned if move.kind == "all-gather"]
    assert len(gathers) == slices
    assert sum(move.key is None for move in gathers) <= 1  # sometimes the first one
    assert all(move.key is None for move in default if move.kind == "all-gather")
    scatters = [move for move in tuned if move.kind == "reduce-scatter"]
    assert len(scatters) == 8 - slices
    assert all(move.key is None for move in scatters)


@live
@pytest.mark.slow
@pytest.mark.parametrize("dataflow", ["ls", "rs"])
@pytest.mark.parametrize(
    "form, products, sent",
    [
        # S = 4 slices on an axis of 4: 4 chunks a slice, 3 of which are sent on.
        (
            {"reduce_scatter": "ring", "gather_order": "ordered"},
            16,
            {"collective-permute": 12},
        ),
        # Two groups of two: 2 chunks, 1 sent on, then an exchange.
        (
            {"reduce_scatter": "ring", "gather_order": "ordered", "scatter_group": 2},
            8,
            {"collective-permute": 4, "all-to-all": 4},
        ),
        # (With small products the compiler keeps these gathers synchronous.)
        ({"reduce_scatter": "all_to_all"}, 4, {"all-to-all": 4}),
    ],
    ids=["ring", "two levels", "all_to_all"],
)
def test_forms_of_the_reduce_scatter_run_beside_products(dataflow, form, products, sent):
    plan = ms.GemmPlan(dataflow=dataflow, slice_count=4, reduce_dtype="output", **form)
    with Compiler(V4) as compiler:
        extent = 4096 if plan.reduce_scatter == "ring" else 16384
        answer = compiler.compile(product_job(plan, extent=extent))
    events = program.events(hlo.parse(answer.hlo))
    found = [event for event in events if isinstance(event, Move)]
    kinds = collections.Counter(move.kind for move in found)
    assert kinds == sent | {"all-gather": 4}
    waiting = [move.kind for move in found if move.key is None]
    assert waiting in ([], ["all-gather"])  # sometimes the first gather
    work = [event for event in events if isinstance(event, program.Work)]
    assert sum(event.is_product for event in work) == products
    # What arrives on a ring is added in the epilogue of a product, not in a pass of its own.
    adds = [w.name for w in work if not w.is_product and w.label.endswith("/add")]
    assert ("ring" in form.values() and "scatter_group" not in form) <= (not adds)


@live
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["meshslice", "collective"])
@pytest.mark.parametrize(
    "wrt, form",
    [
        (None, {}),
        ("lhs", {"reduce_scatter": "all_to_all"}),
        ("rhs", {"reduce_scatter": "ring", "gather_order": "ordered"}),
    ],
    ids=["forward", "grad_lhs", "grad_rhs"],
)
def test_the_planned_peak_is_within_a_fifth_of_the_compilers(algorithm, wrt, form):
    plan = ms.GemmPlan(algorithm=algorithm, reduce_dtype="output")
    if algorithm == "meshslice":  # the forms that are fastest
        plan = dataclasses.replace(plan, slice_count=6, **form)
    job = product_job(plan, wrt=wrt, extent=3 * 2**13)
    with Compiler(V4) as compiler:
        answer = compiler.compile(job)
    assert abs(peak.peak_bytes(job) / answer.peak_bytes - 1) < 0.2
    assert peak.peak_bytes(msgspec.structs.replace(job, gspmd=True)) is None


@live
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["meshslice", "collective", "wang", "cannon", "gspmd"])
@pytest.mark.parametrize("wrt", [None, "lhs", "rhs"])
def test_passes_of_every_algorithm_compile(algorithm, wrt):
    gspmd = algorithm == "gspmd"
    plan = ms.GemmPlan(algorithm="collective" if gspmd else algorithm, reduce_dtype="output")
    if algorithm == "meshslice":
        plan = dataclasses.replace(plan, slice_count=2)
    with Compiler(V4) as compiler:
        job = product_job(plan, wrt=wrt, gspmd=gspmd)
        answer = compiler.compile(job)
    assert moves(answer)
    arguments = 3 * 2048 * 2048 * 2 / 16
    assert answer.peak_bytes >= arguments


@live
@pytest.mark.slow
def test_a_block_is_one_program_with_all_products():
    layers = {
        "qkv": ms.GemmProblem.uniform(4096, 6144, 2048, "bfloat16"),
        "out": ms.GemmProblem.uniform(4096, 2048, 2048, "bfloat16"),
    }
    plans = {
        "qkv": as_layer_plan(ms.GemmPlan(slice_count=2, reduce_dtype="output")),
        "out": as_layer_plan(ms.GemmPlan(dataflow="ls", slice_count=2, reduce_dtype="output")),
    }
    found = study(layers=layers, plans=plans, passes=tuple(run.PASSES))
    with Compiler(V4) as compiler:
        block = run.run_block(found, plans, compiler)
        job = BlockJob(
            topology=str(V4), mesh_shape=(4, 4), plans=plans,
            layers=layers | {"out": ms.GemmProblem.uniform(4096, 2048, 4096, "bfloat16")},
        )  # fmt: skip
        assert "cannot follow one with outputs of 6144" in compiler.compile(job).error
    assert block.ideal_s == pytest.approx(3 * 2 * 4096 * 2048 * 8192 / 16 / 275e12)
    assert block.replay.product_s >= block.ideal_s
    kinds = {move.kind for move in moves(Answer(hlo=block.hlo))}
    assert {"all-gather", "reduce-scatter"} <= kinds


@live
@pytest.mark.slow
def test_a_mesh_of_256_chips_lies_on_4x8x8():
    target = parse_topology("v4:4x8x8")
    plan = ms.GemmPlan(slice_count=2)
    job = ProductJob(
        topology=str(target), mesh_shape=(32, 8), plan=plan, forward=plan.dataflow,
        problem=ms.GemmProblem.uniform(8192, 8192, 8192, "bfloat16"),
        options=compiler_options("tpu_v4", plan),
    )  # fmt: skip
    with Compiler(target) as compiler:
        found = moves(compiler.compile(job))
    assert {len(move.groups[0]) for move in found} == {32, 8}
