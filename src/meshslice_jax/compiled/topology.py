"""TPU topologies that a machine without a TPU can compile for, and meshes over them.

libtpu holds the whole TPU compiler, and JAX can hand it the description of a topology
("v4:4x8x8") in place of devices. What that takes differs by generation: a prefix of the
name, a chip configuration, an accelerator type in the environment. `GENERATIONS` has it.
"""

import dataclasses
import importlib.util
import math
import types

import numpy as np

from meshslice_jax.compiled.layout import lay_out
from meshslice_jax.hardware import HARDWARE, HardwareSpec
from meshslice_jax.mesh import MeshShape

#: What to do where the compiler is not there.
INSTALL = "compiling for a TPU topology needs libtpu: pip install libtpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What compiling for one generation of TPUs takes.

    Attributes:
      name: the prefix of its topologies' names.
      hardware: name of its profile.
      flops_per_cycle: multiply-add FLOPs of one chip in a cycle, all cores and MXUs.
      accelerator: prefix of its accelerator type.
      cores_per_chip: cores that the accelerator type counts for a chip.
      dims: dimensions of its torus.
      chip_config: the chip configuration with one device a chip, or None.
    """

    name: str
    hardware: str
    flops_per_cycle: int
    accelerator: str
    cores_per_chip: int
    dims: int
    chip_config: str | None = None

    def clock_hz(self, hardware: HardwareSpec) -> float:
        """Cycles per second: the profile's bfloat16 peak over the FLOPs of a cycle."""
        return hardware.flops_per_s("bfloat16") / self.flops_per_cycle


#: FLOPs per cycle: cores x MXUs x rows x columns x 2. Cores and MXU sizes are those of the
#: vendor's pages; the count of MXUs is what makes them agree with the compiler's cycle
#: estimate of a large product (92 to 98 % of the peak on v4, v5e and v5p, 75 % on v6e).
GENERATIONS = types.MappingProxyType(
    {
        generation.name: generation
        for generation in (
            Generation(
                name="v4",
                hardware="tpu_v4",
                flops_per_cycle=2 * 4 * 128 * 128 * 2,
                accelerator="v4",
                cores_per_chip=2,
                dims=3,
                chip_config="megacore",
            ),
            Generation(
                name="v5e",
                hardware="tpu_v5e",
                flops_per_cycle=4 * 128 * 128 * 2,
                accelerator="v5litepod",
                cores_per_chip=1,
                dims=2,
            ),
            Generation(
                name="v5p",
                hardware="tpu_v5p",
                flops_per_cycle=2 * 4 * 128 * 128 * 2,
                accelerator="v5p",
                cores_per_chip=2,
                dims=3,
                chip_config="megacore",
            ),
            Generation(
                name="v6e",
                hardware="tpu_v6e",
                flops_per_cycle=4 * 256 * 256 * 2,
                accelerator="v6e",
                cores_per_chip=1,
                dims=2,
            ),
        )
    }
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A generation and the sizes of its torus; `str` gives the name that JAX knows."""

    generation: Generation
    dims: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        return math.prod(self.dims)

    @property
    def hardware(self) -> HardwareSpec:
        """The nominal profile of the generation."""
        return HARDWARE[self.generation.hardware]

    def __str__(self) -> str:
        return f"{self.generation.name}:{'x'.join(map(str, self.dims))}"


def parse_topology(text: str) -> Topology:
    """Reads "v4:4x8x8" or "v5e:16x16"; a missing third size of v4 and v5p is 1.

    Raises:
      ValueError: another form, a generation that is not here, or too many sizes.
    """
    name, _, sizes = text.partition(":")
    if name not in GENERATIONS:
        raise ValueError(
            f"topology {text!r} is of no known generation; there are "
            f"{', '.join(GENERATIONS)}, as in v4:4x8x8"
        )
    generation, parts = GENERATIONS[name], sizes.lower().split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"topology {text!r} has no sizes of the form 4x8x8 after its colon")
    if len(parts) > generation.dims:
        raise ValueError(
            f"topology {text!r} has {len(parts)} sizes, and the torus of {name} has "
            f"{generation.dims}"
        )
    dims = tuple(map(int, parts))
    return Topology(generation, dims + (1,) * (generation.dims - len(dims)))


def require_libtpu() -> None:
    """Returns where libtpu is installed.

    Raises:
      RuntimeError: it is not, with what to install.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(INSTALL)


def environment(topology: Topology) -> dict[str, str]:
    """The variables under which a process compiles for a topology on a machine without it."""
    generation = topology.generation
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": (
            f"{generation.accelerator}-{topology.num_chips * generation.cores_per_chip}"
        ),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two processes may compile at once
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def topology_mesh(topology: Topology, shape: tuple[int, int]):
    """A `jax.sharding.Mesh` ("row", "col") over devices that are only described.

    Call it in a process that has `environment(topology)`, before JAX starts there.

    Raises:
      ValueError: the mesh does not lie on the torus.
      RuntimeError: libtpu is not installed.
    """
    import jax
    from jax.experimental import topologies

    places = lay_out(topology.dims, MeshShape(*shape)).places
    require_libtpu()
    extra = {}
    if topology.generation.chip_config is not None:
        extra["chip_config_name"] = topology.generation.chip_config
    described = topologies.get_topology_desc(platform="tpu", topology_name=str(topology), **extra)
    devices = {tuple(device.coords): device for device in described.devices}
    if len(devices) != len(described.devices):
        raise RuntimeError(f"{topology} has several devices a chip; one is expected")
    grid = np.empty(math.prod(shape), object)
    for chip, place in enumerate(places):
        grid[chip] = devices[place + (0,) * (3 - len(place))]
    return jax.sharding.Mesh(grid.reshape(shape), ("row", "col"))
