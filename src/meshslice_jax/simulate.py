"""The cluster: every chip of the mesh, its MXU, its links, its memory.

The closed form (`cost`) lets all chips keep step. Here each chip follows its own data
flow (`task_graph`): it starts a task when what the task needs is there and the MXU or
the links are free; transfers go hop by hop with its neighbours (`links`). So what one
chip loses spreads as far as the algorithm couples chips, which is what SUMMA's chains
suffer from. All prices (launch, hop, product, HBM traffic) are those of `cost`.

Three steps:

1. The order of each chip's transfers is fixed once, as a compiler would: on one
   undisturbed chip, whatever can start starts, in program order. All chips then run
   that program, whatever happens to them.
2. Transfers are timed as soon as what they wait for is timed, products last. No
   transfer depends on a product that runs beside it, so a product finds all the
   links' traffic in its time already known.
3. While links move data, they take memory time from the MXU: its rate falls to
   1 - contention x (their HBM bytes per second) / (HBM rate).

Everything is an array over the chips, so 4096 chips cost little more than 256.
(MeshSlice, ISCA 2025, section 4: a simulated TPUv4 cluster; faults are ours.)
"""

import collections
import dataclasses
from collections.abc import Mapping

import numpy as np

from meshslice_jax import links
from meshslice_jax.block import BlockSchedule
from meshslice_jax.block_graph import block_graph, block_parts
from meshslice_jax.cost import product_s, transfer_hbm_bytes, transfer_s
from meshslice_jax.faults import NO_FAULTS, Faults, Wear
from meshslice_jax.hardware import HardwareSpec, hardware_spec
from meshslice_jax.issue_order import LEAST_RATE, issue_order, processing_order, resources
from meshslice_jax.mesh import MeshShape
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.problem import GemmProblem
from meshslice_jax.schedule import Product, Schedule, Transfer
from meshslice_jax.task_graph import Graph, Part, Task, product_graph, product_part
from meshslice_jax.timeline import RESOURCES, Span, Timeline


def simulate(
    problem: GemmProblem,
    plan: GemmPlan,
    mesh_shape: tuple[int, int],
    spec: str | HardwareSpec = "tpu_v4",
    *,
    faults: Faults = NO_FAULTS,
    buffer_depth: int = 2,
    record: bool = False,
) -> Timeline:
    """Simulates one product on every chip of a mesh.

    Args:
      problem: global extents and dtypes.
      plan: how it runs.
      mesh_shape: (rows, cols) of the mesh.
      spec: the hardware, a record or what `hardware_spec` takes.
      faults: jitter, slow chips and slow links.
      buffer_depth: gathered slices of each moving operand held at once.
      record: whether the timeline keeps every task's times, for `write_trace`.

    Raises:
      ValueError: the product cannot run as planned, or a fault outside the mesh.
    """
    part = product_part(problem, plan, mesh_shape)
    return run(product_graph(part, buffer_depth), hardware_spec(spec), faults=faults, record=record)


def simulate_schedule(
    schedule: Schedule,
    problem: GemmProblem,
    mesh_shape: tuple[int, int],
    spec: str | HardwareSpec = "tpu_v4",
    *,
    faults: Faults = NO_FAULTS,
    buffer_depth: int = 2,
    record: bool = False,
) -> Timeline:
    """`simulate` for a schedule that no plan can express (model-only variants).

    Args: as for `simulate`; `mesh_shape` is what the schedule's "row" and "col" mean.
    """
    part = Part(
        layer="product",
        kind="forward",
        problem=problem,
        schedule=schedule,
        mesh_shape=MeshShape(*mesh_shape),
    )
    return run(product_graph(part, buffer_depth), hardware_spec(spec), faults=faults, record=record)


def simulate_block(
    layers: Mapping[str, tuple[GemmProblem, LayerPlan]],
    mesh_shape: tuple[int, int],
    spec: str | HardwareSpec = "tpu_v4",
    *,
    block: BlockSchedule | None = None,
    faults: Faults = NO_FAULTS,
    record: bool = False,
) -> Timeline:
    """Simulates a training step of a block: all forward products, then all gradients.

    What lies between the products (norms, attention, activations) takes no time here,
    and no operand is moved from one placement to another.

    Args:
      layers: name -> (forward problem, plan), in forward order.
      mesh_shape: (rows, cols) of the mesh.
      spec: the hardware, a record or what `hardware_spec` takes.
      block: order and overlap of the products; None is the plain order.
      faults: jitter, slow chips and slow links.
      record: whether the timeline keeps every task's times, for `write_trace`.

    Raises:
      ValueError: no layers, a product that cannot run as planned, 1D and 2D algorithms
        in one block, or a fault outside the mesh.
    """
    if not layers:
        raise ValueError("a block needs at least one layer to simulate")
    block = block or BlockSchedule()
    parts = block_parts(layers, mesh_shape, block)
    return run(block_graph(parts, block), hardware_spec(spec), faults=faults, record=record)


