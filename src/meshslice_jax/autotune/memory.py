"""What a chip must hold: the two meanings of a memory limit.

"fc_block", one training step of the FC layers of one block, in bytes of one chip:

    sum over layers (lhs + 2 rhs)                          inputs kept for dW, weights, dW
    + the most that any one product adds to that:
        forward    out + temporaries
        grad_lhs   ct + dlhs + temporaries                 ct: the cotangent of out
        grad_rhs   ct + temporaries                        drhs is counted above

"training", the whole model:

    weights + gradients + two float32 AdamW moments        of all blocks and the embeddings
    + the input of every block                             each block is rematerialised
    + sum over layers lhs + the most that any product adds as above, for the block at work

Temporaries (gathered slices, partial results) are the schedule's. All shards are those of
one replica: data parallelism shares none of them. Norms, attention's own activations and
logits are not counted. (Loshchilov and Hutter 2019 for AdamW's two moments.)
"""

from meshslice_jax.models import ModelShape
from meshslice_jax.problem import GemmProblem, itemsize
from meshslice_jax.schedule import Schedule

#: What a memory limit can count.
MEMORY_KINDS = ("fc_block", "training")
_ADAMW_BYTES = 2 * 4  # two float32 moments of each weight


def resident_bytes(
    kind: str, model: ModelShape, problems: dict[str, GemmProblem], num_chips: int
) -> int:
    """Bytes of one chip that are there whatever product runs.

    Args:
      kind: "fc_block" or "training".
      model: the model.
      problems: the products of one block in one replica.
      num_chips: the chips of one replica.
    """
    inputs = sum(problem.bytes("lhs") for problem in problems.values())
    if kind == "fc_block":
        weights = sum(problem.bytes("rhs") for problem in problems.values())
        return (inputs + 2 * weights) // num_chips
    first = next(iter(problems.values()))
    per_weight = 2 * itemsize(first.rhs_dtype) + _ADAMW_BYTES
    block_inputs = model.layers * first.bytes("lhs")
    return -(-(model.weights * per_weight + block_inputs + inputs) // num_chips)


def shard_extra_bytes(name: str, problem: GemmProblem, num_chips: int) -> int:
    """Shards that the pass `name` of a layer adds to what is resident.

    Args:
      name: "forward", "grad_lhs" or "grad_rhs".
      problem: the layer's forward product.
      num_chips: the chips of one replica.
    """
    out, lhs = problem.bytes("out") // num_chips, problem.bytes("lhs") // num_chips
    return {"forward": out, "grad_lhs": out + lhs, "grad_rhs": out}[name]


def extra_bytes(name: str, problem: GemmProblem, schedule: Schedule, num_chips: int) -> int:
    """All that the pass `name` of a layer adds to what is resident."""
    return shard_extra_bytes(name, problem, num_chips) + schedule.temporary_bytes
