"""Data parallelism beside the 2D mesh: replicas that share the batch.

Each of D replicas runs the block on its own mesh with batch / D sequences. Weights are held
once per replica, and after the backward pass their gradients are summed over the replicas:
an all-reduce, which is a reduce-scatter and an all-gather of a chip's gradient shards along
an axis of D chips. That axis is a ring or a line as the profile says for its length, and so
are the two axes of the smaller mesh: cutting a torus may cost them their rings. Nothing
hides the all-reduce here. (It could run behind the next block's backward pass.)
"""

from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import divisors
from meshslice_jax.problem import GemmProblem


def degrees(num_chips: int, batch: int) -> list[int]:
    """Numbers of replicas that share both chips and batch evenly, ascending."""
    return [degree for degree in divisors(num_chips) if batch % degree == 0]


def all_reduce_s(
    problems: dict[str, GemmProblem], replicas: int, num_chips: int, hardware: HardwareSpec
) -> float:
    """Seconds of summing one block's weight gradients over the replicas.

    Args:
      problems: the products of the block.
      replicas: how many share the batch.
      num_chips: the chips of one replica.
      hardware: rates and latencies.
    """
    if replicas == 1:
        return 0.0
    shard_bytes = sum(problem.bytes("rhs") for problem in problems.values()) / num_chips
    rate = hardware.axis_bytes_per_s(replicas, overlapped=False)
    sent_s = (replicas - 1) / replicas * shard_bytes / rate
    hops_s = (replicas - 1) * (hardware.gather_hop_s + hardware.scatter_hop_s)
    return hardware.gather_launch_s + hardware.scatter_launch_s + hops_s + 2 * sent_s
