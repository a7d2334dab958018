"""Whole plans in the simulator: beside the closed form, with replicas, twins and 1D layers."""

import dataclasses

import pytest

from meshslice_jax.autotune import tune
from meshslice_jax.block import BlockSchedule
from meshslice_jax.faults import Faults
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.plan_simulation import plan_hardware, simulate_plan
from meshslice_jax.simulate import simulate_block


@pytest.fixture(scope="module")
def tuned():
    return tune("gpt3-175b", 256, mesh_shape=(32, 8))


def mixed():
    """Two layers in 2D, two in 1D."""
    flat = LayerPlan(forward=GemmPlan(algorithm="fsdp"))
    return ModelPlan(
        model="gpt3-125m",
        num_chips=8,
        mesh_shape=(4, 2),
        layers={"qkv": LayerPlan(forward=GemmPlan()), "out": LayerPlan(forward=GemmPlan())}
        | {"ff1": flat, "ff2": flat},
    )


def test_a_plan_is_its_block_in_the_simulator(tuned):
    found = simulate_plan(tuned)
    layers = {name: (problem, tuned.layers[name]) for name, problem in tuned.problems().items()}
    block = simulate_block(layers, tuned.mesh_shape, "tpu_v4")
    assert found.total_s == block.total_s
    assert [one.simulated_s for one in found.passes] == [taken for _, taken in block.part_s]
    assert [(one.layer, one.name) for one in found.passes[:5]] == [
        ("qkv", "forward"),
        ("out", "forward"),
        ("ff1", "forward"),
        ("ff2", "forward"),
        ("ff2", "grad_rhs"),
    ]


def test_without_faults_and_contention_it_is_the_closed_form(tuned):
    found = simulate_plan(tuned)
    for one in found.passes:
        predicted = tuned.predicted.layers[one.layer][one.name]
        assert one.predicted.total_s == predicted.total_s
        assert one.simulated_s == pytest.approx(predicted.total_s, rel=1e-9)
        assert one.exposed_s == pytest.approx(predicted.exposed_s, abs=1e-12)
    assert found.total_s == pytest.approx(tuned.predicted.fc_s, rel=1e-9)
    assert found.utilisation == pytest.approx(tuned.predicted.utilisation, rel=1e-9)
    assert found.math_s + found.exposed_s == found.total_s


def test_the_hardware_can_be_another(tuned):
    assert simulate_plan(tuned, "tpu_v4_paper").total_s > simulate_plan(tuned).total_s


def test_the_block_schedule_is_followed_and_its_depth_can_be_another(tuned):
    opened = dataclasses.replace(tuned, block_schedule=BlockSchedule(prefetch_weight=True))
    plain, found = simulate_plan(tuned), simulate_plan(opened)
    assert found.total_s < plain.total_s
    deeper = simulate_plan(opened, buffer_depth=3)
    assert deeper.block == BlockSchedule(prefetch_weight=True, buffer_depth=3)
    assert deeper.timelines[0].peak_temporary_bytes > found.timelines[0].peak_temporary_bytes


def test_one_replica_is_simulated_and_the_all_reduce_is_closed_form():
    plan = tune("gpt3-125m", 16, data_parallel=2, batch=8)
    found = simulate_plan(plan)
    assert found.timelines[0].finish_s.size == 8
    assert found.data_parallel_s == plan.predicted.data_parallel_s > 0
    assert found.total_s == pytest.approx(plan.predicted.fc_s, rel=1e-9)


def test_twins_take_the_time_that_was_predicted():
    fields = {"row_axis": "col"}
    plan = tune("gpt3-125m", 8, batch=4, mesh_shape=(4, 2), overrides={"ff1": fields})
    found = simulate_plan(plan)
    assert found.total_s == pytest.approx(plan.predicted.fc_s, rel=1e-9)


def test_layers_that_see_other_meshes_are_simulated_apart():
    found = simulate_plan(mixed())
    assert [tuple(one.mesh_shape) for one in found.timelines] == [(4, 2), (8, 1)]
    assert {(one.layer, one.name) for one in found.passes} == {
        (layer, name)
        for layer in ("qkv", "out", "ff1", "ff2")
        for name in ("forward", "grad_lhs", "grad_rhs")
    }
    assert found.total_s == pytest.approx(found.predicted_s, rel=1e-9)


def test_a_place_means_nothing_where_layers_see_other_meshes():
    with pytest.raises(ValueError, match=r"mixes 1D and 2D algorithms \(qkv\+out, ff1\+ff2\)"):
        simulate_plan(mixed(), faults=Faults(slow_chips=((0, 0, 2.0),)))


def test_a_slow_chip_is_the_last(tuned):
    found = simulate_plan(tuned, faults=Faults(slow_chips=((3, 1, 1.5),)))
    (timeline,) = found.timelines
    assert found.total_s > simulate_plan(tuned).total_s
    assert timeline.finish_s[3, 1] == timeline.finish_s.max()


def test_a_profile_that_does_not_ship_must_be_named(tuned):
    homemade = dataclasses.replace(tuned, hardware="mine")
    with pytest.raises(ValueError, match="the plan was made for hardware 'mine', which is none of"):
        plan_hardware(homemade)
    assert plan_hardware(homemade, "tpu_v5e").name == "tpu_v5e"
