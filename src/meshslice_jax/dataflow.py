"""The table of dataflows, from which everything else in the package is read.

A product is three matrices over three indices (m, n, k); each matrix has two
of them. A dataflow says which matrix *stays put*. Its two indices lie along
the two mesh axes, and the one index that it lacks is the *streamed* index:

    dataflow   stays   along rows, along cols   streamed
    OS         out     m, n                     k
    LS         lhs     m, k                     n
    RS         rhs     k, n                     m

That is the whole table. Each of the two other matrices has one index in common
with the stationary one, which lies along the same axis there, so its streamed
index lies along the other axis: along that axis it *moves*. A moving input is
gathered, a moving output is reduce-scattered. Placement, movers, collectives,
slicing and local products all follow.

So do the derivatives. A gradient is a product of the same three placed
matrices, with the output in another's role: the same matrix stays put and the
same index is streamed. `Contraction.gradient` only renames indices so that the
new product has its own m, n, k. (MeshSlice, ISCA 2025, Table 1, lists the
results; `tests/test_dataflow.py` compares them.)

    >>> c = Contraction(dataflow=Dataflow.OS)
    >>> c.placement("lhs"), c.placement("rhs"), c.placement("out")
    (('row', 'col'), ('row', 'col'), ('row', 'col'))
    >>> c.gradient("lhs").contraction.dataflow, c.gradient("lhs").operands
    (<Dataflow.LS: 'ls'>, ('ct', 'rhs'))
"""

import dataclasses
import enum
import functools

from meshslice_jax.problem import NATURAL, ROLES, GemmProblem


