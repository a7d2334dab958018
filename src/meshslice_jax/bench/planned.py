"""A ModelPlan as a benchmark: its own products on its own mesh, nothing chosen anew.

Only the tokens may be fewer (`scale`), because emulated chips share one machine. Before
anything is placed, what must be held is compared with what is free. Emulated, all of it
lies in the memory of the machine, in bytes at least

    3 (lhs + rhs + out)      on the host, on the mesh, on one device for the dense product
    4 bytes per element      of all three, in which NumPy computes the answer
    2 out                    results, the expected and the one that is checked
    chips x temporaries      gathered slices and partial results of the largest pass

On real devices each chip holds its shards of the three matrices, a result and the
temporaries; the dense product is skipped where its device cannot hold it as well.
"""

import dataclasses
import pathlib

import jax

from meshslice_jax import algorithms, compat
from meshslice_jax.bench.cases import PASSES, Options, product
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.models import fc_layers
from meshslice_jax.problem import NATURAL, GemmProblem, itemsize

_FLOAT32_BYTES = 4
#: Scales that messages offer, at most.
_OFFERED = 12


def plan_options(
    plan: ModelPlan,
    *,
    scale: int = 1,
    layers: tuple[str, ...] | None = None,
    passes: tuple[str, ...] = tuple(PASSES),
    repeats: int = 7,
    hardware: HardwareSpec | None = None,
) -> Options:
    """What to measure of a plan.

    Args:
      plan: the plan; of data parallelism, one replica.
      scale: its tokens are divided by this.
      layers: some of its layers, or None for all.
      passes: of "fwd", "dlhs", "drhs".
      repeats: rounds of timing.
      hardware: the profile on which times are projected, or None.

    Raises:
      ValueError: a layer that the plan lacks, or a scale with which it cannot run.
    """
    wanted = tuple(plan.layers) if layers is None else layers
    if unknown := [name for name in wanted if name not in plan.layers]:
        raise ValueError(
            f"the plan has no layer {', '.join(unknown)}; it has {', '.join(plan.layers)}"
        )
    problems = scaled_problems(plan, scale)
    return Options(
        layers={name: problems[name] for name in wanted},
        mesh_shape=plan.mesh_shape,
        passes=passes,
        repeats=repeats,
        plans={name: plan.layers[name] for name in wanted},
        hardware=hardware,
    )


