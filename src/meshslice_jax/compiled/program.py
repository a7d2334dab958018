"""A scheduled module as the sequence of things that take time.

    Work   the core is busy: a product, or anything else ("copies": transposes, slices,
           adds, concatenations)
    Move   a collective starts; where it is synchronous the core waits for it at once
    Wait   the core waits for a collective that was started before

Loops are run as often as they run, calls are entered, and of a conditional the branch
that moves most. The TPU compiler writes collectives in several ways, which all end here:

    all-gather                                    synchronous
    all-gather-start ... all-gather-done          asynchronous
    async-start ... async-done                    the same, wrapped in a computation
    fusion of an all-reduce and a dynamic-slice   its reduce-scatter, synchronous
    fusion around AsyncCollectiveStart, products
      that carry the collective on, fusion around
      AsyncCollectiveDone                         v5e: asynchronous, fused into products
    fusion of a collective and a product          both at once
"""

import dataclasses
from collections.abc import Iterator

from meshslice_jax.compiled.hlo import Instruction, Module, elements, shape_bytes
from meshslice_jax.compiled.loop import trip_count

#: Collectives by HLO name.
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
#: What takes no time of the core: names for values, and copies between memories that the
#: chip's DMA engines make while it computes (they are prefetches, timed by the compiler).
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast partition-id replica-id after-all "
    "copy-start copy-done slice-start slice-done async-update opt-barrier "
    "optimization-barrier add-dependency".split()
)
#: Results below this many bytes without an estimate are scalars on their way to an address.
_SCALAR_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The core is busy.

    Attributes:
      name: the instruction.
      cycles: the compiler's estimate, or None.
      bytes: HBM traffic of operands and result, for where there is no estimate.
      is_product: whether it multiplies matrices.
      label: the JAX operation.
    """

    name: str
    cycles: int | None
    bytes: int
    is_product: bool
    label: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """A collective starts.

    Attributes:
      key: what its Wait names; None where the core waits at once.
      kind: one of KINDS; an all-reduce of which only a shard is kept is a reduce-scatter.
      bytes: what one chip sends by a ring (a permute: what it sends).
      groups: the partitions that take part together; empty for a permute.
      pairs: (source, target) of a permute.
      label: the JAX operation.
    """

    key: str | None
    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    label: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """The core needs what a Move brings."""

    key: str


def events(module: Module) -> list[Work | Move | Wait]:
    """What takes time in a scheduled module, in order.

    Raises:
      ValueError: a loop whose count cannot be read, or a collective in an unknown form.
    """
    return list(_run(module, module.entry, {}, ""))


def _run(module: Module, name: str, fused: dict, prefix: str) -> Iterator[Work | Move | Wait]:
    """The events of one computation; `fused` holds channels that are carried by products."""
    body = module.computations[name]
    around = {one.name: one for one in body}
    pending = {}
    for one in body:
        if one.opcode == "while":
            for turn in range(trip_count(one, module, around)):
                for inner in one.calls("body"):
                    yield from _run(module, inner, fused, f"{prefix}{one.name}.{turn}/")
        elif one.opcode == "call":
            for inner in one.calls():
                yield from _run(module, inner, fused, f"{prefix}{one.name}/")
        elif one.opcode == "conditional":
            yield from _run(module, _busiest(module, one), fused, f"{prefix}{one.name}/")
        elif one.opcode.endswith("-done") and one.opcode not in _FREE:
            started = pending.pop(one.operands[0], None)
            if started is not None:
                yield Wait(key=started)
        elif one.opcode == "async-update":
            if one.operands[0] in pending:
                pending[one.name] = pending.pop(one.operands[0])
        else:
            yield from _instruction(module, one, around, pending, fused, prefix)


def _instruction(module, one: Instruction, around, pending, fused, prefix):
    moving = _collective(module, one)
    if moving is None or _group_of_one(moving):
        if work := _work(module, one, around):
            yield work
        return
    targets = {
        i.attributes.split('custom_call_target="')[-1].split('"')[0]
        for i in module.inside(one)
        if i.opcode == "custom-call"
    }
    key = prefix + one.name
    if one.opcode.endswith("-start"):
        pending[one.name] = key
        yield _move(module, one, moving, key)
    elif "AsyncCollectiveStart" in targets:
        fused[moving.channel] = key
        yield _move(module, one, moving, key)
    elif "AsyncCollectiveDone" in targets and moving.channel in fused:
        yield Wait(key=fused.pop(moving.channel))
    elif moving.channel in fused:  # a product that carries a collective on
        if work := _work(module, one, around):
            yield work
    elif one.opcode == "fusion" and _multiplies(module, one):
        yield _move(module, one, moving, key)
        yield _work(module, one, around)
        yield Wait(key=key)
    else:
        yield _move(module, one, moving, None)


def _kind(opcode: str) -> str | None:
    if opcode.endswith("-done"):
        return None
    return next((kind for kind in KINDS if opcode in (kind, f"{kind}-start")), None)


def _collective(module: Module, one: Instruction) -> Instruction | None:
    """The collective that an instruction is or calls."""
    if _kind(one.opcode):
        return one
    if one.opcode not in ("fusion", "async-start", "custom-call"):
        return None
    return next((inner for inner in module.inside(one) if _kind(inner.opcode)), None)


def _group_of_one(one: Instruction) -> bool:
    return _kind(one.opcode) != "collective-permute" and len(one.replica_groups[0]) == 1


def _multiplies(module: Module, one: Instruction) -> bool:
    ops = ("convolution", "dot")
    return one.opcode in ops or any(inner.opcode in ops for inner in module.inside(one))


def _move(module: Module, outer: Instruction, one: Instruction, key: str | None) -> Move:
    """A collective as its ring would carry it."""
    kind = _kind(one.opcode)
    label = one.op_name or outer.op_name
    if kind == "collective-permute":
        sent = elements(one.shape)
        size = shape_bytes(sent[1] if one.opcode.endswith("-start") else one.shape)
        return Move(key=key, kind=kind, bytes=size, pairs=one.pairs, label=label)
    groups = one.replica_groups
    ring = len(groups[0])
    result = elements(one.shape)[-1] if one.opcode.endswith("-start") else one.shape
    size = shape_bytes(result)
    if kind == "all-gather" or kind == "all-to-all":
        sent = size * (ring - 1) // ring
    elif kind == "reduce-scatter":
        sent = size * (ring - 1)
    elif outer is not one and any(i.opcode == "dynamic-slice" for i in module.inside(outer)):
        kind, sent = "reduce-scatter", size * (ring - 1) // ring
    else:
        sent = 2 * size * (ring - 1) // ring
    return Move(key=key, kind=kind, bytes=sent, groups=groups, label=label)


def _work(module: Module, one: Instruction, around: dict[str, Instruction]) -> Work | None:
    if one.opcode in _FREE or 'custom_call_target="ConcatBitcast"' in one.attributes:
        return None
    cycles, multiplies = one.cycles, _multiplies(module, one)
    if cycles is None and one.bytes < _SCALAR_BYTES and not multiplies:
        return None
    read = sum(around[name].bytes for name in one.operands if name in around)
    return Work(
        name=one.name,
        cycles=cycles,
        bytes=one.bytes + read,
        is_product=multiplies,
        label=one.op_name,
    )


def _busiest(module: Module, one: Instruction) -> str:
    """The branch of a conditional with most collectives."""
    listed = one.attributes.split("branch_computations={")
    if len(listed) > 1:
        names = [name.strip().lstrip("%") for name in listed[1].split("}")[0].split(",")]
    else:
        names = one.calls("true_computation", "false_computation")
    return max(
        names, key=lambda name: sum(bool(_kind(i.opcode)) for i in module.computations[name])
    )
