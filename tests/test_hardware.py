"""Hardware profiles: the published numbers, rings and lines, JSON, and what is refused."""

import dataclasses
import json
import math

import pytest

from meshslice_jax.hardware import (
    HARDWARE,
    HardwareSpec,
    hardware_spec,
    load_spec,
    spec_from_json,
    spec_to_json,
)

NOMINAL = ("tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_v6e", "tpu_7x")
NUMBERS = [f.name for f in dataclasses.fields(HardwareSpec) if f.name not in ("name", "facts")]


@pytest.fixture
def raw() -> dict:
    """The JSON object of a valid spec."""
    return json.loads(spec_to_json(hardware_spec("tpu_v4")))


@pytest.mark.parametrize(
    ("name", "bf16", "hbm_gib", "hbm_gb_s", "link_gb_s"),
    [
        ("tpu_v4", 275, 32, 1200, 50),
        ("tpu_v5e", 197, 16, 819, 50),
        ("tpu_v5p", 459, 95, 2765, 100),
        ("tpu_v6e", 918, 32, 1638, 100),
        ("tpu_7x", 2307, 192, 7380, 100),
    ],
)
def test_nominal_profiles_hold_the_vendors_figures(name, bf16, hbm_gib, hbm_gb_s, link_gb_s):
    spec = hardware_spec(name)
    assert spec.flops_per_s("bfloat16") == bf16 * 1e12
    assert spec.hbm_bytes == hbm_gib * 2**30
    assert spec.hbm_bytes_per_s == hbm_gb_s * 1e9
    assert spec.link_bytes_per_s == link_gb_s * 1e9
    assert spec.gather_hop_s == spec.scatter_hop_s == spec.permute_hop_s == 1e-6


def test_the_calibration_is_the_one_that_is_documented():
    spec = hardware_spec("tpu_v4_paper")
    assert spec.axis_bytes_per_s(32, overlapped=True) == pytest.approx(84e9)
    assert spec.axis_bytes_per_s(32, overlapped=False) == pytest.approx(84e9)
    assert spec.axis_bytes_per_s(32, overlapped=True, directions=1) == pytest.approx(42e9)
    assert spec.flops_per_s("bfloat16") * spec.mxu_efficiency == 272e12
    assert (spec.gather_launch_s, spec.scatter_launch_s, spec.product_launch_s) == (
        13e-6,
        26e-6,
        5e-6,
    )
    fitted = {fact.field for fact in spec.facts if fact.fitted}
    assert fitted == {"link_efficiency", "gather_hop_s", "scatter_hop_s", "permute_hop_s"}
    assert spec.gather_hop_s == spec.scatter_hop_s == spec.permute_hop_s == 13.8e-6


@pytest.mark.parametrize("name", NOMINAL)
def test_nominal_profiles_fit_nothing(name):
    assert not any(fact.fitted for fact in hardware_spec(name).facts)


@pytest.mark.parametrize("name", HARDWARE)
def test_every_number_has_one_source(name):
    described = [fact.field for fact in HARDWARE[name].facts]
    assert sorted(described) == sorted(NUMBERS)
    rows = HARDWARE[name].describe()
    assert [field for field, *_ in rows] == NUMBERS
    assert all(source for _, _, source, _ in rows)


