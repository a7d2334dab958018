"""What a hardware profile predicts for a block, as plain frozen values.

Predictions travel with the plan that they belong to, so that whoever runs it can compare.
They are modelled numbers: the profile's name is in the plan.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


class FrozenMapping(Mapping):
    """A mapping that cannot change: hashable, picklable, equal to a dict of the same items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | tuple = ()):
        self._items = tuple(dict(items).items())

    def __getitem__(self, key: str) -> Any:
        return dict(self._items)[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items))

    def __repr__(self) -> str:
        return repr(dict(self._items))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassPrediction:
    """What a hardware profile predicts for one product.

    Attributes:
      math_s: seconds in local products.
      comm_row_s: seconds in transfers along the plan's row axis.
      comm_col_s: seconds in transfers along the plan's col axis.
      exposed_s: seconds of communication that no product hides.
      total_s: seconds of the product.
      bytes_row: bytes that one chip sends along the plan's row axis.
      bytes_col: bytes that one chip sends along the plan's col axis.
      peak_bytes: shards, gathered slices and accumulators of one chip.
    """

    math_s: float
    comm_row_s: float
    comm_col_s: float
    exposed_s: float
    total_s: float
    bytes_row: float
    bytes_col: float
    peak_bytes: int

    @property
    def comm_s(self) -> float:
        """Seconds in transfers along both axes, which may run at the same time."""
        return self.comm_row_s + self.comm_col_s

    @property
    def bytes(self) -> float:
        """Bytes that one chip sends."""
        return self.bytes_row + self.bytes_col


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a hardware profile predicts for the FC layers of one block, forward and backward.

    Attributes:
      layers: layer name -> pass name -> PassPrediction.
      fc_s: seconds of all products.
      relayout_s: seconds in moving activations between layers whose placements differ.
      data_parallel_s: seconds of the weight gradients' all-reduce, not overlapped.
      block_s: seconds of the whole, under the plan's block schedule.
      utilisation: FLOPs of the products over block_s and the chip's peak.
      memory: what memory_bytes counts, "fc_block" or "training".
      memory_bytes: bytes of one chip.
    """

    layers: Mapping[str, Mapping[str, PassPrediction]]
    fc_s: float
    relayout_s: float
    data_parallel_s: float
    block_s: float
    utilisation: float
    memory: str
    memory_bytes: int

    def __post_init__(self):
        layers = {name: FrozenMapping(passes) for name, passes in self.layers.items()}
        object.__setattr__(self, "layers", FrozenMapping(layers))
