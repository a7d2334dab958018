"""The replay of schedules, worked by hand on a machine with round numbers."""

import dataclasses
import itertools

import pytest

from meshslice_jax.compiled.program import Move, Wait, Work
from meshslice_jax.compiled.replay import Links, replay, sensitivity, transfer_s, work_s
from meshslice_jax.hardware import HARDWARE
from meshslice_jax.mesh import MeshShape

US = 1e-6
#: 100 bytes/us a link each way, HBM 1000 bytes/us, launch 2 us, hop 1 us, rings everywhere.
MACHINE = dataclasses.replace(
    HARDWARE["tpu_v4"],
    name="round",
    link_bytes_per_s=100 / US,
    hbm_bytes_per_s=1000 / US,
    wrap_around="always",
    **{f"{kind}_launch_s": 2 * US for kind in ("gather", "scatter", "permute")},
    **{f"{kind}_hop_s": US for kind in ("gather", "scatter", "permute")},
)
CLOCK_HZ = 1e9
SHAPE = MeshShape(4, 4)
RING = Links(hardware=MACHINE, mesh_shape=SHAPE)
LINE = Links(hardware=dataclasses.replace(MACHINE, wrap_around="never"), mesh_shape=SHAPE)
ROW, COL = ((0, 4, 8, 12),), ((0, 1, 2, 3),)


def product(us, name="p"):
    return Work(name=name, cycles=round(us * 1000), bytes=0, is_product=True)


def copy(us):
    return Work(name="c", cycles=round(us * 1000), bytes=0, is_product=False)


def gather(key, groups=ROW, size=2000, kind="all-gather"):
    return Move(key=key, kind=kind, bytes=size, groups=groups)


def send(pairs, size=100, key="s"):
    return Move(key=key, kind="collective-permute", bytes=size, pairs=pairs)


def run(*events, links=RING):
    return replay(events, links, CLOCK_HZ)


def us(seconds):
    return pytest.approx(seconds * US)


def test_work_takes_its_cycles_or_its_bytes():
    assert work_s(product(3), MACHINE, CLOCK_HZ) == us(3)
    unknown = Work(name="w", cycles=None, bytes=5000, is_product=False)
    assert work_s(unknown, MACHINE, CLOCK_HZ) == us(5)


def test_a_gather_on_a_ring_uses_both_directions():
    # 2000 bytes over two links of 100 bytes/us, a launch of 2 and 4/2 hops.
    holds, latency_s = transfer_s(gather("g"), RING)
    assert holds == {"row+": us(10), "row-": us(10)}
    assert latency_s == us(2 + 2)


def test_a_gather_on_a_line_is_bound_by_one_link_and_has_more_hops():
    holds, latency_s = transfer_s(gather("g", COL), LINE)
    assert holds == {"col+": us(20), "col-": us(20)}
    assert latency_s == us(2 + 3)


def test_a_collective_over_both_axes_is_one_ring_of_all_chips():
    holds, latency_s = transfer_s(gather("g", (tuple(range(16)),)), RING)
    assert holds == {name: us(10) for name in ("row+", "row-", "col+", "col-")}
    assert latency_s == us(2 + 8)


def test_an_all_reduce_has_twice_the_hops():
    _, latency_s = transfer_s(gather("g", kind="all-reduce"), RING)
    assert latency_s == us(2 + 2 * 2)


@pytest.mark.parametrize("links, shards", [(RING, 2), (LINE, 4)])
def test_an_all_to_all_loads_links_by_the_square(links, shards):
    # 4^2/8 or 4^2/4 shards of 300 / 3 bytes over one link of 100 bytes/us.
    holds, _ = transfer_s(gather("g", size=300, kind="all-to-all"), links)
    assert holds == {"row+": us(shards), "row-": us(shards)}


def test_a_shift_round_a_ring_uses_one_direction():
    pairs = tuple((i, (i + 1) % 4) for i in range(4))
    holds, latency_s = transfer_s(send(pairs), RING)
    assert holds == {"col+": us(1)}
    assert latency_s == us(2 + 1)


def test_a_shift_on_a_line_comes_back_past_every_chip():
    pairs = tuple((i, (i + 1) % 4) for i in range(4))
    holds, latency_s = transfer_s(send(pairs), LINE)
    assert holds == {"col+": us(1), "col-": us(1)}
    assert latency_s == us(2 + 3)


