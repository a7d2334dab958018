"""What is to be measured over the wire; travels to the processes as JSON."""

import msgspec

from meshslice_jax import algorithms
from meshslice_jax.bench.cases import PASSES
from meshslice_jax.dataflow import Dataflow
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan

#: Forward, the gradients, and all three in one program.
WIRE_PASSES = (*PASSES, "step")
#: Algorithms that place matrices on a 2D mesh, so that one GSPMD base serves them all.
WIRE_ALGORITHMS = tuple("collective meshslice wang summa cannon".split())
#: How many times compute's time communication shall take, where nothing is asked for.
DEFAULT_RATES = ("0.5x", "1x", "1.5x")


class WireOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured.

    `rates` are numbers of Mbit/s ("430") or how many times compute's time communication
    shall take ("1.5x"). `control_slices` is the slice count of the control, of MeshSlice with
    its gathers in a free order, and of its slices of strided blocks: `block_size` indices each,
    where all others take the largest blocks that there are.
    """

    mesh: tuple[int, int] = (2, 2)
    m: int = 3072
    k: int = 3072
    n: int = 3072
    rates: tuple[str, ...] = DEFAULT_RATES
    names: tuple[str, ...] = WIRE_ALGORITHMS
    dataflows: tuple[str, ...] = tuple(Dataflow)
    slices: tuple[int, ...] = (2, 4, 8, 16)
    control_slices: int = 8
    block_size: int = 8
    passes: tuple[str, ...] = ("fwd", "step")
    repeats: int = 5

    def __post_init__(self):
        parse_rates(self.rates)
        for what, found, known in (
            ("algorithm", self.names, WIRE_ALGORITHMS),
            ("dataflow", self.dataflows, tuple(Dataflow)),
            ("pass", self.passes, WIRE_PASSES),
        ):
            if unknown := [name for name in found if name not in known]:
                raise ValueError(
                    f"over the wire there is no {what} {', '.join(unknown)}; there are "
                    f"{', '.join(known)}"
                )
        for name in ("repeats", "block_size"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 2 <= self.shape.num_chips <= 64:
            raise ValueError(f"a mesh over the wire has 2 to 64 chips, got {self.shape}")
        for flow in self.dataflows:  # what the placements need must divide
            plan = GemmPlan(algorithm="collective", dataflow=flow)
            algorithms.check(plan, self.m, self.n, self.k, self.shape)

    @property
    def shape(self) -> MeshShape:
        """The mesh, a process for each chip."""
        return MeshShape(*self.mesh)


def parse_rates(texts: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """Reads "430" as ("mbit", 430.0) and "1.5x" as ("times", 1.5).

    Raises:
      ValueError: a text that is neither.
    """
    found = []
    for text in texts:
        number = text.removesuffix("x")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 0 < value < 1e6:
            raise ValueError(
                f"rate {text!r} is neither Mbit/s, such as 430, nor times compute, such as 1.5x"
            )
        found.append(("times" if text.endswith("x") else "mbit", value))
    return tuple(found)
