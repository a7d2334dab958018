"""What one chip sends, computes and holds: bytes, hops, FLOPs. No seconds.

A schedule is a sequence of (step, repeats). Everything inside a step runs at the
same time: at most one product, and transfers along the two mesh axes. Steps run
one after the other. So a sliced product with S slices reads

    prologue   gather slice 0
    steady     gather slice s+1 | multiply slice s | scatter slice s-1     x (S-1)
    epilogue   multiply slice S-1
    epilogue   scatter slice S-1

(MeshSlice, ISCA 2025, section 3.4.) The same numbers come from two sides: the
tests count collectives, bytes and FLOPs in the traced kernel and compare them
with `Schedule.totals`; `cost` turns them into seconds.
"""

import collections
import dataclasses
import itertools
from typing import Literal

Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "reduce"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """`count` like collectives along one axis, as one chip sees each of them.

    Attributes:
      kind: what is done.
      role: the matrix that moves, "lhs", "rhs" or "out".
      axis: "row" or "col", the mesh axis along which it moves.
      ring: chips along that axis.
      bytes: what one chip sends to its neighbours in one such collective, over
        all its hops (the mean over chips where chips differ).
      hops: ring steps that follow one another in one such collective.
      ops: primitive operations (as traced) of one such collective.
      directions: 2 if both ring directions carry it, 1 if only one.
      packets: pieces that follow each other along the ring (broadcast, reduce).
      count: how many of them this entry stands for.
    """

    kind: Kind
    role: str
    axis: str
    ring: int
    bytes: float
    hops: int
    ops: int = 1
    directions: int = 2
    packets: int = 1
    count: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A local product on one chip, or `count` equal ones in a row.

    Attributes:
      m: rows of its result.
      n: columns of its result.
      k: the extent that it sums over.
      accumulates: whether its result is added to one that is already there.
      count: how many of them follow each other in one step.
    """

    m: int
    n: int
    k: int
    accumulates: bool = False
    count: int = 1

    @property
    def flops(self) -> int:
        """2 m n k of each."""
        return 2 * self.m * self.n * self.k * self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What runs at the same time on one chip."""

    transfers: tuple[Transfer, ...] = ()
    product: Product | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over a schedule: what the traced kernel must show.

    Attributes:
      flops: floating-point operations of one chip.
      bytes: (kind, axis) -> bytes that one chip sends.
      ops: (kind, axis) -> traced operations; broadcasts and reduces are permutes.
    """

    flops: int
    bytes: dict[tuple[str, str], float]
    ops: dict[tuple[str, str], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps with their repeats, and the memory of one chip.

    Attributes:
      steps: (step, repeats) in order; repeats of 0 do not occur.
      argument_bytes: the shards of both operands.
      output_bytes: the shard of the output.
      temporary_bytes: gathered slices (double-buffered), partial products and
        accumulators that are alive at the same time, at most.
    """

    steps: tuple[tuple[Step, int], ...]
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Bytes of one chip at the fullest moment."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    @property
    def products(self) -> int:
        """The number of steps with a local product."""
        return sum(repeats for step, repeats in self.steps if step.product)

    def bytes_along(self, axis: str) -> float:
        """Bytes that one chip sends along "row" or "col"."""
        return float(sum(b for (_, along), b in self.totals().bytes.items() if along == axis))

    def totals(self) -> Totals:
        """FLOPs, bytes and operations summed over all steps."""
        flops = 0
        bytes_ = collections.defaultdict(float)
        ops = collections.defaultdict(int)
        for step, repeats in self.steps:
            flops += repeats * step.product.flops if step.product else 0
            for t in step.transfers:
                kind = "permute" if t.kind in ("broadcast", "reduce") else t.kind
                bytes_[kind, t.axis] += repeats * t.count * t.bytes
                ops[kind, t.axis] += repeats * t.count * t.ops
        return Totals(flops=flops, bytes=dict(bytes_), ops=dict(ops))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """A product, the moves of its inputs, and those of its output.

    Attributes:
      ahead: what brings the inputs.
      behind: what carries the output away.
      product: the product.
    """

    ahead: tuple[Transfer, ...]
    behind: tuple[Transfer, ...]
    product: Product

    def widened(self, width: int, streamed: str) -> "Slice":
        """`width` such slices in one: as many indices of the dimension `streamed`."""
        if width == 1:
            return self
        ahead, behind = (
            tuple(dataclasses.replace(t, bytes=t.bytes * width) for t in moves)
            for moves in (self.ahead, self.behind)
        )
        extent = getattr(self.product, streamed) * width
        product = dataclasses.replace(self.product, **{streamed: extent})
        return Slice(ahead=ahead, behind=behind, product=product)


def pipelined(slices: list[Slice]) -> tuple[tuple[Step, int], ...]:
    """Products in order, moves of inputs one step ahead of them, those of the output one behind."""
    steps = [(Step(transfers=slices[0].ahead), 1)]
    for (current, following), alike in itertools.groupby(itertools.pairwise(slices)):
        transfers = following.ahead + current.behind
        steps.append((Step(transfers=transfers, product=current.product), len(list(alike))))
    last = slices[-1]
    return sequence(*steps, (Step(product=last.product), 1), (Step(transfers=last.behind), 1))


def sequence(*entries: tuple[Step, int]) -> tuple[tuple[Step, int], ...]:
    """Schedule steps without those that are empty or repeat zero times."""
    return tuple(
        (step, repeats)
        for step, repeats in entries
        if repeats > 0 and (step.product is not None or step.transfers)
    )