@pytest.mark.parametrize("name", HARDWARE)
def test_json_round_trip(name, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(spec_to_json(HARDWARE[name]))
    assert load_spec(path) == HARDWARE[name]
    assert hash(load_spec(path)) == hash(HARDWARE[name])
    assert hardware_spec(path) == hardware_spec(str(path)) == HARDWARE[name]


@pytest.mark.parametrize(
    ("name", "rings", "lines"),
    [
        ("tpu_v4", (4, 8, 12, 32), (2, 3, 6, 10)),
        ("tpu_v5p", (4, 16), (2, 14)),
        ("tpu_v5e", (16,), (2, 4, 8, 32)),
        ("tpu_v6e", (16,), (8, 12)),
        ("tpu_7x", (4, 8), (2,)),
        ("tpu_v4_paper", (2, 3, 4, 256), ()),
    ],
)
def test_wrap_around(name, rings, lines):
    spec = hardware_spec(name)
    assert all(spec.is_ring(length) for length in rings)
    assert not any(spec.is_ring(length) for length in lines)


def test_a_line_has_half_the_rate_of_a_ring():
    spec = hardware_spec("tpu_v5e")
    ring = spec.axis_bytes_per_s(16, overlapped=True)
    assert spec.axis_bytes_per_s(8, overlapped=True) == ring / 2 == 50e9
    # One-way traffic has one link of either.
    one_way = spec.axis_bytes_per_s(16, overlapped=True, directions=1)
    assert one_way == spec.axis_bytes_per_s(8, overlapped=True, directions=1) == 50e9
    never = dataclasses.replace(spec, wrap_around="never")
    assert not never.is_ring(16)


def test_a_spec_is_taken_as_it_is():
    spec = dataclasses.replace(hardware_spec("tpu_v4"), name="mine", link_bytes_per_s=1.0)
    assert hardware_spec(spec) is spec


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"unknown hardware 'tpu_v9'.*tpu_v4, .*tpu_v4_paper"):
        hardware_spec("tpu_v9")
    with pytest.raises(ValueError, match=r"none\.json' does not exist"):
        hardware_spec(tmp_path / "none.json")
    with pytest.raises(TypeError, match="a name, a path or a HardwareSpec, got int"):
        hardware_spec(4)


def test_an_unknown_dtype_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'tpu_v4' has no FLOP/s for operands of float64; .*int8"):
        hardware_spec("tpu_v4").flops_per_s("float64")


def test_unknown_and_missing_fields_are_named_together(raw):
    raw["links"] = raw.pop("links_per_axis")
    with pytest.raises(ValueError, match="unknown fields links; missing fields links_per_axis"):
        spec_from_json(json.dumps(raw))


def test_facts_may_be_left_out(raw):
    del raw["facts"]
    spec = spec_from_json(json.dumps(raw))
    assert spec.facts == ()
    assert {source for _, _, source, _ in spec.describe()} == {"not given"}


def test_a_wrong_type_is_named_with_its_path(raw):
    raw["hbm_bytes"] = "32 GiB"
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$.hbm_bytes`"):
        spec_from_json(json.dumps(raw))


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "cut.json"
    path.write_text(spec_to_json(hardware_spec("tpu_v4"))[:100])
    with pytest.raises(ValueError, match=r"cut\.json is not a JSON object"):
        hardware_spec(path)
    with pytest.raises(ValueError, match="must be a JSON object, got list"):
        spec_from_json("[]")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("contention", -1.0, "contention must be at least 0 and finite, got -1.0"),
        ("gather_hop_s", math.nan, "gather_hop_s must be at least 0 and finite, got nan"),
        ("link_bytes_per_s", 0.0, "link_bytes_per_s must be above 0"),
        ("link_efficiency", 1.2, r"link_efficiency must be in \(0, 1\], got 1.2"),
        ("mxu_tile", (8, 0, 128), "mxu_tile must be three positive multiples"),
        ("peak_flops_per_s", {}, "peak_flops_per_s names no dtype"),
        ("peak_flops_per_s", {"int8": -1.0}, r"peak_flops_per_s\['int8'\] must be above 0"),
        ("wrap_around", "sometimes", "wrap_around='sometimes' is not one of always"),
    ],
)
def test_numbers_that_no_machine_has_are_refused(field, value, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(hardware_spec("tpu_v4"), **{field: value})


def test_facts_about_fields_that_do_not_exist_are_refused(raw):
    raw["facts"][0]["field"] = "speed"
    with pytest.raises(ValueError, match="facts about unknown fields speed"):
        spec_from_json(json.dumps(raw))


def test_profiles_are_named_as_they_are_looked_up():
    assert all(name == spec.name for name, spec in HARDWARE.items())
    assert isinstance(hardware_spec("tpu_v4"), HardwareSpec)
