"""Mesh shapes, meshes, emulated devices."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshslice_jax as ms
from meshslice_jax.mesh import parse_mesh_shape


@given(st.integers(1, 5000))
def test_factorisations_multiply_back(chips):
    found = ms.factorisations(chips)
    assert all(shape.num_chips == chips for shape in found)
    assert [shape.rows for shape in found] == [r for r in range(1, chips + 1) if chips % r == 0]


def test_no_factorisations_of_nothing():
    with pytest.raises(
        ValueError, match="num_chips must be at least 1 and at most 16777216, got 0"
    ):
        ms.factorisations(0)
    with pytest.raises(ValueError, match="num_chips must be at least 1"):
        ms.factorisations(10**30)


def test_mesh_shapes_from_text():
    assert parse_mesh_shape("4x8") == ms.MeshShape(4, 8) == (4, 8)
    assert str(ms.MeshShape(4, 8)) == "4x8"
    for text in ("4", "4x", "x4", "4x4x4", "0x4", "-1x4", "axb", ""):
        with pytest.raises(ValueError, match="is not of the form ROWSxCOLS"):
            parse_mesh_shape(text)


def test_meshes_of_two_and_of_more_axes():
    mesh = ms.make_mesh((2, 4))
    assert mesh.shape == {"row": 2, "col": 4}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert ms.make_mesh((2, 2, 4), ("data", "row", "col")).shape == {"data": 2, "row": 2, "col": 4}
    with pytest.raises(ValueError, match="needs 3 axis_names"):
        ms.make_mesh((2, 2, 2))
    with pytest.raises(ValueError, match=r"a 8x4 mesh needs 32 devices and there are 16 \(cpu\)"):
        ms.make_mesh((8, 4))


def test_emulating_devices_after_jax_has_started():
    jax.devices()
    ms.emulate_devices(16)  # that many are there
    with pytest.raises(RuntimeError, match="already runs with 16 CPU devices and 17 are needed"):
        ms.emulate_devices(17)


def test_a_flag_that_is_no_number(monkeypatch):
    from meshslice_jax import mesh

    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=many")
    with pytest.raises(ValueError, match="which is not a number of devices"):
        mesh._configured_devices()