def test_messages_that_share_a_link_are_counted():
    # All four chips of mesh row 0 send two to the right: each link carries two messages.
    holds, latency_s = transfer_s(send(tuple((i, (i + 2) % 4) for i in range(4))), RING)
    assert holds == {"col+": us(2)}
    assert latency_s == us(2 + 2)


def test_a_permute_over_both_axes_is_routed_along_rows_first():
    # Chip (0, 0) to (1, 3): one hop down, one hop left across the wrap.
    holds, latency_s = transfer_s(send(((0, 7),)), RING)
    assert holds == {"row+": us(1), "col-": us(1)}
    assert latency_s == us(2 + 2)


def test_a_permute_to_oneself_sends_nothing():
    found = run(send(((0, 0), (1, 1))), product(1))
    assert (found.projected_s, found.async_collectives) == (us(1), 0)


def test_a_synchronous_gather_is_exposed_in_full():
    found = run(gather(None), product(5), copy(1))
    assert found.projected_s == us(14 + 5 + 1)
    assert (found.product_s, found.copies_s, found.exposed_s) == (us(5), us(1), us(14))
    assert found.hidden == 0
    assert (found.sync_collectives, found.async_collectives) == (1, 0)


def test_what_a_product_covers_is_hidden():
    # The gather takes 14 us, the product 5: 9 are exposed.
    found = run(gather("g"), product(5), Wait(key="g"), product(5))
    assert found.projected_s == us(14 + 5)
    assert found.exposed_s == us(9)
    assert found.hidden == pytest.approx(5 / 14)
    assert run(gather("g"), product(20), Wait(key="g")).hidden == 1


def test_transfers_on_one_axis_take_turns_and_on_two_axes_do_not():
    both = (gather("a"), gather("b"), Wait(key="a"), Wait(key="b"))
    assert run(*both).projected_s == us(28)
    apart = (gather("a"), gather("b", COL), Wait(key="a"), Wait(key="b"))
    assert run(*apart).projected_s == us(14)


def test_the_two_directions_of_an_axis_are_separate():
    right, left = (tuple((i, (i + by) % 4) for i in range(4)) for by in (1, -1))
    ends = (Wait(key="a"), Wait(key="b"))
    assert run(send(right, key="a"), send(left, key="b"), *ends).projected_s == us(4)
    assert run(send(right, key="a"), send(right, key="b"), *ends).projected_s == us(8)


def test_a_synchronous_gather_waits_for_the_links_too():
    found = run(gather("a"), gather(None), Wait(key="a"))
    assert (found.projected_s, found.communication_s) == (us(28), us(28))
    assert found.hidden == 0


def test_nothing_sent_is_all_hidden():
    assert run(product(1)).hidden == 1


def test_the_parts_add_up_and_spans_show_them():
    found = run(gather("a"), copy(2), gather("b", COL), product(5), Wait(key="a"), Wait(key="b"))
    assert found.product_s + found.copies_s + found.exposed_s == pytest.approx(found.projected_s)
    core = sorted((s.start_s, s.end_s) for s in found.spans if s.resource in ("core", "wait"))
    for (_, end), (start, _) in itertools.pairwise(core):
        assert end == pytest.approx(start)
    assert {s.resource for s in found.spans} == {"core", "wait", "row+", "row-", "col+", "col-"}


def test_variants_change_what_they_say():
    events = (gather("g"), send(((0, 1),)), Wait(key="g"), Wait(key="s"))
    times = {name: run(*events, links=one).projected_s for name, one in sensitivity(RING).items()}
    assert run(*events).projected_s == us(14)
    assert times == {
        "half-rate links": us(20 + 4),
        "35 GB/s links": pytest.approx(2000 / 70e9 + 4 * US),
        "10 us launch": us(10 + 12),
        "2 us hop": us(10 + 2 + 4),
        "half-rate collectives": us(20 + 4),
    }
    # Half-rate collectives leave a permute alone.
    alone = (send(((0, 1),)), Wait(key="s"))
    slow = sensitivity(RING)["half-rate collectives"]
    assert run(*alone, links=slow).projected_s == run(*alone).projected_s == us(4)
