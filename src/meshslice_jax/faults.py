"""What is wrong with a simulated cluster: jitter, slow chips, slow links.

Delays only ever add. Every draw comes from a stream of its own task, so a timeline
depends on the seed alone, and a larger jitter stretches the same draws.
"""

import dataclasses
import math

import numpy as np

from meshslice_jax import links
from meshslice_jax.mesh import MeshShape
from meshslice_jax.schedule import Transfer
from meshslice_jax.timeline import RESOURCES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """What is wrong with the cluster; the default is nothing.

    Attributes:
      product_jitter: mean delay of a local product, as a fraction of its time. Delays
        are exponential, drawn for each product and chip (the usual model of noise by
        an operating system; most are short, few are long).
      hop_jitter: the same for each hop of each link.
      slow_chips: (row, col, factor): the chip's products take `factor` times as long.
      slow_links: (row, col, link, factor) with link "row+", "row-", "col+" or "col-":
        hops from that chip over that link take `factor` times as long.
      seed: of the draws; equal seeds give equal timelines.

    Raises:
      ValueError: a negative jitter, a factor below 1, an unknown link.
    """

    product_jitter: float = 0.0
    hop_jitter: float = 0.0
    slow_chips: tuple[tuple[int, int, float], ...] = ()
    slow_links: tuple[tuple[int, int, str, float], ...] = ()
    seed: int = 0

    def __post_init__(self):
        for field in ("product_jitter", "hop_jitter"):
            value = getattr(self, field)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(
                    f"Faults: {field} is a mean delay as a fraction of the time and cannot be "
                    f"negative, got {value}"
                )
        for *_, factor in (*self.slow_chips, *self.slow_links):
            if not (factor >= 1 and math.isfinite(factor)):
                raise ValueError(
                    f"Faults: a factor says how many times as long things take and must be at "
                    f"least 1, got {factor}"
                )
        for _, _, link, _ in self.slow_links:
            if link not in RESOURCES[1:]:
                raise ValueError(f"Faults: link {link!r} is not one of {', '.join(RESOURCES[1:])}")


#: A cluster in perfect order.
NO_FAULTS = Faults()


class Wear:
    """Faults laid out over a mesh: how many times as long things take, and draws."""

    def __init__(self, faults: Faults, shape: MeshShape):
        self.faults = faults
        self.chips = np.ones(shape)
        self.links = {axis: np.ones((2, *shape)) for axis in ("row", "col")}
        for row, col, factor in faults.slow_chips:
            self.chips[_inside(row, col, shape)] = factor
        for row, col, link, factor in faults.slow_links:
            self.links[link[:-1]]["+-".index(link[-1])][_inside(row, col, shape)] = factor

    def product_factor(self, task: int) -> np.ndarray:
        """Per chip: how many times as long this product takes."""
        if self.faults.product_jitter == 0:
            return self.chips
        draws = self._generator(task).exponential(size=self.chips.shape)
        return self.chips * (1 + self.faults.product_jitter * draws)

    def hop_times(self, task: int, transfer: Transfer, hop_s: float) -> links.HopTimes:
        """Seconds of each hop of a transfer, drawn anew at each call."""
        nominal = hop_s * links.orient(
            self.links[transfer.axis], transfer.axis, transfer.directions
        )
        if self.faults.hop_jitter == 0:
            return lambda: nominal
        generator, jitter = self._generator(task), self.faults.hop_jitter
        return lambda: nominal * (1 + jitter * generator.exponential(size=nominal.shape))

    def _generator(self, task: int) -> np.random.Generator:
        # One stream per task: draws do not depend on the order of processing.
        return np.random.default_rng((self.faults.seed, task))


def _inside(row: int, col: int, shape: MeshShape) -> tuple[int, int]:
    if not (0 <= row < shape.rows and 0 <= col < shape.cols):
        raise ValueError(f"Faults: chip ({row}, {col}) is outside the simulated {shape} mesh")
    return row, col