def scaled_problems(plan: ModelPlan, scale: int) -> dict[str, GemmProblem]:
    """The forward products of a plan with fewer tokens.

    Raises:
      ValueError: the scale does not divide the tokens, or leaves too few for a layer.
    """
    if plan.tokens % scale:
        raise ValueError(
            f"scale {scale} does not divide the plan's {plan.tokens} tokens; "
            f"{_offer(legal_scales(plan))} do"
        )
    found = fc_layers(plan.model, plan.tokens // scale, plan.dtype)
    for name, problem in found.items():
        layer = plan.layers[name]
        try:
            algorithms.check_problem(
                layer, problem, algorithms.view(layer.forward, plan.mesh_shape)
            )
        except ValueError as error:
            raise ValueError(
                f"with {plan.tokens // scale} tokens (scale {scale}) the plan's layer {name} "
                f"cannot run as planned; scales with which it can: {_offer(legal_scales(plan))}"
                f"\n{error}"
            ) from None
    return {name: product(p.m, p.n, p.k, plan.dtype) for name, p in found.items()}


def legal_scales(plan: ModelPlan) -> list[int]:
    """Scales with which every layer still runs as planned, ascending."""
    scales = (scale for scale in range(1, plan.tokens + 1) if plan.tokens % scale == 0)
    return [scale for scale in scales if _runs(plan, plan.tokens // scale)]


def _runs(plan: ModelPlan, tokens: int) -> bool:
    for name, problem in fc_layers(plan.model, tokens, plan.dtype).items():
        layer = plan.layers[name]
        for part, own in algorithms.layer_problems(problem, layer.forward).items():
            gemm = getattr(layer, part)
            if not algorithms.fits(own, gemm, algorithms.view(gemm, plan.mesh_shape)):
                return False
    return True


def _offer(scales: list[int]) -> str:
    return ", ".join(map(str, scales[:_OFFERED])) + (", ..." if len(scales) > _OFFERED else "")


def check_memory(
    options: Options, plan: ModelPlan, devices: list[jax.Device], free: dict[str, int] | None = None
) -> Options:
    """Refuses a plan whose operands do not fit.

    Args:
      options: from `plan_options`.
      plan: the plan that they came from.
      devices: those of the mesh.
      free: bytes that are free on the "machine" and on each "chip"; None looks.

    Returns:
      The options, without the dense product where a chip has no room for it.

    Raises:
      ValueError: the bytes that a layer needs are more than are free.
    """
    emulated = devices[0].platform == "cpu"
    free = free_bytes(devices) if free is None else free
    if emulated:  # every process keeps the matrices of its own, all on this machine
        free = free | {"machine": free["machine"] // compat.num_processes()}
    for name, problem in options.layers.items():
        for where, needed in _needs(plan, name, problem, emulated=emulated).items():
            if needed > free[where]:
                scale = _fitting_scale(plan, tuple(options.layers), free, emulated=emulated)
                raise ValueError(
                    f"layer {name} with {problem.m} tokens needs at least {needed:,} bytes on "
                    f"{'this machine' if where == 'machine' else 'every chip'} and "
                    f"{free[where]:,} are free; {scale}"
                )
    whole = max(_bytes(problem) for problem in options.layers.values())
    if not emulated and whole > free["chip"]:
        reason = f"its {whole:,} bytes do not fit one chip, {free['chip']:,} are free"
        return dataclasses.replace(options, dense_reason=reason)
    return options


def _fitting_scale(
    plan: ModelPlan, layers: tuple[str, ...], free: dict[str, int], *, emulated: bool
) -> str:
    """The way out of too many bytes, in words."""
    for scale in legal_scales(plan):
        problems = scaled_problems(plan, scale)
        needs = [_needs(plan, name, problems[name], emulated=emulated) for name in layers]
        if all(count <= free[where] for one in needs for where, count in one.items()):
            return f"--scale {scale} divides the tokens so that it fits"
    return "no scale fits, the weights are too large: choose smaller --layers or use more chips"


def _bytes(problem: GemmProblem) -> int:
    return sum(problem.bytes(role) for role in NATURAL)


def _needs(plan: ModelPlan, name: str, problem: GemmProblem, *, emulated: bool) -> dict[str, int]:
    """Bytes that the machine, and each chip, must have free for one layer."""
    layer, chips, held = plan.layers[name], plan.mesh_shape.num_chips, _bytes(problem)
    largest = max(problem.bytes(role) for role in NATURAL)
    elements = sum(problem.bytes(role) // itemsize(problem.dtype(role)) for role in NATURAL)
    temporary = 0
    for part, own in algorithms.layer_problems(problem, layer.forward).items():
        gemm = getattr(layer, part)
        schedule = algorithms.schedule(own, gemm, algorithms.view(gemm, plan.mesh_shape))
        temporary = max(temporary, schedule.temporary_bytes)
    host = held + _FLOAT32_BYTES * elements + 2 * largest
    if emulated:
        return {"machine": host + 2 * held + chips * temporary}
    return {"machine": host, "chip": (held + largest) // chips + temporary}


def free_bytes(devices: list[jax.Device]) -> dict[str, int]:
    """Bytes that are free on the "machine" and, of real devices, on the fullest "chip".

    Raises:
      RuntimeError: a device does not tell.
    """
    found = {"machine": machine_free_bytes()}
    if devices[0].platform != "cpu":
        chips = []
        for device in devices:
            stats = device.memory_stats() if device.process_index == jax.process_index() else None
            if stats is not None:
                chips.append(stats["bytes_limit"] - stats["bytes_in_use"])
        if not chips:
            raise RuntimeError(f"{devices[0].device_kind} does not tell how much memory is free")
        found["chip"] = min(chips)
    return found


def machine_free_bytes(root: str = "/") -> int:
    """Bytes that a new process could have, within the limit of its container.

    Raises:
      RuntimeError: the system does not tell.
    """
    table = pathlib.Path(root, "proc/meminfo")
    if not table.is_file():
        raise RuntimeError(
            f"{table} does not exist, so the memory that is free is not known; run the plan's "
            "products with --mkn instead"
        )
    lines = dict(line.split(":") for line in table.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    group = pathlib.Path(root, "sys/fs/cgroup")  # version 2; the older one is not looked at
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()) + _page_cache(group))
    return free


def _page_cache(group: pathlib.Path) -> int:
    """Bytes of files that a container may drop when it needs memory."""
    lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(lines["inactive_file"])
