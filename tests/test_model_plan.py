"""ModelPlan and its JSON: the same plan back, and every wrong file refused with a reason."""

import dataclasses
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshslice_jax.algorithms import view
from meshslice_jax.autotune import tune
from meshslice_jax.block import BlockSchedule
from meshslice_jax.model_plan import (
    FrozenMapping,
    ModelPlan,
    load_plan,
    plan_from_json,
    plan_to_json,
    save_plan,
)
from meshslice_jax.models import MODELS
from meshslice_jax.plan import GemmPlan, LayerPlan

TINY = dataclasses.replace(
    MODELS["llama3-8b"], name="tiny", hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128
)
LAYERS = ("qkv", "out", "ff1", "ff2")


def plain(**fields) -> ModelPlan:
    forward = GemmPlan(slice_count=4)
    layers = {name: LayerPlan(forward=forward) for name in LAYERS}
    defaults = {"model": "gpt3-125m", "num_chips": 16, "mesh_shape": (4, 4), "layers": layers}
    return ModelPlan(**(defaults | fields))


@pytest.fixture(scope="module")
def tuned() -> ModelPlan:
    return tune("gpt3-125m", 16)


def test_fields_of_the_file(tuned):
    found = json.loads(plan_to_json(tuned))
    assert list(found) == [
        "version",
        "model",
        "num_chips",
        "mesh_shape",
        "data_parallel",
        "hardware",
        "batch",
        "seq_len",
        "dtype",
        "layers",
        "block_schedule",
        "predicted",
    ]
    assert found["model"] == "gpt3-125m"
    assert list(found["layers"]) == list(LAYERS)
    passes = ["forward", "grad_lhs", "grad_rhs"]
    gemm = [field.name for field in dataclasses.fields(GemmPlan)]
    for layer in found["layers"].values():
        assert list(layer) == passes
        assert all(list(one) == gemm for one in layer.values())


def test_a_plan_comes_back_the_same(tuned, tmp_path):
    for plan in (tuned, plain(), plain(block_schedule=BlockSchedule(prefetch_weight=True))):
        path = tmp_path / "plan.json"
        save_plan(plan, path)
        back = load_plan(path)
        assert back == plan
        assert hash(back) == hash(plan)
        assert plan_to_json(back) == plan_to_json(plan)
        assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_model_without_a_name_in_the_list_is_written_out():
    plan = tune(TINY, 4, seq_len=64)
    assert json.loads(plan_to_json(plan))["model"]["ffn"] == 128
    assert plan_from_json(plan_to_json(plan)) == plan


@settings(max_examples=25, deadline=None)
@given(
    count=st.sampled_from([1, 2, 4, 8]),
    dataflow=st.sampled_from(["os", "ls", "rs"]),
    twin=st.booleans(),
    shape=st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)]),
    depth=st.sampled_from([2, 3]),
    batch=st.integers(1, 5),
)
def test_round_trips(count, dataflow, twin, shape, depth, batch):
    axes = {"row_axis": "col", "col_axis": "row"} if twin else {}
    layer = LayerPlan(forward=GemmPlan(slice_count=count, dataflow=dataflow, **axes))
    plan = ModelPlan(
        model=TINY,
        num_chips=8,
        mesh_shape=shape,
        layers=dict.fromkeys(TINY.fc_widths, layer),
        batch=batch,
        seq_len=64,
        block_schedule=BlockSchedule(buffer_depth=depth),
    )
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan.modelled_only == (depth == 3)


def test_absent_fields_take_their_defaults():
    layer = {"forward": {"slice_count": 2}}
    text = json.dumps(
        {
            "version": 1,
            "model": "gpt3-125m",
            "num_chips": 16,
            "mesh_shape": [4, 4],
            "layers": dict.fromkeys(LAYERS, layer),
        }
    )
    plan = plan_from_json(text)
    same = LayerPlan(forward=GemmPlan(slice_count=2))
    assert plan == plain(layers=dict.fromkeys(LAYERS, same))
    assert (plan.batch, plan.seq_len, plan.dtype) == (8, 2048, "bfloat16")
    assert plan.layers["qkv"].grad_rhs.dataflow == "rs"


