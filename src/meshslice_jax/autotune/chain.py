"""The best plan of a block on one mesh: dynamic programming along its layers.

The FC layers of a block lie on branches of the residual stream: attention (qkv, out) and
the MLP (ff1, ff2, or gate_up, down). What lies between the layers of a branch (attention,
activation functions) and on the stream (additions, norms) keeps placements. So, for a
placement of the stream, each branch is a chain that starts and ends there,

    stream -> lhs of layer 1, out of layer 1 -> lhs of layer 2, out of layer 2 -> stream

and every arrow between different placements costs a relayout, forward and backward. The
state of the chain is the placement alone, of which there are a handful, so the search over
all combinations (2^L and more in the paper, which replaces it by a heuristic) is exact.
"""

import dataclasses

from meshslice_jax.autotune import layer as layers
from meshslice_jax.autotune.layer import LayerSpace, Limit, Option
from meshslice_jax.autotune.product import Pricer, faster, rounded
from meshslice_jax.autotune.relayout import Placement, relayout_s
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.problem import GemmProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """The block that is tuned.

    Attributes:
      problems: the products of one replica, by layer.
      spaces: what may be tuned, by layer.
      branches: the layers between two additions to the residual stream.
    """

    problems: dict[str, GemmProblem]
    spaces: dict[str, LayerSpace]
    branches: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution:
    """A block that runs on one mesh.

    Attributes:
      options: the chosen option of each layer, in the order of the problems.
      fc_s: seconds of all products.
      relayout_s: seconds between layers whose placements differ.
    """

    options: dict[str, Option]
    fc_s: float
    relayout_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the block."""
        return self.fc_s + self.relayout_s


def floor_s(block: Block, shape: MeshShape, pricer: Pricer) -> float | str:
    """Seconds below which the block does not get, or the layer that cannot run at all."""
    total = 0.0
    for name, problem in block.problems.items():
        ways = block.spaces[name].ways()
        floors = [layers.floor_s(way, problem, shape, pricer) for way in ways]
        floor = min((one for one in floors if one is not None), default=None)
        if floor is None:
            return name
        total += floor
    return total


def solve(block: Block, shape: MeshShape, pricer: Pricer, limit: Limit) -> Solution | str:
    """The fastest block on one mesh, or the name of a layer that cannot run there."""
    mover = Mover(block.problems, shape, pricer.hardware)
    options = {}
    for name in block.problems:
        options[name] = _options(name, block, shape, pricer, limit, mover)
        if not options[name]:
            return name
    streams = dict.fromkeys(
        place for found in options.values() for one in found for place in (one.lhs, one.out)
    )
    best = None
    for stream in streams:
        total, chosen = 0.0, {}
        for branch in block.branches:
            seconds, picked = _branch(branch, stream, options, mover)
            total, chosen = total + seconds, chosen | picked
        if best is None or faster(total, best[0]):
            best = total, chosen
    total, chosen = best
    fc_s = sum(chosen[name].total_s for name in block.problems)
    ordered = {name: chosen[name] for name in block.problems}
    places = {name: (option.lhs, option.out) for name, option in ordered.items()}
    moved = relayouts_s(places, block.branches, mover)
    return Solution(options=ordered, fc_s=fc_s, relayout_s=moved)


class Mover:
    """Relayouts of a block's activations on one mesh, priced once each."""

    def __init__(self, problems: dict[str, GemmProblem], shape: MeshShape, hardware: HardwareSpec):
        self.problems, self.shape, self.hardware = problems, shape, hardware
        self._known = {}

    def __call__(self, layer: str, role: str, source: Placement, target: Placement) -> float:
        """Seconds, forward and backward, of moving a layer's lhs or out."""
        if source == target:
            return 0.0
        key = layer, role, source, target
        if key not in self._known:
            size = self.problems[layer].bytes(role)
            self._known[key] = 2 * relayout_s(size, source, target, self.shape, self.hardware)
        return self._known[key]

    def most(self, layer: str) -> float:
        """The most that the relayouts on both sides of a layer can take."""
        both = (("row",), ("col",)), (("col",), ("row",))
        return self(layer, "lhs", *both) + self(layer, "out", *both)


def _options(name, block, shape, pricer, limit, mover) -> list[Option]:
    """The options of a layer that may be part of the best block, the best per placement.

    A way whose floor is above the best option by more than all relayouts beside the layer
    can never be worth it.
    """
    problem, space = block.problems[name], block.spaces[name]
    floors = [(layers.floor_s(way, problem, shape, pricer), way) for way in space.ways()]
    runs = [(rounded(floor), way) for floor, way in floors if floor is not None]
    runs.sort(key=lambda one: one[0])
    kept, best_s, slack = {}, float("inf"), mover.most(name)
    for floor, way in runs:
        if floor > (best_s + slack) * (1 + 1e-8):
            break
        found = layers.price(way, space, problem, shape, pricer, limit)
        if found is None:
            continue
        best_s = min(best_s, found.total_s)
        places = found.lhs, found.out
        if places not in kept or faster(found.total_s, kept[places].total_s):
            kept[places] = found
    return list(kept.values())


def _branch(branch, stream, options, mover) -> tuple[float, dict[str, Option]]:
    """The fastest chain of a branch that starts and ends with the stream's placement."""
    states = {stream: (0.0, {})}
    for name in branch:
        after = {}
        for option in options[name]:
            seconds, picked = min(
                (
                    (spent + mover(name, "lhs", place, option.lhs), picked)
                    for place, (spent, picked) in states.items()
                ),
                key=lambda one: one[0],
            )
            seconds += option.total_s
            if option.out not in after or faster(seconds, after[option.out][0]):
                after[option.out] = seconds, picked | {name: option}
        states = after
    last = branch[-1]
    return min(
        (
            (spent + mover(last, "out", place, stream), picked)
            for place, (spent, picked) in states.items()
        ),
        key=lambda one: one[0],
    )


def relayouts_s(
    places: dict[str, tuple[Placement, Placement]],
    branches: tuple[tuple[str, ...], ...],
    mover: Mover,
) -> float:
    """Seconds of a block's relayouts, with the best placement of the stream.

    Args:
      places: where each layer wants its input and leaves its output.
      branches: the layers between two additions to the residual stream.
      mover: prices a relayout.
    """

    def along(stream: Placement) -> float:
        total = 0.0
        for branch in branches:
            place = stream
            for name in branch:
                lhs, out = places[name]
                total += mover(name, "lhs", place, lhs)
                place = out
            total += mover(branch[-1], "out", place, stream)
        return total

    return min(along(stream) for both in places.values() for stream in both)