def run(
    graph: Graph, spec: HardwareSpec, *, faults: Faults = NO_FAULTS, record: bool = False
) -> Timeline:
    """Simulates a graph of tasks on every chip of its mesh.

    Args:
      graph: from `product_graph` or `block_graph`.
      spec: the hardware.
      faults: jitter, slow chips and slow links.
      record: whether the timeline keeps every task's times.

    Raises:
      ValueError: parts on different meshes, or a fault outside the mesh.
    """
    shape = _mesh_shape(graph)
    prices = [_nominal_s(graph, task, spec) for task in graph.tasks]
    cluster = _Cluster(graph=graph, spec=spec, faults=Wear(faults, shape), shape=shape)
    cluster.record = record
    loads = [_load_s(task.work, spec) / p for task, p in zip(graph.tasks, prices, strict=True)]
    issued = issue_order(graph.tasks, prices, loads, spec.synchronous)
    for index in processing_order(graph.tasks, issued, spec.synchronous):
        if isinstance(graph.tasks[index].work, Product):
            cluster.multiply(index, prices[index])
        else:
            cluster.move(index, prices[index])
    return cluster.timeline(prices)


def _mesh_shape(graph: Graph) -> MeshShape:
    shapes = {part.mesh_shape for part in graph.parts}
    if len(shapes) > 1:
        names = ", ".join(f"{part.name} on {part.mesh_shape}" for part in graph.parts)
        raise ValueError(
            f"1D and 2D algorithms use the chips as different meshes ({names}); simulate "
            "their layers apart"
        )
    return shapes.pop()


