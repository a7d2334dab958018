"""Scheduled HLO: text to records, loops to counts, modules to work, moves and waits.

The files in data/ are what the TPU compiler made of this package's products
(data/make_hlo.py); short texts here are written for the case.
"""

from collections import Counter
from pathlib import Path

import pytest

from meshslice_jax.compiled import hlo, program
from meshslice_jax.compiled.loop import trip_count
from meshslice_jax.compiled.program import Move, Wait, Work

DATA = Path(__file__).parent / "data"
ROWS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
COLS = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
#: Bytes of a bfloat16 shard of the 6144 x 6144 matrices on 4 x 4 chips.
SHARD = 6144 * 6144 * 2 // 16


def events(name):
    return program.events(hlo.parse((DATA / f"{name}.hlo").read_text()))


def only(kind, found):
    return [event for event in found if isinstance(event, kind)]


def module(*lines, before=""):
    """A module of one computation."""
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(f"HloModule m\n{before}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n")


def first(*lines, before=""):
    found = module(*lines, before=before)
    return found.computations[found.entry][0]


@pytest.mark.parametrize(
    "shape, expected",
    [
        ("f32[4,8]{1,0:T(8,128)}", 128),
        ("bf16[3]", 6),
        ("pred[]", 1),
        ("(bf16[2,2]{1,0}, (f32[3], u32[]{:S(2)}), token[])", 8 + 12 + 4),
    ],
)
def test_bytes_of_a_shape(shape, expected):
    assert hlo.shape_bytes(shape) == expected


def test_elements_of_a_tuple():
    assert hlo.elements("(bf16[2]{0}, (f32[3], u32[]), s8[1]{0:T(8,128)S(3)})") == [
        "bf16[2]{0}",
        "(f32[3], u32[])",
        "s8[1]{0:T(8,128)S(3)}",
    ]
    assert hlo.elements("bf16[2]{0}") == ["bf16[2]{0}"]


def test_an_instruction_with_everything():
    one = first(
        "ROOT %x.1 = (f32[4]{0:T(128)}, /*index=1*/f32[8]{0}) all-gather-start(%p.2, %q), "
        'channel_id=7, replica_groups={{0,1},{2,3}}, metadata={op_name="a/b(c)/d"}, '
        'backend_config={"estimated_cycles":"123","x":["("]}'
    )
    assert (one.name, one.opcode, one.is_root) == ("x.1", "all-gather-start", True)
    assert one.operands == ["p.2", "q"]
    assert (one.bytes, one.cycles, one.channel) == (48, 123, 7)
    assert one.op_name == "a/b(c)/d"


@pytest.mark.parametrize(
    "notation, expected",
    [
        ("{{0,4},{1,5}}", ((0, 4), (1, 5))),
        ("[2,3]<=[6]", ((0, 1, 2), (3, 4, 5))),
        ("[3,2]<=[2,3]T(1,0)", ((0, 3), (1, 4), (2, 5))),
        ("mesh['x'=2,'y'=3] {'x'}", ((0, 3), (1, 4), (2, 5))),
        ("mesh['x'=2,'y'=3] {'y'}", ((0, 1, 2), (3, 4, 5))),
    ],
)
def test_replica_groups_in_every_notation(notation, expected):
    one = first(f"%g = f32[4] all-reduce(%p), replica_groups={notation}, to_apply=%sum")
    assert one.replica_groups == expected


def test_unknown_texts_are_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("not a module")
    with pytest.raises(ValueError, match="notation that is not known"):
        _ = first("%g = f32[4] all-reduce(%p), replica_groups=all").replica_groups


LOOP = """
%cond (s: (s32[], f32[4])) -> pred[] {
  %s = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %bound = s32[] constant(BOUND)
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

%body (s.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s.1 = (s32[], f32[4]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %step = s32[] constant(3)
  %next = s32[] add(%i.1, %step)
  %x = f32[4] get-tuple-element(%s.1), index=1
  %y = f32[4096] add(%x, %x)
  ROOT %t = (s32[], f32[4]) tuple(%next, %x)
}
"""


def loop(bound):
    return module(
        "%p = f32[4] parameter(0)",
        "%start = s32[] constant(2)",
        "%start.copy = s32[] copy(%start)",
        "%init = (s32[], f32[4]) tuple(%start.copy, %p)",
        "ROOT %w = (s32[], f32[4]) while(%init), condition=%cond, body=%body",
        before=LOOP.replace("BOUND", bound),
    )


def test_a_loop_from_2_below_12_in_steps_of_3_runs_4_times():
    found = loop("12")
    body = found.computations[found.entry]
    assert trip_count(body[-1], found, {one.name: one for one in body}) == 4
    assert [work.name for work in only(Work, program.events(found))] == ["y"] * 4


def test_a_loop_that_cannot_be_counted_is_an_error_not_a_guess():
    with pytest.raises(ValueError, match="cannot tell how often the compiled loop 'w' runs"):
        program.events(loop("{...}"))


def test_default_options_leave_both_gathers_synchronous():
    moves = only(Move, events("v4_collective_os"))
    assert [(m.key, m.kind, m.bytes, m.groups) for m in moves] == [
        (None, "all-gather", 3 * SHARD, COLS),
        (None, "all-gather", 3 * SHARD, ROWS),
    ]


