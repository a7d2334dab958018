"""Reading scheduled HLO text: what `Compiled.as_text()` prints for a TPU.

The text is a list of computations; in a scheduled module the instructions of each stand
in the order in which they run. This room turns it into records and knows nothing of
time: names, shapes, operands, and, as they are asked for, the attributes that matter
here (replica groups, permute pairs, called computations, loop bounds, cycle estimates).

    %all-gather-start.1 = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%param.3), ...
     name                  shape                            opcode          operands   attributes
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

#: Bytes of an element by HLO type; token and opaque values have none.
_TYPE_BYTES = {
    "pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1,
    "bf16": 2, "f16": 2, "s16": 2, "u16": 2,
    "f32": 4, "s32": 4, "u32": 4,
    "f64": 8, "s64": 8, "u64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; `arguments` and `attributes` are its text inside and after "(...)"."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return _NAME.findall(self.arguments)

    @property
    def bytes(self) -> int:
        """Bytes of the result, of all its arrays where it is a tuple."""
        return shape_bytes(self.shape)

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of how long it takes, if it made one."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def channel(self) -> int | None:
        """The channel of a collective."""
        found = re.search(r"channel_id=(\d+)", self.attributes)
        return int(found[1]) if found else None

    @property
    def op_name(self) -> str:
        """The name stack of the JAX operation that it came from, or ""."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def calls(self, *keys: str) -> list[str]:
        """Computations named by attributes `keys` (by default "calls" and "to_apply")."""
        names = "|".join(keys or ("calls", "to_apply"))
        return re.findall(rf"\b(?:{names})=%?([\w.\-]+)", self.attributes)

    @property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of partitions of a collective, in any of the three notations.

        Raises:
          ValueError: a notation that is none of them.
        """
        return _replica_groups(self.attributes)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source, target) of a collective-permute."""
        found = re.search(r"source_target_pairs=\{([\d,{}]*)\}", self.attributes)
        text = found[1] if found else ""
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text))


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name, and the name of the one that runs."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """All instructions of the computations that an instruction calls, nested ones too."""
        for name in instruction.calls():
            for inner in self.computations.get(name, ()):
                yield inner
                yield from self.inside(inner)


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays in the text of a shape."""
    total = 0
    for kind, dims in _ARRAY.findall(shape):
        total += _TYPE_BYTES.get(kind, 0) * math.prod(int(d) for d in dims.split(",") if d)
    return total


def elements(shape: str) -> list[str]:
    """The elements of a tuple's shape, or the shape itself."""
    if not shape.startswith("("):
        return [shape]
    found, depth, start = [], 0, 1
    for place, char in enumerate(shape):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or (char == ")" and depth == 0):
            found.append(shape[start:place].strip())
            start = place + 1
    return [element for element in found if element]


def parse(text: str) -> Module:
    """Reads the text of a module.

    Raises:
      ValueError: there is no entry computation in it.
    """
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        if current is None:
            head = _COMPUTATION.match(line) if "->" in line else None
            if head:
                current = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif found := _INSTRUCTION.match(line):
            current.append(_instruction(found[2], found[3], is_root=bool(found[1])))
    if entry is None:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
    return Module({name: tuple(body) for name, body in computations.items()}, entry)


def _instruction(name: str, text: str, *, is_root: bool) -> Instruction:
    text = _COMMENT.sub("", text)
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    start = rest.index("(")
    stop = _closing(rest, start)
    return Instruction(
        name=name,
        shape=shape,
        opcode=rest[:start],
        arguments=rest[start + 1 : stop],
        attributes=rest[stop + 1 :],
        is_root=is_root,
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"HLO line with a parenthesis that does not close: {text[:120]}")


def _replica_groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    if found := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", attributes):
        return tuple(
            tuple(int(i) for i in group.split(","))
            for group in re.findall(r"\{([\d,]+)\}", found[1])
        )
    if found := re.search(
        r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        dims = [int(i) for i in found[3].split(",")]
        order = [int(i) for i in found[4].split(",")] if found[4] else range(len(dims))
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(*order)
        return _rows(ids.reshape(int(found[1]), int(found[2])))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes):
        axes = re.findall(r"'([\w.]+)'=(\d+)", found[1])
        chosen = re.findall(r"'([\w.]+)'", found[2])
        ids = np.arange(math.prod(int(n) for _, n in axes)).reshape([int(n) for _, n in axes])
        inner = [i for i, (name, _) in enumerate(axes) if name in chosen]
        outer = [i for i in range(len(axes)) if i not in inner]
        size = math.prod(int(axes[i][1]) for i in inner)
        return _rows(ids.transpose(*outer, *inner).reshape(-1, size))
    raise ValueError(f"replica groups in a notation that is not known: {attributes[:200]}")


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(i) for i in row) for row in ids)