def _nominal_s(graph: Graph, task: Task, spec: HardwareSpec) -> float:
    """Seconds of a task with nothing in its way."""
    if isinstance(task.work, Product):
        return product_s(task.work, graph.parts[task.part].problem, spec)
    overlapped = task.overlapped and task.work.kind not in spec.synchronous
    return transfer_s(task.work, spec, overlapped=overlapped)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Cluster:
    """The state of all chips while tasks are processed."""

    graph: Graph
    spec: HardwareSpec
    faults: Wear
    shape: MeshShape
    record: bool = False

    def __post_init__(self):
        self.free = {resource: np.zeros(self.shape) for resource in RESOURCES}
        self.busy = {resource: np.zeros(self.shape) for resource in RESOURCES}
        self.ends: dict[int, np.ndarray] = {}
        self.uses = collections.Counter(
            before for task in self.graph.tasks for before in task.after
        )
        self.traffic: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.finish = np.zeros(self.shape)
        self.part_end = [0.0] * len(self.graph.parts)
        self.corner: dict[int, tuple[float, float]] = {}
        self.spans: list[Span] = []

    def multiply(self, index: int, nominal_s: float) -> None:
        """Times a product on every chip."""
        start = self._ready(index)
        work_s = nominal_s * self.faults.product_factor(index)
        self.traffic = [entry for entry in self.traffic if (entry[1] > start).any()]
        self._finish(index, start, stretched_end(start, work_s, self.traffic))

    def move(self, index: int, nominal_s: float) -> None:
        """Times a transfer on every chip."""
        task = self.graph.tasks[index]
        transfer, start = task.work, self._ready(index)
        launch_s, stages = _launch_s(transfer, self.spec), _stages(transfer)
        hop_s = (nominal_s / transfer.count - launch_s) / stages
        times = self.faults.hop_times(index, transfer, hop_s)
        closed = self.spec.is_ring(transfer.ring)
        now = links.orient(start, transfer.axis, transfer.directions)
        for turn in range(transfer.count):
            arrived = now + launch_s
            if transfer.kind in ("broadcast", "reduce"):
                starts = self._chain_starts(task, turn)
                now = links.chain(arrived, starts, transfer.packets, times)
            else:
                now = links.ring(arrived, transfer.hops, times, closed=closed)
        end = links.settle(now, transfer.axis)
        self._add_traffic(transfer, start, end)
        self._finish(index, start, end)

    def timeline(self, prices: list[float]) -> Timeline:
        """What was found."""
        math_s = sum(
            price
            for task, price in zip(self.graph.tasks, prices, strict=True)
            if isinstance(task.work, Product)
        )
        total = float(self.finish.max())
        ends = np.maximum.accumulate(self.part_end)
        names = [part.name for part in self.graph.parts]
        return Timeline(
            hardware=self.spec.name,
            mesh_shape=tuple(self.shape),
            total_s=total,
            math_s=math_s,
            exposed_s=total - math_s,
            finish_s=self.finish,
            busy_s=self.busy,
            part_s=tuple(zip(names, np.diff(ends, prepend=0.0).tolist(), strict=True)),
            peak_temporary_bytes=self._peak_bytes(),
            spans=tuple(self.spans),
        )

    def _ready(self, index: int) -> np.ndarray:
        """Per chip: when a task's predecessors are complete and its resources free."""
        task = self.graph.tasks[index]
        waits = [self.free[resource] for resource in resources(task.work, self.spec.synchronous)]
        waits += [self.ends[before] for before in task.after]
        ready = np.maximum.reduce(waits)
        for before in task.after:
            self.uses[before] -= 1
            if self.uses[before] == 0:  # 4096 chips x 100,000 tasks would not fit
                del self.ends[before]
        return ready

    def _chain_starts(self, task: Task, turn: int) -> tuple[int, ...]:
        """Where the chains of a panel start: panels have their owners in turn."""
        transfer = task.work
        panels = transfer.count * self.graph.parts[task.part].schedule.products
        root = (task.step * transfer.count + turn) * transfer.ring // panels
        return links.chain_starts(transfer.kind, root, transfer.ring, transfer.directions)

    def _add_traffic(self, transfer: Transfer, start: np.ndarray, end: np.ndarray) -> None:
        """Notes which share of its rate a transfer takes from products beside it."""
        if self.spec.contention == 0:
            return
        taken = end - start
        load = np.divide(
            _load_s(transfer, self.spec), taken, out=np.zeros_like(taken), where=taken > 0
        )
        self.traffic.append((start, end, load))

    def _finish(self, index: int, start: np.ndarray, end: np.ndarray) -> None:
        task = self.graph.tasks[index]
        used = resources(task.work, self.spec.synchronous)
        for resource in used:
            self.free[resource] = end
            self.busy[resource] = self.busy[resource] + (end - start)
        if self.uses[index]:
            self.ends[index] = end
        self.finish = np.maximum(self.finish, end)
        self.part_end[task.part] = max(self.part_end[task.part], float(end.max()))
        self.corner[index] = (float(start[0, 0]), float(end[0, 0]))
        if self.record:
            self.spans.append(self._span(task, used, start, end))

    def _span(self, task: Task, used: tuple[str, ...], start, end) -> Span:
        is_product = isinstance(task.work, Product)
        return Span(
            name=self.graph.parts[task.part].name,
            what="product" if is_product else f"{task.work.kind} {task.work.role}",
            step=task.step,
            resources=used,
            start_s=start,
            end_s=end,
        )

    def _peak_bytes(self) -> int:
        """The most bytes of buffers that are alive at once on chip (0, 0)."""
        changes = []
        for buffer in self.graph.buffers:
            changes.append((self.corner[buffer.born][0], buffer.bytes))
            changes.append((self.corner[buffer.dies][1], -buffer.bytes))
        held = peak = 0
        for _, change in sorted(changes):  # at equal times what dies goes first
            held += change
            peak = max(peak, held)
        return peak


def _load_s(work: Product | Transfer, spec: HardwareSpec) -> float:
    """Seconds by which a transfer delays a product that runs beside all of it."""
    if isinstance(work, Product) or work.kind in spec.synchronous:
        return 0.0
    return spec.contention * transfer_hbm_bytes(work, spec) / spec.hbm_bytes_per_s


def _launch_s(transfer: Transfer, spec: HardwareSpec) -> float:
    """Seconds before the first hop of a transfer."""
    launches = {"all_gather": spec.gather_launch_s, "reduce_scatter": spec.scatter_launch_s}
    return launches.get(transfer.kind, spec.permute_launch_s)


def _stages(transfer: Transfer) -> int:
    """Hops that follow one another in one collective."""
    return transfer.hops + transfer.packets - 1


def stretched_end(
    start: np.ndarray,
    work_s: np.ndarray,
    traffic: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> np.ndarray:
    """When products end whose rate falls while traffic passes.

    Args:
      start: when each chip starts.
      work_s: seconds at full rate.
      traffic: (start, end, share of the rate that it takes) per chip.
    """
    if not traffic:
        return start + work_s
    begins, ends, loads = (np.stack(column) for column in zip(*traffic, strict=True))
    # Between two neighbouring points the rate is constant.
    points = np.sort(np.maximum(np.concatenate([begins, ends]), start), axis=0)
    now, left = start, work_s
    for point in points:
        passing = (begins <= now) & (now < ends)
        rate = np.maximum(1 - np.where(passing, loads, 0.0).sum(axis=0), LEAST_RATE)
        done = np.minimum((point - now) * rate, left)
        # A product that ends inside the interval stays at its end.
        now = np.where(done < left, point, now + done / rate)
        left = left - done
    return now + left
