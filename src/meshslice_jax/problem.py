"""One matrix product and its extents.

A product is three matrices over three indices: `lhs[m, k]`, `rhs[k, n]` and
`out[m, n]`, always in this natural form and always with global extents. What
is counted here (FLOPs, bytes) does not depend on any mesh, dataflow or
algorithm; those are the business of `dataflow` and `schedule`.
"""

import dataclasses
import functools
import numbers

import jax
import jax.numpy as jnp
import numpy as np

#: The three matrices of a product, by role.
ROLES = ("lhs", "rhs", "out")
#: Index labels of each role in natural storage order.
NATURAL = {"lhs": "mk", "rhs": "kn", "out": "mn"}


@functools.lru_cache(maxsize=256)
def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype` (a NumPy or JAX dtype name)."""
    return int(jnp.dtype(dtype).itemsize)


@functools.lru_cache(maxsize=256)
def dtype_fault(dtype: str | np.dtype) -> str | None:
    """Why no product has matrices of a dtype; None where it may.

    Compilers pack narrower elements, and XLA:CPU refuses most of what it is to do with them.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.number):
        return (
            f"dtype {dtype.name}, which is not a number; products are of numbers of 8 bits or more"
        )
    whole = jnp.issubdtype(dtype, jnp.integer)
    info = jnp.iinfo(dtype) if whole else jnp.finfo(dtype)
    if info.bits >= 8:
        return None
    wide = ("int8" if info.min < 0 else "uint8") if whole else "bfloat16"
    return (
        f"dtype {dtype.name}, and products are of numbers of 8 bits or more; cast it to {wide!r}, "
        "which holds it exactly"
    )


@functools.lru_cache(maxsize=256)
def accumulation_dtype(dtype: str | np.dtype) -> str:
    """The dtype in which local sums over slices and steps are kept.

    float32 for every float of at most 32 bits, int32 for integers of at most
    32 bits, otherwise the dtype itself (float64, int64, complex).
    """
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return "float64" if dtype == jnp.float64 else "float32"
    if jnp.issubdtype(dtype, jnp.signedinteger) and dtype.itemsize <= 4:
        return "int32"
    if jnp.issubdtype(dtype, jnp.unsignedinteger) and dtype.itemsize <= 4:
        return "uint32"
    return dtype.name


@functools.lru_cache(maxsize=256)
def promoted_dtype(*dtypes: str) -> str:
    """The dtype in which operands of `dtypes` meet, also where the user's JAX is strict.

    JAX promotes no 8-bit floats; with others they meet as bfloat16, which holds them exactly.
    """
    if len(set(dtypes)) > 1:
        dtypes = tuple("bfloat16" if name.startswith("float8") else name for name in dtypes)
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(functools.reduce(jnp.promote_types, dtypes)).name


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmProblem:
    """Global extents and dtypes of `out[m, n] = lhs[m, k] @ rhs[k, n]`."""

    m: int
    n: int
    k: int
    lhs_dtype: str = "float32"
    rhs_dtype: str = "float32"
    out_dtype: str = "float32"

    def __post_init__(self):
        for label in ("m", "n", "k"):
            extent = getattr(self, label)
            if not isinstance(extent, numbers.Integral) or extent < 0:
                raise ValueError(f"extent {label} must be a natural number, got {extent!r}")

    @classmethod
    def uniform(cls, m: int, n: int, k: int, dtype: str = "float32") -> "GemmProblem":
        """A product whose three matrices share one dtype."""
        return cls(m=m, n=n, k=k, lhs_dtype=dtype, rhs_dtype=dtype, out_dtype=dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations of the product: 2 m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def accum_dtype(self) -> str:
        """The dtype of local sums: the wider accumulation of output and inputs."""
        return accumulation_dtype(promoted_dtype(self.lhs_dtype, self.rhs_dtype, self.out_dtype))

    def extent(self, label: str) -> int:
        """The extent of index `label`, one of "m", "n", "k"."""
        return {"m": self.m, "n": self.n, "k": self.k}[label]

    def dtype(self, role: str) -> str:
        """The dtype name of the matrix in `role`."""
        return {"lhs": self.lhs_dtype, "rhs": self.rhs_dtype, "out": self.out_dtype}[role]

    def bytes(self, role: str) -> int:
        """Bytes of the whole (global) matrix in `role`."""
        rows, cols = (self.extent(label) for label in NATURAL[role])
        return rows * cols * itemsize(self.dtype(role))
