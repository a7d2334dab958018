"""Overlap over shaped links: what is chosen and computed; the network where there is root."""

import json
import os
import subprocess
import sys
import time

import msgspec
import pytest
from typer.testing import CliRunner

import meshslice_jax as ms
from meshslice_jax.bench import wire
from meshslice_jax.bench.operands import random_matrices
from meshslice_jax.bench.wire import alone, rates, record, variants
from meshslice_jax.bench.wire.namespaces import lacking
from meshslice_jax.cli.app import app
from meshslice_jax.timing import Samples, back_and_forth, interleaved

NEEDS_ROOT = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))

#: The promise to those who read the JSON files.
FIELDS = """
    algorithm dataflow slice_count pass comm_over_compute ms ratio_to_gspmd ratio_low ratio_high
    hidden repeats gather_order block_size rhs_layout mesh m n k rate_asked rate_mbit compute_ms
    communication_ms
"""


def a_record(**fields):
    known = {
        "algorithm": "meshslice",
        "dataflow": "os",
        "slice_count": 8,
        "pass_": "fwd",
        "gather_order": "tied",
        "block_size": None,
        "rhs_layout": "natural",
        "mesh": "2x2",
        "m": 4,
        "n": 4,
        "k": 4,
        "rate_asked": "1x",
        "rate_mbit": 430.0,
    }
    times = record.statistics_of(*map(Samples, [(3.0, 4.0), (4.0, 4.0), (2.0, 2.0), (2.0, 4.0)]))
    return wire.Record(**(known | times | fields))


def test_the_fields_of_a_record_are_those_promised_and_mean_what_they_say():
    found = msgspec.to_builtins(a_record())
    assert list(found) == FIELDS.split()
    assert (found["ms"], found["repeats"]) == (3500.0, 2)
    assert (found["ratio_to_gspmd"], found["ratio_low"], found["ratio_high"]) == (0.875, 0.75, 1.0)
    assert found["comm_over_compute"] == 1.5  # the median of the rounds' 1 and 2
    assert found["hidden"] == (2.0 + 3.0 - 3.5) / 2.0


def test_records_and_their_plot_are_files(tmp_path):
    records = [a_record(), a_record(algorithm="gspmd", slice_count=1), a_record(rate_asked="430")]
    record.write_records(tmp_path / "r.json", records)
    assert wire.read_records(tmp_path / "r.json") == records
    assert json.loads((tmp_path / "r.json").read_text())[0]["pass"] == "fwd"
    wire.write_plot(tmp_path / "r.png", records)
    assert (tmp_path / "r.png").stat().st_size > 1000
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 4


def test_labels_tell_variants_apart():
    records = [a_record(), a_record(gather_order="free"), a_record(algorithm="meshslice serial")]
    records += [a_record(block_size=8), a_record(block_size=8, rhs_layout="sliced")]
    assert [wire.label(found) for found in records] == [
        "meshslice S=8",
        "meshslice S=8 free order",
        "meshslice serial S=8",
        "meshslice S=8 strided B=8",
        "meshslice S=8 strided B=8 stored",
    ]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"rates": ("1y",)}, "rate '1y' is neither Mbit/s, such as 430, nor times compute"),
        ({"rates": ("0x",)}, "rate '0x' is neither"),
        ({"names": ("tp1d",)}, "over the wire there is no algorithm tp1d"),
        ({"dataflows": ("ws",)}, "there is no dataflow ws; there are os, ls, rs"),
        ({"passes": ("all",)}, "there is no pass all; there are fwd, dlhs, drhs, step"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"mesh": (1, 1)}, "a mesh over the wire has 2 to 64 chips, got 1x1"),
        ({"k": 4095}, "lhs dimension k = 4095 is not divisible"),
    ],
)
def test_options_that_make_no_sense(fields, words):
    with pytest.raises(ValueError, match=words):
        wire.WireOptions(**fields)


def test_rates():
    assert wire.parse_rates(("430", "1.5x")) == (("mbit", 430.0), ("times", 1.5))
    given = {"sent_bytes": 1e6, "compute_s": 0.1}
    fixed = rates.find_rate("mbit", 430, communication_s=None, **given)
    assert fixed == rates.Rate("430", 430e6)
    # A network that carries half of its rate, and needs ten milliseconds to begin with.
    found = rates.find_rate(
        "times", 1.5, communication_s=lambda rate: 0.01 + 8e6 / (rate / 2), **given
    )
    assert 0.01 + 8e6 / (found.bits_per_s / 2) == pytest.approx(0.15, rel=0.02)
    slow = rates.find_rate("times", 1, communication_s=lambda rate: 9.0, **given)
    assert slow.bits_per_s == 20e9


def test_rounds_go_back_and_forth():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    interleaved(calls, 3, order=back_and_forth)
    assert "".join(called) == "abc" + "cba" + "abc"