def test_asynchronous_gathers_of_two_slices():
    found = events("v4_meshslice_os")
    moves, products = only(Move, found), [w for w in only(Work, found) if w.is_product]
    assert Counter(move.groups for move in moves) == {ROWS: 2, COLS: 2}
    assert all(move.key and move.bytes == 3 * SHARD // 2 for move in moves)
    assert [wait.key for wait in only(Wait, found)] == [
        m.key for m in sorted(moves, key=lambda m: m.label)
    ]
    assert ["slice0" in w.label for w in products] == [True, False]
    # The second slice's gathers start before the first product and end after it.
    place = found.index(products[0])
    started = {e.key for e in found[:place] if isinstance(e, Move)}
    waited = {e.key for e in found[:place] if isinstance(e, Wait)}
    assert {m.key for m in moves if "slice1" in m.label} == started - waited


def test_a_fused_all_reduce_and_slice_is_a_reduce_scatter():
    moves = only(Move, events("v4_meshslice_ls"))
    gathers = [m for m in moves if m.kind == "all-gather"]
    scatters = [m for m in moves if m.kind == "reduce-scatter"]
    assert len(moves) == 4 and {m.groups for m in gathers} == {ROWS}
    assert all(m.key for m in gathers) and all(m.key is None for m in scatters)
    # float32 between chips: twice the bytes of a bfloat16 shard, half of it in each slice.
    assert [(m.bytes, m.groups) for m in scatters] == [(3 * SHARD, COLS)] * 2


def test_a_rolled_loop_moves_all_slices():
    moves = only(Move, events("v4_rolled_os"))
    assert Counter(move.groups for move in moves) == {ROWS: 6, COLS: 6}
    assert sum(move.bytes for move in moves) == 2 * 3 * SHARD
    assert len({move.key for move in moves}) == 12
    products = [w for w in only(Work, events("v4_rolled_os")) if w.is_product]
    assert len(products) == 6


def test_neighbour_sends_of_a_ring():
    found = events("v4_wang_os")
    sends = [m for m in only(Move, found) if m.kind == "collective-permute"]
    assert {m.pairs for m in sends} == {((0, 1), (1, 0), (2, 3), (3, 2))}
    assert sum(m.bytes for m in sends) == 6144 * 6144 * 2 // 4
    assert all(m.key for m in sends)


def test_v5e_carries_a_gather_on_inside_a_product():
    found = events("v5e_meshslice_os")
    moves = only(Move, found)
    carried = [m for m in moves if m.key]
    assert len(moves) == 4 and len(carried) == 1
    place = found.index(carried[0])
    kinds = [type(e) for e in found[place : place + 3]]
    assert kinds == [Move, Work, Wait]
    assert found[place + 1].is_product


def test_a_collective_and_a_product_in_one_fusion_run_together():
    before = """
%both (a: bf16[8,8]) -> bf16[32,8] {
  %a = bf16[8,8] parameter(0)
  %g = bf16[32,8] all-gather(%a), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %c = bf16[32,8] convolution(%g, %a), dim_labels=bf_io->bf
}
"""
    found = program.events(module("ROOT %f = bf16[32,8] fusion(%p), calls=%both", before=before))
    assert [type(event) for event in found] == [Move, Work, Wait]
    assert found[1].is_product
    assert found[0].bytes == 3 * 8 * 8 * 2
    assert found[-1] == Wait(key="f")


def test_wrapped_asynchronous_collectives_and_their_updates():
    before = """
%wrapped (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8] parameter(0)
  ROOT %t = bf16[8,8] all-to-all(%a), replica_groups={{0,1,2,3}}, dimensions={0}
}
"""
    found = program.events(
        module(
            "%s = ((bf16[8,8]), bf16[8,8], u32[]) async-start(%p), calls=%wrapped",
            "%u = ((bf16[8,8]), bf16[8,8], u32[]) async-update(%s)",
            "ROOT %d = bf16[8,8] async-done(%u)",
            before=before,
        )
    )
    assert [type(event) for event in found] == [Move, Wait]
    assert (found[0].kind, found[0].bytes) == ("all-to-all", 8 * 8 * 2 * 3 // 4)


def test_collectives_of_one_chip_and_prefetches_take_no_time():
    found = program.events(
        module(
            "%g = f32[4] all-gather(%p), replica_groups={{0},{1}}, dimensions={0}",
            "%c = (f32[4], f32[4], u32[]) copy-start(%g)",
            "ROOT %d = f32[4] copy-done(%c)",
        )
    )
    assert found == []


def test_the_branch_that_moves_most_is_taken():
    before = """
%idle (a: f32[4]) -> f32[4] {
  ROOT %a = f32[4] parameter(0)
}

%busy (b: f32[4]) -> f32[4] {
  %b = f32[4] parameter(0)
  ROOT %r = f32[4] all-reduce(%b), replica_groups={{0,1}}, to_apply=%sum
}
"""
    for branches in (
        "branch_computations={%idle, %busy}",
        "true_computation=%busy, false_computation=%idle",
    ):
        found = program.events(
            module(f"ROOT %x = f32[4] conditional(%p, %p, %p), {branches}", before=before)
        )
        assert [(move.kind, move.bytes) for move in found] == [("all-reduce", 16)]
