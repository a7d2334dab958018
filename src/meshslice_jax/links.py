"""Transfers along one mesh axis, hop by hop, for all chips at once.

Every chip has a link to each neighbour along an axis: "+" to the next coordinate, "-"
to the previous one. A collective is a recurrence over its hops in the max-plus sense:
a link starts hop h when it is done with hop h-1 and its chip has received what it
passes on; the first hop also waits for the receiver. So lateness travels one chip
per hop, and on a ring of P chips one late chip delays all others by hop P-1.

    ring    sent[h, i] = max(sent[h-1, i], sent[h-1, i-1]) + hop
    chain   sent[q, j] = max(sent[q-1, j], sent[q, j-1]) + hop     piece q, j-th link

A ring (all-gather, reduce-scatter, shifts) is over for a chip when it has sent and
received its last hop. A chain (SUMMA's broadcast and reduce) runs from its root to its
tail and is over for nobody before it has reached the tail: the next one has another
root, which must know that its ring is free. (MeshSlice, ISCA 2025, sections 2.3, 5.)

Arrays of one axis are *oriented*: shape (directions, other axis, ring), with the ring
reversed for direction "-", so that data always moves towards higher indices.
"""

from collections.abc import Callable

import numpy as np

#: Returns the seconds of the next hop for all links: oriented, or broadcastable to it.
HopTimes = Callable[[], np.ndarray]


def orient(values: np.ndarray, axis: str, directions: int) -> np.ndarray:
    """An oriented copy of per-chip values of shape (rows, cols).

    Args:
      values: one value per chip, or (2, rows, cols): one per link "+" and "-".
      axis: "row" or "col", the axis along which the transfer runs.
      directions: 2 for both links; 1 for "-" alone, where shifts by -1 go.
    """
    both = values if values.ndim == 3 else np.stack([values, values])
    if axis == "row":
        both = both.swapaxes(1, 2)
    flipped = both[1, :, ::-1]
    return np.stack([both[0], flipped]) if directions == 2 else flipped[None].copy()


def settle(oriented: np.ndarray, axis: str) -> np.ndarray:
    """Per chip, shape (rows, cols): when the transfer is over in all its directions."""
    last = oriented[-1][:, ::-1]
    both = last if len(oriented) == 1 else np.maximum(oriented[0], last)
    return both.T if axis == "row" else both


def ring(arrived: np.ndarray, hops: int, hop_s: HopTimes, *, closed: bool) -> np.ndarray:
    """When each chip has sent and received `hops` hops.

    Args:
      arrived: oriented; when each chip is ready for the first hop.
      hops: ring steps.
      hop_s: seconds of a hop, drawn anew for each.
      closed: whether a link joins the last chip to the first.
    """
    # sent[..., i] is the link from chip i to i + 1; the first hop needs both.
    sent = np.maximum(arrived, np.roll(arrived, -1, axis=-1))
    if not closed:
        sent[..., -1] = arrived[..., -1]
    sent += hop_s()
    for _ in range(hops - 1):
        sent = np.maximum(sent, _received(sent, closed)) + hop_s()
    if not closed:
        sent[..., -1] = arrived[..., -1]  # there is no such link
    return np.maximum(sent, _received(sent, closed))


def _received(sent: np.ndarray, closed: bool) -> np.ndarray:
    """For each chip, when the link towards it was done; on a line the first has none."""
    received = np.empty_like(sent)
    received[..., 1:] = sent[..., :-1]
    received[..., 0] = sent[..., -1] if closed else -np.inf
    return received


def chain(arrived: np.ndarray, starts: tuple[int, ...], pieces: int, hop_s: HopTimes) -> np.ndarray:
    """When a chain has reached its tail; the same for all chips of a ring.

    Args:
      arrived: oriented; when each chip is ready.
      starts: for each direction, the index at which its chain starts.
      pieces: packets that follow each other.
      hop_s: seconds of a hop, drawn anew for each stage.
    """
    rolled = _rolled(arrived, starts)
    links = rolled.shape[-1] - 1
    sent = np.maximum(rolled[..., :-1], rolled[..., 1:])
    for stage in range(links + pieces - 1):
        # Piece q is on link j in stage j + q.
        low, high = max(0, stage - pieces + 1), min(stage, links - 1) + 1
        before = sent[..., max(low - 1, 0) : high - 1]
        if low == 0:
            before = np.concatenate([sent[..., :1], before], axis=-1)
        hop = _rolled(np.broadcast_to(hop_s(), arrived.shape), starts)[..., low:high]
        sent[..., low:high] = np.maximum(sent[..., low:high], before) + hop
    over = sent.max(axis=-1, keepdims=True)
    return np.broadcast_to(over, arrived.shape)


def _rolled(values: np.ndarray, starts: tuple[int, ...]) -> np.ndarray:
    """Each direction's row of chips, beginning where its chain starts."""
    return np.stack([np.roll(v, -s, axis=-1) for v, s in zip(values, starts, strict=True)])


def chain_starts(kind: str, root: int, ring: int, directions: int) -> tuple[int, ...]:
    """Oriented indices at which the chains of a broadcast or reduce start.

    A broadcast starts at its root; a reduce at the root's next neighbour, goes all the
    way round and ends at the root.
    """
    forward = root if kind == "broadcast" else root + 1
    backward = ring - 1 - (root if kind == "broadcast" else root - 1)
    return (forward % ring, backward % ring) if directions == 2 else (backward % ring,)