class Dataflow(enum.StrEnum):
    """Which of the three matrices stays put on the chips."""

    OS = "os"
    LS = "ls"
    RS = "rs"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: the stationary role and the homes of its indices."""

    stationary: str
    row: str
    col: str


TABLE = {
    Dataflow.OS: Row("out", row="m", col="n"),
    Dataflow.LS: Row("lhs", row="m", col="k"),
    Dataflow.RS: Row("rhs", row="k", col="n"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mover:
    """A matrix that moves: along `axis`, over dimension `dim` of its storage."""

    role: str
    axis: str  # "row" or "col": the mesh axis along which its streamed index lies
    dim: int

    @property
    def is_input(self) -> bool:
        """True for a gathered operand, False for a reduce-scattered output."""
        return self.role != "out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient:
    """A derivative as a product of its own.

    Attributes:
      contraction: the product, in its own m, n, k.
      operands: which matrices are its lhs and rhs: "ct" (the cotangent of the
        output), "lhs" or "rhs" of the product that was differentiated.
      labels: for each new index label, the label it had before.
    """

    contraction: "Contraction"
    operands: tuple[str, str]
    labels: tuple[tuple[str, str], ...]

    def role(self, name: str) -> str:
        """The role here of a matrix of the product that was differentiated.

        Args:
          name: its role there; "out" stands for the cotangent.
        """
        names = ("ct" if name == "out" else name), *self.operands
        return {names[1]: "lhs", names[2]: "rhs"}.get(names[0], "out")

    def problem(self, forward: GemmProblem) -> GemmProblem:
        """The extents and dtypes of this product, given those of the forward one."""
        old = dict(self.labels)
        role = {"ct": "out", "lhs": "lhs", "rhs": "rhs"}
        wrt = ({"lhs", "rhs"} - set(self.operands)).pop()
        return GemmProblem(
            m=forward.extent(old["m"]),
            n=forward.extent(old["n"]),
            k=forward.extent(old["k"]),
            lhs_dtype=forward.dtype(role[self.operands[0]]),
            rhs_dtype=forward.dtype(role[self.operands[1]]),
            out_dtype=forward.dtype(wrt),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction:
    """A product under a dataflow, with the storage order of its matrices.

    `lhs`, `rhs` and `out` name the indices of each matrix in storage order:
    "mk" is natural, "km" is stored transposed. Gradients of natural products
    have transposed storage, and the local product takes its dimension numbers
    from here, so no pass has to relayout a matrix.
    """

    dataflow: Dataflow
    lhs: str = NATURAL["lhs"]
    rhs: str = NATURAL["rhs"]
    out: str = NATURAL["out"]

    def indices(self, role: str) -> str:
        """Index labels of `role` in storage order."""
        return getattr(self, role)

    def dim(self, role: str, label: str) -> int:
        """The storage dimension of index `label` in `role`."""
        return self.indices(role).index(label)

    @functools.cached_property
    def stationary(self) -> str:
        """The role that stays put."""
        return TABLE[self.dataflow].stationary

    @functools.cached_property
    def streamed(self) -> str:
        """The index that the stationary matrix lacks; it is sliced."""
        row = TABLE[self.dataflow]
        return ({"m", "n", "k"} - {row.row, row.col}).pop()

    def axis(self, role: str, label: str) -> str:
        """The mesh axis, "row" or "col", along which index `label` of `role` lies."""
        home = {TABLE[self.dataflow].row: "row", TABLE[self.dataflow].col: "col"}
        if label in home:
            return home[label]
        (other,) = set(self.indices(role)) - {label}
        return "col" if home[other] == "row" else "row"

    def placement(self, role: str) -> tuple[str, str]:
        """The mesh axis of each storage dimension of `role`."""
        first, second = self.indices(role)
        return self.axis(role, first), self.axis(role, second)

    @functools.cached_property
    def movers(self) -> tuple[Mover, Mover]:
        """The two matrices that move, the one along "col" first."""
        found = [
            Mover(
                role=role,
                axis=self.axis(role, self.streamed),
                dim=self.dim(role, self.streamed),
            )
            for role in ROLES
            if role != self.stationary
        ]
        first, second = sorted(found, key=lambda mover: mover.axis)
        return first, second

    @functools.cache
    def streamed_first(self) -> "Contraction":
        """The same product with the streamed index first in both moving matrices."""
        first = {m.role: m.dim for m in self.movers}
        stored = {
            role: self.indices(role)[::-1] if first.get(role) == 1 else self.indices(role)
            for role in ROLES
        }
        return Contraction(dataflow=self.dataflow, **stored)

    def local_extents(self, problem: GemmProblem, rows: int, cols: int) -> dict[str, int]:
        """Extents m, n, k of the product that one chip computes in all.

        The home indices are divided by their axis; the streamed index is whole
        (a chip sees all of it, in slices).
        """
        size = {"row": rows, "col": cols}
        row = TABLE[self.dataflow]
        extents = {label: problem.extent(label) for label in "mnk"}
        extents[row.row] //= size["row"]
        extents[row.col] //= size["col"]
        return extents

    def dimension_numbers(self) -> tuple[str, str, tuple]:
        """Operands in order and `lax.dot_general` dimension numbers.

        Returns:
          (first role, second role, dimension numbers) of the local product
          whose result has the storage order of `out`.
        """
        first, second = ("lhs", "rhs") if self.out == "mn" else ("rhs", "lhs")
        contract = ((self.dim(first, "k"),), (self.dim(second, "k"),))
        return first, second, (contract, ((), ()))

    @functools.cache
    def gradient(self, wrt: str) -> Gradient:
        """The derivative with respect to `wrt` ("lhs" or "rhs") as a product.

        By the paper's convention the operand that holds the output's row index
        is called lhs, so that every output has m along rows and n along cols.
        """
        other = "rhs" if wrt == "lhs" else "lhs"
        target = self.indices(wrt)
        m = target[self.placement(wrt).index("row")]
        (n,) = set(target) - {m}
        (k,) = set("mnk") - set(target)
        new = {m: "m", n: "n", k: "k"}
        stored = {"ct": self.out, other: self.indices(other)}
        operands = tuple(sorted(stored, key=lambda name: m not in stored[name]))
        roles = {operands[0]: "lhs", operands[1]: "rhs", wrt: "out"}
        stays = roles["ct" if self.stationary == "out" else self.stationary]
        (dataflow,) = (d for d in Dataflow if TABLE[d].stationary == stays)

        def renamed(labels: str) -> str:
            return "".join(new[label] for label in labels)

        return Gradient(
            contraction=Contraction(
                dataflow=dataflow,
                lhs=renamed(stored[operands[0]]),
                rhs=renamed(stored[operands[1]]),
                out=renamed(target),
            ),
            operands=operands,
            labels=(("m", m), ("n", n), ("k", k)),
        )
