"""The order of a whole block's products, and what may run across their borders.

A training step of a transformer block runs three products per layer: the forward
ones in order, then, from the last layer to the first, the gradients dX (of lhs)
and dW (of rhs). Inside a product a plan overlaps communication; at every border
between two products the paper starts afresh: the last reduce-scatter and the next
first gather are exposed. The options here remove those borders one by one. They go
beyond the paper, cost memory, and change no result.

This is plain data; `block_graph` gives it its meaning in the simulator, and
docs/simulator.md has what each option gains and costs.
"""

import dataclasses

_FLAGS = (
    "grad_lhs_first",
    "prefetch_weight",
    "prefetch_saved",
    "overlap_grad_rhs",
    "share_cotangent",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSchedule:
    """How the products of a block follow each other; the default is the paper's.

    Attributes:
      grad_lhs_first: per layer, dX runs before dW. dW needs nothing of dX, so it
        does not wait for dX's last reduce-scatter. False: dW, then dX, each
        complete before the other starts.
      prefetch_weight: weights are gathered ahead of the product before theirs, as
        far as `buffer_depth` allows: forward and dX.
      prefetch_saved: what dW gathers is gathered ahead of the product before it: the
        saved activation or, where dX runs first, the cotangent, which is there
        already. Slices of dW may then run between those of dX.
      overlap_grad_rhs: the product after dW does not wait for dW: dW's last
        reduce-scatter runs beside it, and its own gathers beside dW.
      share_cotangent: where dX and dW of a layer both gather the output's
        cotangent, the second uses what the first gathered. The whole gathered
        cotangent then stays in memory between them.
      buffer_depth: gathered slices of each moving operand that may be held at
        once, 2 or 3 (also the partial results that wait for their reduce-scatter).

    Raises:
      TypeError: a flag that is no bool, a depth that is no int.
      ValueError: a depth other than 2 or 3.
    """

    grad_lhs_first: bool = False
    prefetch_weight: bool = False
    prefetch_saved: bool = False
    overlap_grad_rhs: bool = False
    share_cotangent: bool = False
    buffer_depth: int = 2

    def __post_init__(self):
        for field in _FLAGS:
            if not isinstance(getattr(self, field), bool):
                raise TypeError(
                    f"BlockSchedule: {field} must be True or False, got {getattr(self, field)!r}"
                )
        depth = self.buffer_depth
        if not isinstance(depth, int) or isinstance(depth, bool):
            raise TypeError(f"BlockSchedule: buffer_depth must be an int, got {depth!r}")
        if depth not in (2, 3):
            raise ValueError(
                f"BlockSchedule: buffer_depth must be 2 (gather one slice ahead) or 3 (two), "
                f"got {depth}"
            )

    @property
    def is_plain(self) -> bool:
        """Whether the products follow each other with nothing across the borders."""
        return self == BlockSchedule()


#: Every option that the model finds worth its memory, at buffer depth 2.
OVERLAPPED_BLOCK = BlockSchedule(**dict.fromkeys(_FLAGS, True))
