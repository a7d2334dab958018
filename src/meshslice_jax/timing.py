"""Fair wall-clock times: candidates take turns, every output is waited for.

A machine drifts (clock speed, neighbours, caches), so candidates that are to be
compared run in one interleaved loop: every round calls each of them once, from a
different starting point, and ratios are formed within a round before their median
is taken. Compilation and the first, slow call happen outside. Of several processes each
takes its own times, after all are ready; a call took as long as it took the slowest.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import jax

Name = TypeVar("Name", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Samples:
    """Times of one candidate in seconds, one a round, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def min_s(self) -> float:
        return min(self.seconds)

    @property
    def max_s(self) -> float:
        return max(self.seconds)

    def ratios_to(self, base: "Samples") -> tuple[float, ...]:
        """This time divided by the base's of the same round, by round."""
        pairs = zip(self.seconds, base.seconds, strict=True)
        return tuple(ours / theirs for ours, theirs in pairs)

    def ratio_to(self, base: "Samples") -> float:
        """The median of `ratios_to`."""
        return statistics.median(self.ratios_to(base))


def slowest(found: Sequence["Samples"]) -> "Samples":
    """One candidate's samples on several processes as those of the program."""
    rounds = zip(*(samples.seconds for samples in found), strict=True)
    return Samples(tuple(max(seconds) for seconds in rounds))


def rotated(names: list[Name], turn: int) -> list[Name]:
    """A round that starts one further than the round before."""
    start = turn % len(names) if names else 0
    return names[start:] + names[:start]


def back_and_forth(names: list[Name], turn: int) -> list[Name]:
    """Every other round in reverse."""
    return names[::-1] if turn % 2 else names


def interleaved(
    calls: Mapping[Name, Callable[[], object]],
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[object], object] = jax.block_until_ready,
    ready: Callable[[], object] = lambda: None,
    order: Callable[[list[Name], int], list[Name]] = rotated,
) -> dict[Name, Samples]:
    """Times every call once a round, for `repeats` rounds.

    Args:
      calls: what to time, compiled and warmed up.
      repeats: rounds.
      clock: seconds, monotonic.
      wait: blocks until all arrays in a call's result are there.
      ready: called before each call, outside its time; processes wait here for each other.
      order: of the names, in the round of a number.

    Returns:
      The samples of each call.

    Raises:
      ValueError: no rounds.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    names = list(calls)
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        for name in order(names, turn):
            ready()
            begin = clock()
            wait(calls[name]())
            seconds[name].append(clock() - begin)
    return {name: Samples(tuple(found)) for name, found in seconds.items()}
