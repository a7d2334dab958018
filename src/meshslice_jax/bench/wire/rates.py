"""The rate of the links at which communication takes so and so many times compute's time.

TCP, gloo and copies in memory take their share of a nominal rate, so the rate that the
bytes alone would need is only the first guess; it is corrected by what is measured.
"""

import dataclasses
from collections.abc import Callable

#: How often a guess is corrected.
_CORRECTIONS = 2
#: Above it nothing is shaped: a product so small that latency alone takes longer than asked
#: for is measured at this rate, and its record says what the ratio was.
_HIGHEST_BITS_PER_S = 20e9


@dataclasses.dataclass(frozen=True)
class Rate:
    """A rate of the links in bits a second, and what was asked for."""

    asked: str
    bits_per_s: float


def find_rate(
    kind: str,
    value: float,
    *,
    sent_bytes: float,
    compute_s: float,
    communication_s: Callable[[float], float],
) -> Rate:
    """The rate that an option asks for.

    Args:
      kind: "mbit" or "times", see `options.parse_rates`.
      value: Mbit/s, or how many times compute's time communication shall take.
      sent_bytes: what one chip sends.
      compute_s: compute's time.
      communication_s: measures communication's time at a rate in bits a second.
    """
    if kind == "mbit":
        return Rate(f"{value:g}", value * 1e6)
    wanted_s = value * compute_s
    bits_per_s = min(8 * sent_bytes / wanted_s, _HIGHEST_BITS_PER_S)
    for _ in range(_CORRECTIONS):
        bits_per_s *= communication_s(bits_per_s) / wanted_s
        bits_per_s = min(bits_per_s, _HIGHEST_BITS_PER_S)
    return Rate(f"{value:g}x", bits_per_s)
