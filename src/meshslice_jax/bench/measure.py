"""Compile, check, then time: one case after the other.

Of several processes each places, runs and checks its own shards; what then happens (is the
answer right, how long did it take) is decided from what all of them say.
"""

import functools
import json
import time
from collections.abc import Callable, Iterator

import jax
import msgspec
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from meshslice_jax import compat, distributed, gemm
from meshslice_jax.bench.candidates import Candidate, candidates
from meshslice_jax.bench.cases import Options, Pass, Row, cases
from meshslice_jax.bench.operands import Data, find_error, random_matrices, reference
from meshslice_jax.problem import NATURAL
from meshslice_jax.timing import Name, Samples, interleaved, rotated, slowest


def program(case: Pass, candidate: Candidate, data: Data, mesh: Mesh):
    """The jitted function of a candidate and its operands, placed.

    Returns:
      (jitted function, operands).
    """
    forward = candidate.forward
    problem, contraction = case.problem(forward), case.contraction(forward)
    if candidate.base is None:
        where = dict.fromkeys(NATURAL, SingleDeviceSharding(mesh.devices.flat[0]))
    else:
        specs = gemm.placements(forward)
        where = {role: NamedSharding(mesh, spec) for role, spec in zip(NATURAL, specs, strict=True)}
    operands = [data.on(role, where[role]) for role in case.operands(forward)]
    if candidate.plan is not None:
        planned = functools.partial(
            gemm.contract,
            plan=candidate.plan,
            contraction=contraction,
            mesh=mesh,
            out_dtype=problem.out_dtype,
        )
        return jax.jit(planned), operands
    first, _, numbers = contraction.dimension_numbers()
    product = functools.partial(
        lax.dot_general, dimension_numbers=numbers, preferred_element_type=problem.out_dtype
    )
    ordered = operands if first == "lhs" else operands[::-1]
    return jax.jit(product, out_shardings=where[case.result]), ordered


def prepare(case: Pass, candidate: Candidate, data: Data, mesh: Mesh, expected: np.ndarray):
    """Compiles, warms up and checks a candidate.

    Returns:
      (row, call): call is None where there is nothing to time.
    """
    if candidate.row.status == "skipped":
        return candidate.row, None
    try:
        function, operands = program(case, candidate, data, mesh)
        begin = time.perf_counter()
        compiled = function.lower(*operands).compile()
        compile_s = time.perf_counter() - begin
        error = first_error(find_error(jax.block_until_ready(compiled(*operands)), expected))
    except jax.errors.JaxRuntimeError as failure:  # the device's, such as out of memory
        if compat.num_processes() > 1:
            raise  # the other processes may still wait for this one
        reason = str(failure).strip().splitlines()[0]
        return msgspec.structs.replace(candidate.row, status="failed", reason=reason), None
    row = msgspec.structs.replace(candidate.row, compile_s=compile_s)
    if error is not None:
        wrong = msgspec.structs.replace(row, check="FAILED", status="failed", reason=error)
        return wrong, None
    call = functools.partial(compiled, *operands)
    return msgspec.structs.replace(row, check="pass"), call


def first_error(error: str | None) -> str | None:
    """The first error of any process; all must ask."""
    found = distributed.gather_text(error or "")
    if len(found) == 1:
        return error
    return next((f"process {i}: {text}" for i, text in enumerate(found) if text), None)


def _together() -> None:
    distributed.step()
    distributed.barrier()


def times(
    calls: dict[Name, Callable[[], object]],
    repeats: int,
    order: Callable[[list[Name], int], list[Name]] = rotated,
) -> dict[Name, Samples]:
    """Times of all calls, each that of the slowest process; `order` as for `interleaved`."""
    own = interleaved(calls, repeats, ready=_together, order=order)
    texts = distributed.gather_text(json.dumps([samples.seconds for samples in own.values()]))
    found = zip(*(map(Samples, map(tuple, json.loads(text))) for text in texts), strict=True)
    return dict(zip(own, map(slowest, found), strict=True))


def _timed(row: Row, samples: Samples, gspmd: Samples | None, dense: Samples | None) -> Row:
    return msgspec.structs.replace(
        row,
        median_ms=samples.median_s * 1e3,
        min_ms=samples.min_s * 1e3,
        max_ms=samples.max_s * 1e3,
        repeats=len(samples.seconds),
        ratio_to_gspmd=samples.ratio_to(gspmd) if gspmd else None,
        ratio_to_dense=samples.ratio_to(dense) if dense else None,
    )


def measure(
    case: Pass,
    found: list[Candidate],
    data: Data,
    mesh: Mesh,
    repeats: int,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Prepares all candidates of a case, then times those whose answer is right.

    Args:
      case: the pass.
      found: its candidates, in the order of the result.
      data: the layer's matrices.
      mesh: the mesh.
      repeats: rounds of timing.
      on_step: told what comes next, once a candidate and once for the timing.

    Returns:
      A row for each candidate.
    """
    expected = reference(case, data)
    rows, calls = [], {}
    for index, candidate in enumerate(found):
        on_step(f"{case.layer} {case.name} {candidate.row.algorithm}")
        distributed.step()
        row, call = prepare(case, candidate, data, mesh, expected)
        rows.append(row)
        if call is not None:
            calls[index] = call
    on_step(f"{case.layer} {case.name} timing")
    samples = times(calls, repeats)
    gspmd = {
        candidate.base: samples.get(index)
        for index, candidate in enumerate(found)
        if candidate.row.algorithm == "gspmd"
    }
    for index, candidate in enumerate(found):
        if index in samples:
            base = gspmd.get(candidate.base)
            rows[index] = _timed(rows[index], samples[index], base, samples.get(0))
    return rows


def run(
    options: Options, mesh: Mesh, on_step: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Pass, list[Candidate], list[Row]]]:
    """Measures every case, one after the other.

    Yields:
      (case, candidates, rows): one row for each candidate.
    """
    layer, data = None, None
    for case in cases(options):
        if case.layer != layer:
            layer, data = case.layer, random_matrices(case.forward)
        found = candidates(options, case)
        yield case, found, measure(case, found, data, mesh, options.repeats, on_step)
