"""What a product should hold in a TPU's memory, beside what the compiler says it holds.

A `Schedule` counts what a plain program holds: every partial result in the accumulation
dtype, two of each. The TPU compiler does better and worse (jax 0.10.2, libtpu 0.0.52):

- casts and sums run inside products: a partial result is held as it travels, an
  accumulator once, and none where the output is written by one product;
- the on-chip memory takes gathered slices of output-stationary products, as far as they
  fit; in the other dataflows it takes the stationary operand, which is in HBM anyway;
- beside the slice in use one is gathered, in a ring of products two;
- scattered slices wait to be joined; exchanged ones all arrive before they are summed;
- what moves is copied before: turned where its streamed index is the minor one, then cut.

`peak_bytes` counts that. For GPT-3's products on 16 chips in their fastest forms it is within
20 % of what the compiler says (docs/compiled_schedules.md, a test of six products), but for
two of the small layer `out` (0.63 and 1.25 of it).
"""

from meshslice_jax import algorithms
from meshslice_jax.algorithms.base import local_product, shard_bytes, split_movers
from meshslice_jax.algorithms.meshslice import units
from meshslice_jax.compiled.jobs import ProductJob
from meshslice_jax.mesh import MeshShape
from meshslice_jax.problem import itemsize

#: Bytes of on-chip memory that the compiler gives to arrays.
ON_CHIP_BYTES = 128 * 2**20
#: The algorithms whose programs are known well enough.
KNOWN = ("meshslice", "collective")


def peak_bytes(job: ProductJob) -> int | None:
    """Bytes of HBM that one chip should hold at most, arguments and results included.

    None for algorithms that are not `KNOWN`, and for XLA's own products.
    """
    if job.gspmd or job.plan.algorithm not in KNOWN:
        return None
    shape = algorithms.view(job.plan, MeshShape(*job.mesh_shape))
    schedule = algorithms.schedule(job.problem, job.plan, shape)
    held = schedule.argument_bytes + schedule.output_bytes
    return held + (_whole if job.plan.slice_count == 1 else _sliced)(job, shape)


def _whole(job: ProductJob, shape: MeshShape) -> int:
    problem, plan = job.problem, job.plan
    inputs, output = split_movers(plan)
    gathered = [
        shape.size(one.axis) * shard_bytes(problem, plan, one.role, shape) for one in inputs
    ]
    if output is None:
        return sum(gathered) - _on_chip(gathered)
    return sum(gathered) + shape.size(output.axis) * shard_bytes(problem, plan, "out", shape)


def _sliced(job: ProductJob, shape: MeshShape) -> int:
    problem, plan = job.problem, job.plan
    inputs, output = split_movers(plan)
    widths = units(plan)[1]
    share = max(widths) / sum(widths)
    shards = {role: shard_bytes(problem, plan, role, shape) for role in ("lhs", "rhs", "out")}
    slices = [share * shape.size(one.axis) * shards[one.role] for one in inputs]
    # What is cut is copied, and turned before where its streamed index is the minor one.
    copies = sum(
        shards[mover.role] * (1 + mover.dim)
        for mover in job.contraction.movers
        if mover.is_input and mover.role != job.kept
    )
    if output is None:
        product = local_product(problem, plan, shape)
        total = product.m * product.n * itemsize(problem.accum_dtype)
        ahead = [2 * size for size in slices]
        return int(total + sum(ahead) - _on_chip(ahead) + copies)
    partial = share * shape.size(output.axis) * shards["out"]
    if plan.reduce_scatter == "native":
        return int(2 * sum(slices) + partial + shards["out"] + copies)
    if plan.reduce_scatter == "all_to_all":
        return int(2 * sum(slices) + shape.size(output.axis) * shards["out"] + copies)
    return int(3 * sum(slices) + shards["out"] + copies)


def _on_chip(sizes: list[float]) -> float:
    """Bytes of the buffers that find room on the chip, small ones first."""
    taken = 0.0
    for size in sorted(sizes):
        if taken + size <= ON_CHIP_BYTES:
            taken += size
    return taken