def test_what_is_measured():
    options = wire.WireOptions()
    found = variants.variants(options, "os")
    texts = [
        (v.name, plan.slice_count, plan.gather_order, plan.block_size, plan.rhs_layout)
        for v in found
        for plan in (v.forward,)
    ]
    assert texts == [
        ("gspmd", 1, "free", None, "natural"),
        ("collective", 1, "free", None, "natural"),
        *(("meshslice", count, "tied", None, "natural") for count in (2, 4, 8, 16)),
        ("meshslice", 8, "free", None, "natural"),
        ("meshslice serial", 8, "serial", None, "natural"),
        ("meshslice", 8, "tied", 8, "natural"),
        ("meshslice", 8, "tied", 8, "sliced"),
        ("wang", 1, "free", None, "natural"),
        ("summa", 1, "free", None, "natural"),
        ("cannon", 1, "free", None, "natural"),
    ]
    line = variants.variants(wire.WireOptions(mesh=(1, 4)), "ls")
    assert "cannon" not in [v.name for v in line]


@pytest.mark.parametrize("flow", ["os", "rs"])
def test_compute_and_communication_alone_are_those_of_a_chip(flow):
    mesh, shape = ms.make_mesh((2, 4)), ms.MeshShape(2, 4)
    problem = ms.GemmProblem(m=16, n=32, k=64, lhs_dtype="float32", rhs_dtype="float32")
    contraction = ms.GemmPlan(dataflow=flow).contraction
    (out,) = alone.compiled([alone.compute_piece(problem, contraction, shape)], mesh)()
    extents = contraction.local_extents(problem, 2, 4)
    assert out.shape == (8, *(extents[label] for label in contraction.streamed_first().out))
    assert (out == extents["k"]).all()  # a sum of as many ones
    moved = alone.compiled(alone.communication_pieces(problem, contraction, shape), mesh)()
    sizes = [x.size // 8 for x in moved]
    # Gathered: a chip has all along the axis. Scattered: it has its own part.
    want = {"os": [16 // 2 * 64, 64 * 32 // 4], "rs": [16 * 32 // 8, 16 * 64 // 2]}[flow]
    assert sorted(sizes) == sorted(want)


SMALL = variants.variants(wire.WireOptions(slices=(2,), control_slices=4, block_size=2), "ls")
#: Every variant forward; further passes of GSPMD, the Collective algorithm and a stored weight.
FEW = [*SMALL[:2], next(v for v in SMALL if v.forward.rhs_layout != "natural")]
CHECKED = [(variant, "fwd") for variant in SMALL]
CHECKED += [(variant, "step") for variant in FEW] + [(FEW[2], "drhs")]


@pytest.mark.parametrize(
    "variant, pass_",
    CHECKED,
    ids=[f"{v.name} {v.forward.gather_order} {v.forward.rhs_layout} {p}" for v, p in CHECKED],
)
def test_every_variant_is_right(variant, pass_):
    problem = ms.GemmProblem(m=32, n=32, k=32, lhs_dtype="float32", rhs_dtype="float32")
    data = random_matrices(problem)
    expected = variants.answers(problem, pass_, data)
    assert callable(variants.prepared(variant, data, expected, ms.make_mesh((2, 2))))


def test_a_wrong_answer_is_told():
    problem = ms.GemmProblem(m=32, n=32, k=32, lhs_dtype="float32", rhs_dtype="float32")
    data = random_matrices(problem)
    expected = variants.answers(problem, "drhs", data)
    expected["drhs"][3, 5] += 1
    with pytest.raises(RuntimeError, match=r"gspmd ls drhs: 1 of 256 elements"):
        variants.prepared(SMALL[0], data, expected, ms.make_mesh((2, 2)))


def test_without_root_it_says_so_and_ends_with_2(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = CliRunner().invoke(app, ["bench", "--wire", "auto"])
    assert found.exit_code == 2
    assert "network namespaces and traffic shaping need root" in found.output
    found = CliRunner().invoke(app, ["bench", "--wire", "auto", "--model", "gpt3-125m"])
    assert found.exit_code == 2
    assert "--model can't be chosen with --wire" in found.output


def leftovers():
    links = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    hosts = os.listdir("/etc/netns") if os.path.isdir("/etc/netns") else []
    return links, spaces, hosts


@pytest.mark.slow
@NEEDS_ROOT
def test_a_measurement_leaves_records_and_no_network(tmp_path):
    path = tmp_path / "records.json"
    words = "bench --wire 2000 --mesh 1x2 --mkn 64,64,64 --repeats 2 --dataflows os --slices 4"
    command = [sys.executable, "-c", "from meshslice_jax.cli import main; main()", *words.split()]
    found = subprocess.run(
        [*command, "--passes", "fwd", "--json", str(path)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    names = [r.algorithm for r in wire.read_records(path)]
    assert names[0] == "gspmd"
    assert {"meshslice", "meshslice serial", "collective", "wang", "summa"} <= set(names)
    assert "they do not predict hardware" in found.stdout


NETWORK = """
import os, sys, time
from meshslice_jax.bench.wire.namespaces import set_up
from meshslice_jax.launch import Guard
with Guard() as guard:
    print(*(space.name for space in set_up(2, guard)), flush=True)
    time.sleep(60)
"""


@NEEDS_ROOT
def test_the_network_goes_also_when_its_owner_is_killed():
    owner = subprocess.Popen([sys.executable, "-c", NETWORK], stdout=subprocess.PIPE, text=True)
    names = owner.stdout.readline().split()
    mark = f"ms{owner.pid}"
    assert names == [f"{mark}-0", f"{mark}-1"]
    links, spaces, hosts = leftovers()
    assert mark in links and mark in spaces and set(names) <= set(hosts)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while any(mark in str(part) for part in leftovers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(mark in str(part) for part in leftovers())
