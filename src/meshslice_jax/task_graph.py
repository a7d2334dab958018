"""The data-flow graph that a schedule stands for.

A `Schedule` says what runs at the same time if everything takes its turn in step. A
cluster does not keep step: gathers run ahead as far as buffers allow, a product starts
when its slices are there, a reduce-scatter follows its product. So the simulator works
on tasks and what each must wait for:

    gather for product p     the products before p - 1 (buffers of depth 2)
    product p                its gathers, product p - 1, scatters of products before that
    scatter of product p     product p

Tasks of one chip that use the same link or the MXU run one after the other. A ring of
neighbour sends is a loop: each send passes on what the last one brought, and the loop
takes the other operand whole. `block_graph` joins the products of a block.
(MeshSlice, ISCA 2025, section 3.4.)
"""

import dataclasses
from collections.abc import Mapping

from meshslice_jax import algorithms
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan
from meshslice_jax.problem import GemmProblem, itemsize
from meshslice_jax.schedule import Product, Schedule, Transfer

#: Passes of a layer, as `layer_problems` names them.
FORWARD, GRAD_LHS, GRAD_RHS = "forward", "grad_lhs", "grad_rhs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One product of a block.

    Attributes:
      layer: name of the layer.
      kind: "forward", "grad_lhs" or "grad_rhs".
      problem: extents and dtypes of this product.
      schedule: what one chip does for it; its axes are those of the simulated mesh.
      mesh_shape: the simulated mesh: as given, or P x 1 for a 1D algorithm.
      sources: what its lhs and rhs are in the layer's forward product: "lhs" (the
        activation), "rhs" (the weight) or "ct" (the output's cotangent).
    """

    layer: str
    kind: str
    problem: GemmProblem
    schedule: Schedule
    mesh_shape: MeshShape
    sources: tuple[str, str] = ("lhs", "rhs")

    @property
    def name(self) -> str:
        """Layer and pass, for traces."""
        return f"{self.layer}/{self.kind}"

    def source(self, role: str) -> str:
        """What the operand in `role`, "lhs" or "rhs", is to the layer."""
        return self.sources[("lhs", "rhs").index(role)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A product or a transfer of one chip, in program order.

    Attributes:
      part: index of the product of the block that it belongs to.
      step: index, within the part, of the local product that it feeds, is or follows.
      work: the local product or the transfer.
      after: indices of tasks that must be complete first (on the same chip).
      overlapped: whether a transfer is priced with the rate beside a product.
    """

    part: int
    step: int
    work: Product | Transfer
    after: tuple[int, ...]
    overlapped: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """Memory that lives from the start of one task to the end of another."""

    bytes: int
    born: int
    dies: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph:
    """Tasks in program order, the products they belong to, and their buffers."""

    parts: tuple[Part, ...]
    tasks: tuple[Task, ...]
    buffers: tuple[Buffer, ...]


@dataclasses.dataclass(kw_only=True)
class Draft:
    """A graph that is being written."""

    depth: int
    parts: list[Part] = dataclasses.field(default_factory=list)
    tasks: list[Task] = dataclasses.field(default_factory=list)
    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    products: list[int] = dataclasses.field(default_factory=list)  # of all parts
    drains: list[list[int]] = dataclasses.field(default_factory=list)  # outputs per product

    def add(self, **fields) -> int:
        self.tasks.append(Task(part=len(self.parts) - 1, **fields))
        return len(self.tasks) - 1

    def graph(self) -> Graph:
        return Graph(parts=tuple(self.parts), tasks=tuple(self.tasks), buffers=tuple(self.buffers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """Where the tasks of a part lie in the graph."""

    gathers: dict[str, list[list[int]]]  # role -> tasks of each step
    products: list[int]
    outputs: list[int]

    @property
    def tail(self) -> tuple[int, ...]:
        """What is complete last: links and the MXU run in order."""
        return (self.products[-1], *self.outputs[-1:])


def product_graph(part: Part, depth: int = 2) -> Graph:
    """The graph of a single product.

    Args:
      part: the product and its schedule.
      depth: gathered slices, and partial results, held at once.
    """
    draft = Draft(depth=depth)
    place(draft, part, waits=dict.fromkeys(("lhs", "rhs", "product"), ()), crossing=(), reuse={})
    return draft.graph()


def product_part(
    problem: GemmProblem,
    plan: GemmPlan,
    mesh_shape: tuple[int, int],
    *,
    layer: str = "product",
    kind: str = FORWARD,
    sources: tuple[str, str] = ("lhs", "rhs"),
) -> Part:
    """One product as planned, on the mesh that is simulated.

    Args:
      problem: extents and dtypes.
      plan: its plan; one whose row_axis is "col" sees the mesh with rows and columns
        exchanged (the twin dataflow).
      mesh_shape: (rows, cols) of the mesh.
      layer: name of the layer.
      kind: "forward", "grad_lhs" or "grad_rhs".
      sources: see Part.

    Raises:
      ValueError: the product cannot run as planned.
    """
    shape, names = MeshShape(*mesh_shape), {"row": "row", "col": "col"}
    seen = shape
    if plan.row_axis == "col":
        seen, names = MeshShape(*shape[::-1]), {"row": "col", "col": "row"}
    schedule = algorithms.schedule(problem, plan, seen)
    if algorithms.algorithm_of(plan).flatten(plan) is not None:
        shape, names = MeshShape(shape.num_chips, 1), {"row": "row", "col": "row"}
    return Part(
        layer=layer,
        kind=kind,
        problem=problem,
        schedule=_renamed(schedule, names),
        mesh_shape=shape,
        sources=sources,
    )


def _renamed(schedule: Schedule, names: dict[str, str]) -> Schedule:
    """The same schedule with its transfers along other axes."""
    steps = tuple(
        (
            dataclasses.replace(
                step,
                transfers=tuple(dataclasses.replace(t, axis=names[t.axis]) for t in step.transfers),
            ),
            repeats,
        )
        for step, repeats in schedule.steps
    )
    return dataclasses.replace(schedule, steps=steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductStep:
    """A local product, the transfers that feed it and those that carry its result."""

    product: Product
    ahead: list[tuple[Transfer, bool]]  # transfer, whether its step had a product
    behind: list[tuple[Transfer, bool]]


def product_steps(schedule: Schedule) -> list[ProductStep]:
    """A schedule by its local products.

    An input's transfer feeds the first product after its step. An output's transfer
    carries what the products before its step have made; the k-th one at least the
    k-th product (in the first steady step it is that step's own).
    """
    total = schedule.products
    ahead = [[] for _ in range(total)]
    behind = [[] for _ in range(total)]
    products: list[Product] = []
    carried = 0
    for step, repeats in schedule.steps:
        overlapped = step.product is not None
        for _ in range(repeats):
            done = len(products)
            if overlapped:
                products.append(step.product)
            for transfer in step.transfers:
                if transfer.role != "out":
                    ahead[len(products)].append((transfer, overlapped))
                else:
                    behind[max(done - 1, min(carried, total - 1))].append((transfer, overlapped))
                    carried += 1
    return [
        ProductStep(product=p, ahead=a, behind=b)
        for p, a, b in zip(products, ahead, behind, strict=True)
    ]


def place(
    draft: Draft,
    part: Part,
    *,
    waits: Mapping[str, tuple[int, ...]],
    crossing: tuple[str, ...],
    reuse: dict[str, list[list[int]]],
) -> Placed:
    """Appends the tasks of one product.

    Args:
      draft: the graph so far.
      part: the product.
      waits: for gathers of "lhs" and "rhs" and for every "product": tasks of earlier
        parts to wait for.
      crossing: roles whose transfers may run beside products of another part.
      reuse: role -> gathers, by step, that stand in for its own.
    """
    draft.parts.append(part)
    steps = product_steps(part.schedule)
    gathers = {"lhs": [], "rhs": []}
    products, outputs = [], []
    blocked: tuple[int, ...] = ()
    for index, step in enumerate(steps):
        fed = []
        for role in sorted(gathers, key=lambda role: _is_ringed(step, role)):
            before = waits[role]
            if _is_ringed(step, role):
                # A ring passes on what it received; as a loop it takes the other operand whole.
                sent = [tasks[-1:] for tasks in gathers[role] if tasks]
                before += (*blocked, *(sent[-1] if sent else ()))
            tasks = _feed(draft, step, index, role, before, role in crossing, reuse)
            gathers[role].append(tasks)
            fed += tasks
            blocked += tuple(t for t in tasks if draft.tasks[t].work.kind == "all_gather")
        full = draft.drains[-draft.depth] if len(draft.drains) >= draft.depth else []
        after = (*products[-1:], *fed, *waits["product"], *full)
        products.append(draft.add(step=index, work=step.product, after=after))
        draft.products.append(products[-1])
        sent = [
            draft.add(
                step=index, work=t, after=(products[-1],), overlapped=both or "out" in crossing
            )
            for t, both in step.behind
        ]
        draft.drains.append(sent)
        outputs += sent
    placed = Placed(gathers=gathers, products=products, outputs=outputs)
    _add_buffers(draft, part, placed, reuse)
    return placed


def _is_ringed(step: ProductStep, role: str) -> bool:
    """Whether neighbour sends bring the operand in `role`."""
    return any(t.role == role and t.kind == "permute" for t, _ in step.ahead)


def _feed(
    draft: Draft,
    step: ProductStep,
    index: int,
    role: str,
    waits: tuple[int, ...],
    crossing: bool,
    reuse: dict[str, list[list[int]]],
) -> list[int]:
    """The transfers that bring the operand in `role` for one product."""
    if role in reuse:
        # Slices that differ between the two products are cut from the whole gathered matrix.
        steps = reuse[role]
        same = len(steps) == draft.parts[-1].schedule.products
        return steps[index] if same else steps[-1]
    place = len(draft.products) - draft.depth
    free = (draft.products[place],) if place >= 0 else ()
    tasks: list[int] = []
    for transfer, both in step.ahead:
        if transfer.role == role:
            sent = tuple(tasks[-1:]) if transfer.kind == "permute" else ()
            tasks.append(
                draft.add(
                    step=index,
                    work=transfer,
                    after=waits + free + sent,
                    overlapped=both or crossing,
                )
            )
    return tasks


def gathered_bytes(transfer: Transfer) -> int:
    """Bytes that a chip holds after an input's transfer."""
    if transfer.kind == "permute":
        return int(transfer.bytes * transfer.count)
    return int(transfer.bytes * transfer.ring / (transfer.ring - 1) * transfer.count)


def _add_buffers(
    draft: Draft, part: Part, placed: Placed, reuse: dict[str, list[list[int]]]
) -> None:
    """Gathered slices, partial results and accumulators of a part that was placed."""
    for role, steps in placed.gathers.items():
        if role in reuse:
            _keep_shared(draft, reuse[role], placed)
            continue
        for tasks, product in zip(steps, placed.products, strict=True):
            for task in tasks:
                size = gathered_bytes(draft.tasks[task].work)
                draft.buffers.append(Buffer(bytes=size, born=task, dies=product))
    accum = itemsize(part.problem.accum_dtype)
    for product in placed.products:
        work = draft.tasks[product].work
        # A partial result leaves with the first output that carries it.
        leaves = next((task for task in placed.outputs if task > product), product)
        size = work.m * work.n * accum
        draft.buffers.append(Buffer(bytes=size, born=product, dies=leaves))
    if not placed.outputs and len(placed.products) > 1:
        first, last = placed.products[0], placed.products[-1]
        draft.buffers.append(Buffer(bytes=size, born=first, dies=last))


def _keep_shared(draft: Draft, steps: list[list[int]], placed: Placed) -> None:
    """Buffers of a shared operand live until the second product has used them."""
    dies = placed.products if len(steps) == len(placed.products) else placed.products[-1:]
    uses = {
        task: dies[min(index, len(dies) - 1)] for index, tasks in enumerate(steps) for task in tasks
    }
    for index, buffer in enumerate(draft.buffers):
        if buffer.born in uses:
            draft.buffers[index] = dataclasses.replace(buffer, dies=uses[buffer.born])