def changed(path: str, value) -> str:
    """The JSON of a good plan with one field set (or dropped)."""
    found = json.loads(plan_to_json(plain()))
    *folders, last = path.split(".")
    place = found
    for folder in folders:
        place = place[folder]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("version", 2, r"version 2 .* newer meshslice_jax"),
        ("version", 0, "version 0 does not exist"),
        ("version", None, "missing required field `version`"),
        ("model", "gpt9", r"unknown model 'gpt9' - at `\$.model`"),
        ("model", {"name": "x"}, r"missing required field .* at `\$.model`"),
        ("layers.qkv.forward.slice_count", "4", r"`\$.layers.qkv.forward.slice_count`"),
        ("layers.qkv.forward.slice_count", True, r"`\$.layers.qkv.forward.slice_count`"),
        ("layers.qkv.forward.slice_count", 0, r"at least 1, got 0 - at `\$.layers.qkv.forward`"),
        ("layers.out.grad_lhs.dataflow", "xs", r"'xs' - at `\$.layers.out.grad_lhs.dataflow`"),
        ("layers.out.grad_lhs.dataflow", "os", r"needs ls - at `\$.layers.out`"),
        ("layers.out.grad_lhs.ring", "up", r"ring='up' .* at `\$.layers.out.grad_lhs`"),
        ("layers.ff1.forward.slices", 4, r"unknown field `slices` - at `\$.layers.ff1.forward`"),
        ("layers.ff1.forward", None, r"missing required field `forward` - at `\$.layers.ff1`"),
        ("layers.ff1", None, "gpt3-125m has the layers qkv, out, ff1, ff2, and the plan has"),
        ("layers.ff1.forward.algorithm", "fox", r"'fox'.* at `\$.layers.ff1.forward.algorithm`"),
        ("layers.ff1.grad_rhs.packets", 4, r"packets=4.* at `\$.layers.ff1.grad_rhs.packets`"),
        ("layers.ff2.forward.slice_count", 5, r"layer 'ff2'.*does not divide"),
        ("mesh_shape", [4, 5], "20 chips, not num_chips = 16"),
        ("mesh_shape", [4], r"at `\$.mesh_shape`"),
        ("mesh_shape", [4, "4"], r"`\$.mesh_shape\[1\]`"),
        ("mesh_shape", [4, 0], "mesh_shape.cols must be a positive integer, got 0"),
        ("batch", 0, "batch must be a positive integer"),
        ("data_parallel", 3, "3 replicas on 4x4 meshes are 48 chips"),
        ("dtype", "floaty", "dtype 'floaty' is not a dtype"),
        ("block_schedule.buffer_depth", 4, r"got 4 - at `\$.block_schedule`"),
        ("block_schedule.prefetch", True, r"unknown field `prefetch` - at `\$.block_schedule`"),
        ("predicted", {"fc_s": 1}, r"at `\$.predicted`"),
        ("extra", 1, "unknown field `extra`"),
    ],
)
def test_wrong_files_are_refused_with_path_and_reason(path, value, words):
    with pytest.raises(ValueError, match="(?s)" + words):
        plan_from_json(changed(path, value))


def test_predictions_are_checked_too(tuned):
    found = json.loads(plan_to_json(tuned))
    found["predicted"]["layers"]["ff2"]["grad_rhs"]["math_s"] = "fast"
    with pytest.raises(ValueError, match=r"`\$.predicted.layers.ff2.grad_rhs.math_s`"):
        plan_from_json(json.dumps(found))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated_files_are_refused_by_name(tmp_path, share):
    text = plan_to_json(plain()).rstrip()
    path = tmp_path / "half.json"
    path.write_text(text[: int(len(text) * share)])
    with pytest.raises(ValueError, match=r"half\.json: .*truncated"):
        load_plan(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "Expected `object`, got `array`"),
        ("[build-system]", "Expected `object`, got `array`"),
        ("name = 1", "JSON is malformed"),
        ("", "Input data was truncated"),
        ('{"version": "1.0"}', "Expected `int`, got `str`"),
        ('{"plan": {}, "meshes": []}', "missing required field `version`"),
        (b"\xff\xd8", "malformed"),
    ],
)
def test_files_of_another_kind_are_told_what_was_expected(text, words):
    with pytest.raises(ValueError, match=f"(?s)^file: .*{words}.*; expected a plan, .*--out"):
        plan_from_json(text, "file")


def test_the_report_of_tune_is_told_from_a_plan():
    report = f'{{"search": "exact", "plan": {plan_to_json(plain())}, "meshes": []}}'
    with pytest.raises(ValueError, match="file: this is the report that `meshslice tune --json`"):
        plan_from_json(report, "file")


def test_a_profile_that_does_not_ship_is_noted(tmp_path):
    path, plan = tmp_path / "plan.json", plain(hardware="mine")
    save_plan(plan, path)
    words = r"plan\.json: hardware 'mine' is no profile .*tpu_v5e.* at `\$.hardware`"
    with pytest.warns(UserWarning, match=words):
        assert load_plan(path) == plan


def test_plans_that_do_not_fit_together():
    with pytest.raises(ValueError, match="batch 8 cannot be shared by data_parallel = 16"):
        plain(mesh_shape=(1, 1), data_parallel=16)
    axes = LayerPlan(forward=GemmPlan(row_axis="x"))
    with pytest.raises(ValueError, match="layer 'qkv' has the axes col, x"):
        plain(layers=dict.fromkeys(LAYERS, axes))
    replicas = LayerPlan(forward=GemmPlan(batch_axes=("data",)))
    with pytest.raises(ValueError, match=r"layer 'qkv' has batch_axes \('data',\)"):
        plain(layers=dict.fromkeys(LAYERS, replicas))
    with pytest.raises(ValueError, match="num_chips must be a positive integer, got '16'"):
        plain(num_chips="16", batch=8)


def test_a_twin_sees_the_mesh_with_rows_and_columns_exchanged():
    plan = GemmPlan(row_axis="col", col_axis="row")
    assert view(plan, plain().mesh_shape.__class__(2, 8)) == (8, 2)


def test_frozen_mappings_are_values():
    one, same = FrozenMapping({"a": 1, "b": 2}), FrozenMapping({"b": 2, "a": 1})
    assert one == same == {"a": 1, "b": 2}
    assert hash(one) == hash(same)
    assert one != FrozenMapping({"a": 1})
    with pytest.raises(TypeError):
        one["a"] = 2
