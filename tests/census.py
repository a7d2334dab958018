"""Counts what a traced program does: collectives, bytes, FLOPs, loop lengths included."""

import collections
import math

import jax
import jax.extend.core as jex


def census(function, *arguments):
    """(ops, bytes, flops) of one chip in the traced `function`.

    ops and bytes are keyed by (kind, axes), axes being the mesh axes along which data
    really moves; bytes are those that one chip sends, averaged over chips.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    found = {"ops": collections.Counter(), "bytes": collections.Counter(), "flops": 0}
    _walk(closed.jaxpr, 1, None, found)
    sent = {key: round(count, 6) for key, count in found["bytes"].items()}
    return dict(found["ops"]), sent, found["flops"]


def _walk(jaxpr, repeats, mesh, found):
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        inner = repeats * params["length"] if name == "scan" else repeats
        here = params["mesh"] if name == "shard_map" else mesh
        assert name != "while", "a loop of unknown length"
        _count(eqn, name, repeats, here, found)
        for value in params.values():
            for sub in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(sub, jex.ClosedJaxpr):
                    _walk(sub.jaxpr, inner, here, found)
                elif isinstance(sub, jex.Jaxpr):
                    _walk(sub, inner, here, found)


def _count(eqn, name, repeats, mesh, found):
    kinds = {
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "all_to_all": "all_to_all",
        "ppermute": "permute",
    }
    if name == "dot_general":
        ((contract, _), (batch, _)) = eqn.params["dimension_numbers"]
        assert not batch
        shape = eqn.invars[0].aval.shape
        found["flops"] += (
            repeats
            * 2
            * math.prod(eqn.outvars[0].aval.shape)
            * math.prod(shape[d] for d in contract)
        )
    if name not in kinds and ("psum" in name or "all_" in name or name == "pbroadcast"):
        raise AssertionError(f"unexpected collective {name}")
    if name not in kinds:
        return
    operand = eqn.invars[0].aval
    size = operand.size * operand.dtype.itemsize
    names = eqn.params["axis_name"]
    names = (names,) if isinstance(names, str) else tuple(names)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    ring = math.prod(sizes[n] for n in names)
    if name == "all_gather":
        sent = (ring - 1) * size
    elif name == "reduce_scatter":
        sent = (ring - 1) * size // ring
    elif name == "all_to_all":
        groups = eqn.params["axis_index_groups"]
        group = ring if groups is None else len(groups[0])
        sent = (group - 1) * size // group
    else:
        pairs = eqn.params["perm"]
        assert len({s for s, _ in pairs}) == len({t for _, t in pairs}) == len(pairs)
        sent = len(pairs) * size / ring
        names = _moving(names, [sizes[n] for n in names], pairs)
    key = kinds[name], tuple(n for n in names if sizes[n] > 1)
    found["ops"][key] += repeats
    found["bytes"][key] += repeats * sent


def _moving(names, sizes, pairs):
    """The axes whose coordinate changes in some pair, or all if it is a shift of a whole ring."""
    if len({(target - source) % math.prod(sizes) for source, target in pairs}) == 1:
        return names

    def coordinates(index):
        place = []
        for size in reversed(sizes):
            index, coordinate = divmod(index, size)
            place.append(coordinate)
        return place[::-1]

    changed = set()
    for source, target in pairs:
        before, after = coordinates(source), coordinates(target)
        changed |= {n for n, a, b in zip(names, before, after, strict=True) if a != b}
    return tuple(n for n in names if n in changed)
