"""Mesh shapes, meshes, and emulated devices.

A shape is two sizes, rows x cols. Axes are named for the coordinate that varies
along them: "row" has `rows` chips (the ring within one mesh column), "col" has
`cols` chips. Chip (i, j) of the mesh holds shard ij of every matrix.
"""

import math
import numbers
import os
from typing import NamedTuple

import jax
import numpy as np

from meshslice_jax import compat

#: More chips than any machine has; keeps a mistyped number from being factorised for hours.
MOST_CHIPS = 2**24


class MeshShape(NamedTuple):
    """Sizes of the two mesh axes."""

    rows: int
    cols: int

    @property
    def num_chips(self) -> int:
        return self.rows * self.cols

    def size(self, axis: str) -> int:
        """The length of axis "row" or "col"."""
        return {"row": self.rows, "col": self.cols}[axis]

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


def parse_mesh_shape(text: str) -> MeshShape:
    """Reads "4x8" as MeshShape(rows=4, cols=8).

    Raises:
      ValueError: the text is not two positive integers joined by an "x".
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"mesh {text!r} is not of the form ROWSxCOLS, such as 4x8")
    return MeshShape(int(parts[0]), int(parts[1]))


def factorisations(num_chips: int) -> tuple[MeshShape, ...]:
    """All rows x cols with rows * cols = num_chips, by ascending rows."""
    if not 1 <= num_chips <= MOST_CHIPS:
        raise ValueError(f"num_chips must be at least 1 and at most {MOST_CHIPS}, got {num_chips}")
    return tuple(MeshShape(r, num_chips // r) for r in divisors(num_chips))


def divisors(number: int) -> list[int]:
    """All divisors, ascending; none of 0."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def checked_shape(shape: tuple[int, int]) -> MeshShape:
    """`shape` as a MeshShape, if it is two positive integers.

    Raises:
      ValueError: it is not.
    """
    shape = tuple(shape)
    if len(shape) != 2 or not all(
        isinstance(size, numbers.Integral) and size >= 1 for size in shape
    ):
        raise ValueError(f"mesh_shape must be two positive integers (rows, cols), got {shape}")
    return MeshShape(*shape)


def make_mesh(
    shape: MeshShape | tuple[int, ...],
    axis_names: tuple[str, ...] = ("row", "col"),
    devices=None,
) -> jax.sharding.Mesh:
    """A mesh of `shape` with Auto axes over `devices` (default: the first that fit).

    On TPUs `jax.make_mesh` chooses an order whose neighbours are physical ones.

    Args:
      shape: sizes of the axes: rows and cols, or as many as there are names, such as
        (2, 4, 4) with ("data", "row", "col").
      axis_names: a name for each axis.
      devices: the devices to use.

    Raises:
      ValueError: the names do not match the shape, or there are fewer devices than it
        needs.
    """
    shape = tuple(shape)
    if len(shape) != len(axis_names):
        raise ValueError(
            f"a mesh of shape {shape} needs {len(shape)} axis_names, got {axis_names}; for "
            'example make_mesh((2, 4, 4), ("data", "row", "col"))'
        )
    needed, text = math.prod(shape), "x".join(str(size) for size in shape)
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) < needed:
        raise ValueError(
            f"a {text} mesh needs {needed} devices and there are {len(devices)} "
            f"({devices[0].platform}); on CPU call ms.emulate_devices({needed}) first"
        )
    devices, auto = devices[:needed], (jax.sharding.AxisType.Auto,) * len(shape)
    if devices[0].platform == "cpu":
        grid = np.asarray(devices).reshape(shape)
        return jax.sharding.Mesh(grid, axis_names, axis_types=auto)
    return jax.make_mesh(shape, axis_names, axis_types=auto, devices=devices)


def emulate_devices(num_devices: int) -> None:
    """Makes the CPU show itself as `num_devices` devices. Call before JAX starts.

    Keeps every XLA flag that the user set. A device count in the user's
    XLA_FLAGS or JAX_NUM_CPU_DEVICES that suffices is left alone.

    Raises:
      RuntimeError: JAX already runs with fewer CPU devices.
    """
    if compat.jax_has_started():
        found = len(jax.devices("cpu"))
        if found < num_devices:
            raise RuntimeError(
                f"JAX already runs with {found} CPU devices and {num_devices} are needed; call "
                "ms.emulate_devices before the first JAX computation, or start Python with "
                f"JAX_NUM_CPU_DEVICES={num_devices}"
            )
        return
    if max(_configured_devices()) < num_devices:
        jax.config.update("jax_num_cpu_devices", num_devices)


def _configured_devices() -> tuple[int, int]:
    """Device counts that JAX's configuration and XLA_FLAGS ask for, or 1."""
    flag = "--xla_force_host_platform_device_count="
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if f.startswith(flag)]
    text = flags[-1].removeprefix(flag) if flags else "1"
    if not text.isdecimal():
        raise ValueError(f"XLA_FLAGS has {flags[-1]!r}, which is not a number of devices")
    from_flags = int(text)
    from_config = jax.config.jax_num_cpu_devices
    if from_config > 0:  # wins over the flag
        return from_config, 1
    return 1, from_flags
