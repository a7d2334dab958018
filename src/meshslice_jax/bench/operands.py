"""Operands of which every right product is the same to the bit, and the answer by NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from meshslice_jax.bench.cases import Pass
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import NATURAL, GemmProblem, accumulation_dtype


@dataclasses.dataclass(frozen=True)
class Data:
    """The matrices of a layer on the host, and copies placed on devices as needed."""

    host: dict[str, np.ndarray]
    placed: dict = dataclasses.field(default_factory=dict)

    def on(self, role: str, sharding) -> jax.Array:
        """The matrix of `role` under a sharding."""
        if (role, sharding) not in self.placed:
            host = self.host[role]  # the same on every process; each places its own shards
            self.placed[role, sharding] = jax.make_array_from_callback(
                host.shape, sharding, lambda index: host[index]
            )
        return self.placed[role, sharding]


def exact_limit(dtype: str) -> int:
    """Up to this absolute value every sum of integers is exact, in `dtype` and in float32."""
    dtype = jnp.dtype(accumulation_dtype(dtype) if jnp.issubdtype(dtype, jnp.integer) else dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return 2**24  # the reference is summed in float32
    return min(2 ** (jnp.finfo(dtype).nmant + 1), 2**24)


def random_matrices(problem: GemmProblem, seed: int = 0) -> Data:
    """lhs, rhs and a cotangent ("out") of integers in {-1, 0, 1}, the same for a seed.

    For 16-bit floats most entries are zero, so that no sum of absolute terms, in
    whatever order, leaves the integers that the dtype holds exactly.
    """
    limit, longest = exact_limit(problem.out_dtype), max(problem.m, problem.n, problem.k)
    # The number of terms of a sum is binomial: its mean plus eight deviations is the limit.
    terms = (np.sqrt(16 + limit) - 4) ** 2
    density = np.sqrt(min(terms / longest, 1.0))
    rng = np.random.default_rng(seed)

    def matrix(role: str) -> np.ndarray:
        rows, cols = (problem.extent(label) for label in NATURAL[role])
        values = rng.integers(-1, 2, (rows, cols), dtype=np.int8)
        if density < 1:
            values *= rng.random((rows, cols), dtype=np.float32) < density
        return values.astype(jnp.dtype(problem.lhs_dtype))

    return Data(host={role: matrix(role) for role in NATURAL})


def reference(case: Pass, data: Data) -> np.ndarray:
    """The pass's result by NumPy, in float32, rounded to the result's dtype.

    Raises:
      RuntimeError: a sum of absolute terms is too large to be exact.
    """
    plan = GemmPlan(algorithm="collective")
    roles = dict(zip(("lhs", "rhs"), case.operands(plan), strict=True))
    first, second, ((a, b), _) = case.contraction(plan).dimension_numbers()
    problem = case.problem(plan)
    left, right = (data.host[roles[name]].astype(np.float32) for name in (first, second))
    limit = exact_limit(problem.out_dtype)
    if problem.k > limit and (largest := np.tensordot(abs(left), abs(right), (a, b)).max()) > limit:
        raise RuntimeError(f"a sum of {largest:.0f} terms is not exact in {problem.out_dtype}")
    return np.tensordot(left, right, (a, b)).astype(jnp.dtype(problem.out_dtype))


def find_error(out: jax.Array, expected: np.ndarray) -> str | None:
    """What is wrong with an answer, or None; looks only at shards that this process has."""
    if out.shape != expected.shape or out.dtype != expected.dtype:
        return (
            f"the answer is {out.dtype}{list(out.shape)}, "
            f"expected {expected.dtype}{list(expected.shape)}"
        )
    for shard in out.addressable_shards:
        got, want = np.asarray(shard.data), expected[shard.index]
        if not np.array_equal(got, want):
            where = np.argwhere(got != want)
            at = tuple(int(i) for i in where[0])
            return (
                f"{len(where)} of {got.size} elements on {shard.device} are wrong; at {at} of "
                f"its shard {got[at]}, expected {want[at]}"
            )
    return None
