"""How often a compiled loop runs, read from its condition, its body and its start value.

JAX's `fori_loop` arrives as `while` over a tuple that holds a counter. The condition
compares it with a bound, the body adds a step, the tuple outside has the start; all
three are constants, perhaps behind copies. A loop of another kind is an error, never a
guess: a wrong count would scale every number that is read from the schedule.
"""

import re

from meshslice_jax.compiled.hlo import Instruction, Module

_TRANSPARENT = ("copy", "bitcast", "convert", "copy-done", "copy-start")


def trip_count(loop: Instruction, module: Module, around: dict[str, Instruction]) -> int:
    """Iterations of a `while`.

    Args:
      loop: the instruction.
      module: its module.
      around: the instructions of the computation that it stands in, by name.

    Raises:
      ValueError: it does not count from a constant to a constant.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    (condition,), (body,) = loop.calls("condition"), loop.calls("body")
    state = around[loop.operands[0]]
    test = _root(module, condition)
    inside = {one.name: one for one in module.computations[condition]}
    if test.opcode == "fusion":  # the comparison alone, its operands as parameters
        comparison = next((i for i in module.inside(test) if i.opcode == "compare"), None)
    else:
        comparison = test if test.opcode == "compare" else None
    if comparison is None or "direction=LT" not in comparison.attributes:
        raise _unreadable(loop, "its condition is not a comparison of a counter with a bound")
    places = [_place(name, inside) for name in test.operands]
    counters = [p for p in places if p is not None and _step(module, body, p) is not None]
    if len(counters) != 1:
        raise _unreadable(loop, "no counter is compared with a bound")
    (counter,) = counters
    bounds = [
        _constant(name, inside) if place is None else _initial(state, place, around)
        for name, place in zip(test.operands, places, strict=True)
        if place != counter
    ]
    if comparison is not test and not bounds:
        inner = {one.name: one for one in module.inside(test)}
        bounds = [_constant(name, inner) for name in comparison.operands]
    start, step = _initial(state, counter, around), _step(module, body, counter)
    bounds = [bound for bound in bounds if bound is not None]
    if start is None or len(bounds) != 1:
        raise _unreadable(loop, "its start or bound is not a constant")
    return max(0, -(-(bounds[0] - start) // step))


def _unreadable(loop: Instruction, reason: str) -> ValueError:
    return ValueError(
        f"cannot tell how often the compiled loop {loop.name!r} runs: {reason}; "
        "compile with loop='unrolled'"
    )


def _root(module: Module, computation: str) -> Instruction:
    return next(one for one in module.computations[computation] if one.is_root)


def _constant(name: str, scope: dict[str, Instruction]) -> int | None:
    one = scope.get(name)
    while one is not None and one.opcode in _TRANSPARENT:
        one = scope.get(one.operands[0]) if one.operands else None
    if one is None or one.opcode != "constant" or not re.fullmatch(r"-?\d+", one.arguments):
        return None
    return int(one.arguments)


def _place(name: str, scope: dict[str, Instruction]) -> int | None:
    """Which element of the loop's state a value is, or None."""
    one = scope.get(name)
    while one is not None and one.opcode in _TRANSPARENT:
        one = scope.get(one.operands[0]) if one.operands else None
    if one is None or one.opcode != "get-tuple-element":
        return None
    return int(re.search(r"index=(\d+)", one.attributes)[1])


def _initial(state: Instruction, place: int, around: dict[str, Instruction]) -> int | None:
    return _constant(state.operands[place], around) if state.opcode == "tuple" else None


def _step(module: Module, body: str, place: int) -> int | None:
    """What the body adds to an element of its state, or None."""
    scope = {one.name: one for one in module.computations[body]}
    root = _root(module, body)
    if root.opcode != "tuple" or place >= len(root.operands):
        return None
    one = scope.get(root.operands[place])
    while one is not None and one.opcode in _TRANSPARENT:
        one = scope.get(one.operands[0])
    if one is None or one.opcode != "add":
        return None
    steps = [_constant(name, scope) for name in one.operands]
    found = [step for step in steps if step is not None and step > 0]
    return found[0] if len(found) == 1 else None
