"""TPU topologies that a machine without a TPU can compile for, and meshes over them.

libtpu holds the whole TPU compiler, and JAX can hand it the description of a topology
("v4:4x8x8") in place of devices. What that takes differs by generation: a prefix of the
name, a chip configuration, an accelerator type in the environment. `GENERATIONS` has it.

A mesh of rows x cols is laid on the physical torus so that logical neighbours are
physical ones: a mesh axis takes one dimension of the torus, or two whose chips are
walked in a closed ring (32 of a 32x8 mesh on 4x8x8 is the 4x8 plane walked round). The
compiler's choices and estimates do not depend on that order; the replay's model of the
links does: it takes each mesh axis for a ring (or line) of its own.
"""

import dataclasses
import importlib.util
import itertools
import math
import types

import numpy as np

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


def lay_out(dims: tuple[int, ...], shape: tuple[int, int]) -> np.ndarray:
    """Which chip of a torus stands where in a mesh.

    Args:
      dims: sizes of the torus.
      shape: (rows, cols); each is one dimension of the torus or a product of several.

    Returns:
      Coordinates of chips, [rows, cols, len(dims)]; neighbours along both axes are
      physical neighbours, and both axes close to rings where the torus does.

    Raises:
      ValueError: no choice of dimensions makes up this mesh.
    """
    rows, cols = shape
    for count in range(len(dims) + 1):
        for chosen in itertools.combinations(range(len(dims)), count):
            rest = [d for d in range(len(dims)) if d not in chosen]
            sizes = [[dims[d] for d in part] for part in (chosen, rest)]
            if (math.prod(sizes[0]), math.prod(sizes[1])) != (rows, cols):
                continue
            found = np.zeros((rows, cols, len(dims)), int)
            found[:, :, list(chosen)] = np.array(_walk(sizes[0])).reshape(rows, 1, count)
            found[:, :, rest] = np.array(_walk(sizes[1])).reshape(1, cols, len(rest))
            return found
    fitting = sorted({s for s in _mesh_shapes(dims) if 1 not in s} or _mesh_shapes(dims))
    raise ValueError(
        f"a {rows}x{cols} mesh does not lie on a {'x'.join(map(str, dims))} torus: each mesh "
        "axis must be one of its dimensions or a product of several; what fits: "
        + ", ".join(f"{r}x{c}" for r, c in fitting)
    )


def _mesh_shapes(dims: tuple[int, ...]) -> set[tuple[int, int]]:
    parts = itertools.chain.from_iterable(
        itertools.combinations(dims, count) for count in range(len(dims) + 1)
    )
    return {(math.prod(part), math.prod(dims) // math.prod(part)) for part in parts}


def _walk(sizes: list[int]) -> list[tuple[int, ...]]:
    """All places of a grid in an order that steps to a neighbour each time.

    Two dimensions of which one is even make a closed ring: up and down through all
    places but the first column, then back along that column. More dimensions make a
    path (of which the last may be far from the first).
    """
    long = [d for d, size in enumerate(sizes) if size > 1]
    if len(long) == 2 and any(sizes[d] % 2 == 0 for d in long):
        major, minor = long if sizes[long[0]] % 2 == 0 else long[::-1]
        steps = [(0, 0)]
        for i in range(sizes[major]):
            places = range(1, sizes[minor])
            steps += [(i, j) for j in (places if i % 2 == 0 else reversed(places))]
        steps += [(i, 0) for i in range(sizes[major] - 1, 0, -1)]
        return [tuple({major: i, minor: j}.get(d, 0) for d in range(len(sizes))) for i, j in steps]
    path = [()]
    for size in sizes:
        path = [
            (*place, i)
            for number, place in enumerate(path)
            for i in (range(size) if number % 2 == 0 else reversed(range(size)))
        ]
    return path


def topology_mesh(topology: Topology, shape: tuple[int, int]):
    """A `jax.sharding.Mesh` ("row", "col") over devices that are only described.

    Call it in a process that has `environment(topology)`, before JAX starts there.

    Raises:
      ValueError: the mesh does not lie on the torus.
      RuntimeError: libtpu is not installed.
    """
    import jax
    from jax.experimental import topologies

    places = lay_out(topology.dims, MeshShape(*shape))
    require_libtpu()
    extra = {}
    if topology.generation.chip_config is not None:
        extra["chip_config_name"] = topology.generation.chip_config
    described = topologies.get_topology_desc(platform="tpu", topology_name=str(topology), **extra)
    devices = {tuple(device.coords): device for device in described.devices}
    if len(devices) != len(described.devices):
        raise RuntimeError(f"{topology} has several devices a chip; one is expected")
    grid = np.empty(tuple(shape), object)
    for row, col in np.ndindex(*shape):
        place = tuple(int(i) for i in places[row, col])
        grid[row, col] = devices[place + (0,) * (3 - len(place))]
    return jax.sharding.Mesh(grid, ("row", "col"))
