"""`dot_general`: a plan as a drop-in for `jax.lax.dot_general`.

Layers that others wrote take a product as an argument: `nn.Dense(dot_general=)`,
`nnx.Linear(dot_general=)`, the attentions' `qkv_dot_general` and `out_dot_general`,
`jnp.einsum(_dot_general=)`. They pass activations of any rank, weights with several feature
dimensions, and contract several axes at once. All of these are one matrix product:

    lhs (batch, seq, heads, dim)  x  rhs (heads, dim, hidden)     contracted over heads, dim
        [m = batch seq, k = heads dim]  @  [k = heads dim, n = hidden]  ->  [m, n]
    out (batch, seq, hidden)

so what has to divide is the flattened index, not each dimension. This is the only room
that flattens or pads; the product itself is `gemm.matmul`.

What cannot run on the plan raises. Whoever would rather run it anyway says so when the
product is made: `pad=True` fills up extents that do not divide, `on_unsupported="dense"`
runs `lax.dot_general` and records the reason (see `product_log`).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshslice_jax import algorithms, gemm, product_log
from meshslice_jax.flatten import as_matrix, from_matrix
from meshslice_jax.layout import StoredRhs
from meshslice_jax.padding import padded_extents
from meshslice_jax.plan import GemmPlan, LayerPlan, as_layer_plan
from meshslice_jax.problem import GemmProblem, dtype_fault
from meshslice_jax.site import Site, find_site


def dot_general(
    plan: GemmPlan | LayerPlan,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    pad: bool = False,
    on_unsupported: str = "error",
) -> "DotGeneral":
    """A callable with `lax.dot_general`'s signature, shapes and dtypes that runs a plan.

    Args:
      plan: how the product runs. A GemmPlan derives the plans of its gradients.
      mesh: the mesh; None reads the mesh in context at each call.
      pad: whether extents that the plan does not cut evenly are filled up with zeros, to
        the smallest that it does, and the result trimmed. The padding takes part in
        nothing else: a NaN or inf of the operands does not spread through it.
      on_unsupported: "error" raises where the plan cannot run the product; "dense" runs
        `lax.dot_general` there, which is recorded with its reason.

    Returns:
      A frozen value, equal and with equal hash for equal arguments. Reverse-mode
      differentiable to any order.

    Raises:
      ValueError: on_unsupported is neither of the two, or the plan can run no product: an
        unknown algorithm, one without this forward dataflow, options that it does not read.
      TypeError: plan is no plan.
    """
    return DotGeneral(
        plan=as_layer_plan(plan), mesh=mesh, pad=bool(pad), on_unsupported=on_unsupported
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotGeneral:
    """What `dot_general` returns; its fields are that function's arguments."""

    plan: LayerPlan
    mesh: Mesh | AbstractMesh | None = None
    pad: bool = False
    on_unsupported: str = "error"

    def __post_init__(self):
        if self.on_unsupported not in ("error", "dense"):
            raise ValueError(
                f'on_unsupported={self.on_unsupported!r} is neither "error" nor "dense"'
            )
        algorithms.check_plan(self.plan)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers,
        precision=None,
        preferred_element_type=None,
        *,
        out_sharding: NamedSharding | PartitionSpec | None = None,
    ) -> jax.Array:
        """The product of `lax.dot_general`, as planned.

        Args:
          lhs: an array of any rank, placed in any way.
          rhs: likewise.
          dimension_numbers: ((lhs contracted, rhs contracted), (lhs batch, rhs batch)).
          precision: as for `lax.dot_general`.
          preferred_element_type: dtype of the result, as for `lax.dot_general`.
          out_sharding: where the result is to lie; None leaves it where the plan has it.

        Raises:
          TypeError, ValueError: what `lax.dot_general` raises for these operands.
          NotImplementedError: batch dimensions, an out_sharding that cannot be had here.
          ValueError: no mesh, or extents that the plan does not cut evenly.
        """
        if isinstance(lhs, StoredRhs) or isinstance(rhs, StoredRhs):
            raise TypeError(
                "dot_general takes arrays; ms.matmul takes stored weights, and ms.from_layout "
                "makes arrays of them"
            )
        lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
        dense = functools.partial(
            lax.dot_general,
            dimension_numbers=dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
        expected = jax.eval_shape(
            dense, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs))
        )
        seen = {
            "lhs_shape": lhs.shape,
            "rhs_shape": rhs.shape,
            "out_shape": expected.shape,
            "rhs_contracted": tuple(int(d) % rhs.ndim for d in dimension_numbers[0][1]),
        }
        found = self._product(lhs, rhs, dimension_numbers, expected)
        if isinstance(found, str):
            product_log.record(product_log.Product(**seen, reason=found))
            with jax.named_scope(product_log.DENSE):
                return dense(lhs, rhs, out_sharding=out_sharding)
        product_log.record(
            product_log.Product(
                **seen,
                problem=found.padded,
                plan=self.plan,
                mesh_shape=found.site.shape(self.plan.forward),
                mesh=self.mesh or found.site.mesh or jax.sharding.get_abstract_mesh(),
                replicas=found.site.replicas(self.plan.forward),
                trimmed=found.extents if found.padded_extents != found.extents else None,
            )
        )
        out = found.run(lhs, rhs, self, precision)
        return out if out_sharding is None else _placed(out, out_sharding, found.site)

    def _product(self, lhs, rhs, dimension_numbers, expected) -> "_Matrices | str":
        """The matrix product that a call comes down to, or why it runs dense."""
        fault = _unsupported(lhs, rhs, dimension_numbers)
        if fault is None:
            site = find_site(self.mesh, self.plan.forward, (lhs, rhs))
            found = _Matrices.of(lhs, rhs, dimension_numbers, expected, site)
            try:
                if self.pad:
                    return found.to_extents(
                        padded_extents(
                            self.plan,
                            *found.extents,
                            site.shape(self.plan.forward),
                            site.replicas(self.plan.forward),
                        )
                    )
                gemm.check_at(site, self.plan, found.padded)
                return found
            except ValueError as error:
                if self.on_unsupported == "dense":
                    return str(error)
                pad = "" if self.pad else "pad=True fills extents up, "
                raise ValueError(
                    f"{error}\n  dot_general flattened lhs{list(lhs.shape)} and "
                    f"rhs{list(rhs.shape)} to m, n, k = {', '.join(map(str, found.extents))}; "
                    f'{pad}on_unsupported="dense" runs lax.dot_general instead'
                ) from None
        if self.on_unsupported == "dense":
            return fault
        raise NotImplementedError(
            f'{fault}; on_unsupported="dense" runs lax.dot_general for these products'
        )


