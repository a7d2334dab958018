"""What each process of the measurement runs.

    python -m meshslice_jax.bench.wire.program OPTIONS RESULTS

OPTIONS is the JSON of `WireOptions`, RESULTS the file that process 0 writes, anew after
every rate, so that an end by force loses nothing that was measured.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from jax.sharding import Mesh

from meshslice_jax import algorithms, distributed
from meshslice_jax.bench.cases import PASSES, Pass, product
from meshslice_jax.bench.measure import times
from meshslice_jax.bench.operands import Data, random_matrices
from meshslice_jax.bench.wire import alone
from meshslice_jax.bench.wire.namespaces import shape
from meshslice_jax.bench.wire.options import WireOptions, parse_rates
from meshslice_jax.bench.wire.rates import Rate, find_rate
from meshslice_jax.bench.wire.record import Record, label, statistics_of, write_records
from meshslice_jax.bench.wire.variants import Variant, answers, prepared, variants
from meshslice_jax.mesh import make_mesh
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.timing import back_and_forth

#: Rounds by which a rate is chosen.
_TRIAL_ROUNDS = 3


def measure(options: WireOptions, mesh: Mesh) -> Iterator[list[Record]]:
    """Measures everything, the records of one pass at one rate at a time."""
    problem = product(options.m, options.n, options.k, "float32")
    data = random_matrices(problem)
    for dataflow in options.dataflows:
        for pass_ in options.passes:
            yield from _measure_pass(options, problem, data, dataflow, pass_, mesh)


def _measure_pass(
    options: WireOptions, problem: GemmProblem, data: Data, dataflow: str, pass_: str, mesh: Mesh
) -> Iterator[list[Record]]:
    shape(None)
    found, calls = variants(options, dataflow), {}
    expected = answers(problem, pass_, data)
    for index, variant in enumerate(found):
        distributed.step()
        calls[index] = prepared(variant, data, expected, mesh)
    sent_bytes, compute, communication = _alone(options, problem, dataflow, pass_, mesh)
    compute_s = _median_s(compute)

    def communication_s(bits_per_s: float) -> float:
        shape(bits_per_s)
        return _median_s(communication)

    calls |= {"compute": compute, "communication": communication}
    for kind, value in parse_rates(options.rates):
        rate = find_rate(
            kind,
            value,
            sent_bytes=sent_bytes,
            compute_s=compute_s,
            communication_s=communication_s,
        )
        shape(rate.bits_per_s)
        yield _records(options, found, calls, pass_, rate)
        shape(None)


def _median_s(call: Callable[[], object]) -> float:
    call()  # the first connects processes, and is not timed
    return times({"alone": call}, _TRIAL_ROUNDS)["alone"].median_s


def _alone(options: WireOptions, problem: GemmProblem, dataflow: str, pass_: str, mesh: Mesh):
    """What one chip sends, compute alone and communication alone; of a step, all passes'."""
    forward = GemmPlan(algorithm="collective", dataflow=dataflow)
    sent, products, moves = 0.0, [], []
    for name in PASSES if pass_ == "step" else (pass_,):
        case = Pass(layer="layer", name=name, forward=problem)
        own, contraction = case.problem(forward), case.contraction(forward)
        schedule = algorithms.schedule(own, case.plan(forward), options.shape)
        sent += schedule.bytes_along("row") + schedule.bytes_along("col")
        products.append(alone.compute_piece(own, contraction, options.shape))
        moves += alone.communication_pieces(own, contraction, options.shape)
    return sent, alone.compiled(products, mesh), alone.compiled(moves, mesh)


def _records(
    options: WireOptions, found: list[Variant], calls: dict, pass_: str, rate: Rate
) -> list[Record]:
    samples = times(calls, options.repeats, back_and_forth)
    rows, cols = options.mesh
    return [
        Record(
            algorithm=variant.name,
            dataflow=variant.forward.dataflow.value,
            slice_count=variant.forward.slice_count,
            pass_=pass_,
            gather_order=variant.forward.gather_order,
            block_size=variant.forward.block_size,
            rhs_layout=variant.forward.rhs_layout,
            mesh=f"{rows}x{cols}",
            m=options.m,
            n=options.n,
            k=options.k,
            rate_asked=rate.asked,
            rate_mbit=rate.bits_per_s / 1e6,
            **statistics_of(
                samples[index], samples[0], samples["compute"], samples["communication"]
            ),
        )
        for index, variant in enumerate(found)
    ]


def show(records: list[Record]) -> None:
    """Prints the records of one pass at one rate."""
    first = records[0]
    print(
        f"\n{first.dataflow} {first.pass_}, {first.rate_mbit:.0f} Mbit/s: compute "
        f"{first.compute_ms:.0f} ms, communication {first.communication_ms:.0f} ms, "
        f"{first.comm_over_compute:.2f} times; {first.repeats} rounds, measured"
    )
    for record in records:
        print(
            f"  {label(record):32s}{record.ms:8.0f} ms  {record.ratio_to_gspmd:5.2f} of gspmd "
            f"[{record.ratio_low:.2f}-{record.ratio_high:.2f}]  hidden {record.hidden:5.2f}"
        )


def main() -> None:
    """Joins the other processes and measures."""
    options = msgspec.json.decode(sys.argv[1], type=WireOptions)
    path, records = Path(sys.argv[2]), []
    distributed.initialize()
    for found in measure(options, make_mesh(options.shape)):
        records += found
        if distributed.is_first():
            show(found)
            write_records(path, records)


if __name__ == "__main__":
    main()