def _unsupported(lhs: jax.Array, rhs: jax.Array, dimension_numbers) -> str | None:
    """What keeps a product from being one product of two matrices of numbers."""
    _, (lhs_batch, rhs_batch) = dimension_numbers
    if len(lhs_batch):
        sizes = ", ".join(str(lhs.shape[d]) for d in lhs_batch)
        return (
            f"batch dimensions {tuple(lhs_batch)} of lhs{list(lhs.shape)} and {tuple(rhs_batch)} "
            f"of rhs{list(rhs.shape)} (sizes {sizes}) make this many products, not one"
        )
    for role, x in (("lhs", lhs), ("rhs", rhs)):
        if fault := dtype_fault(x.dtype):
            return f"{role} has {fault}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Matrices:
    """The two operands and the result as matrices: how dimensions group, and extents.

    Attributes:
      lhs_groups: dimensions of lhs that make up m, and those that make up k.
      rhs_groups: dimensions of rhs that make up k, and those that make up n.
      out_sizes: sizes of the dimensions of the result that m and n unfold into.
      extents: (m, n, k).
      padded: the product that runs, with extents that may be larger.
      site: where it runs.
    """

    lhs_groups: tuple[tuple[int, ...], tuple[int, ...]]
    rhs_groups: tuple[tuple[int, ...], tuple[int, ...]]
    out_sizes: tuple[tuple[int, ...], tuple[int, ...]]
    extents: tuple[int, int, int]
    padded: GemmProblem
    site: Site

    @classmethod
    def of(cls, lhs, rhs, dimension_numbers, expected, site: Site) -> "_Matrices":
        (lhs_dims, rhs_dims), _ = dimension_numbers
        lhs_dims = tuple(int(d) % lhs.ndim for d in lhs_dims)
        rhs_dims = tuple(int(d) % rhs.ndim for d in rhs_dims)
        lhs_free = tuple(d for d in range(lhs.ndim) if d not in lhs_dims)
        rhs_free = tuple(d for d in range(rhs.ndim) if d not in rhs_dims)
        out_sizes = (expected.shape[: len(lhs_free)], expected.shape[len(lhs_free) :])
        m, n = (math.prod(sizes) for sizes in out_sizes)
        k = math.prod(lhs.shape[d] for d in lhs_dims)
        return cls(
            lhs_groups=(lhs_free, lhs_dims),
            rhs_groups=(rhs_dims, rhs_free),
            out_sizes=out_sizes,
            extents=(m, n, k),
            padded=GemmProblem(
                m=m,
                n=n,
                k=k,
                lhs_dtype=lhs.dtype.name,
                rhs_dtype=rhs.dtype.name,
                out_dtype=expected.dtype.name,
            ),
            site=site,
        )

    @property
    def padded_extents(self) -> tuple[int, int, int]:
        return (self.padded.m, self.padded.n, self.padded.k)

    def to_extents(self, extents: tuple[int, int, int]) -> "_Matrices":
        """The same product, to be padded to these extents."""
        m, n, k = extents
        return dataclasses.replace(self, padded=dataclasses.replace(self.padded, m=m, n=n, k=k))

    def run(self, lhs, rhs, op: DotGeneral, precision) -> jax.Array:
        """Flattens, multiplies as planned, unfolds."""
        m, n, k = self.padded_extents
        with self.site.context():
            lhs = as_matrix(lhs, self.lhs_groups, (m, k), self.site)
            rhs = as_matrix(rhs, self.rhs_groups, (k, n), self.site)
        out = gemm.matmul(
            lhs,
            rhs,
            op.plan,
            mesh=op.mesh,
            precision=precision,
            preferred_element_type=self.padded.out_dtype,
        )
        with self.site.context():
            return from_matrix(out, self.out_sizes, self.site)


def _placed(out: jax.Array, wanted, site: Site) -> jax.Array:
    """The result where the caller wants it."""
    if not isinstance(wanted, NamedSharding | PartitionSpec):
        raise TypeError(f"out_sharding must be a PartitionSpec or NamedSharding, got {wanted!r}")
    spec = wanted.spec if isinstance(wanted, NamedSharding) else wanted
    if spec.unreduced or spec.reduced:
        raise NotImplementedError(f"out_sharding={spec}: a result that is not summed up")
    return site.put(out, wanted)
