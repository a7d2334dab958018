"""`explain`: what became of every product of a model, and what it costs on a machine.

    layer              lhs x rhs          m, n, k      runs              forward  step   sent
    block/query        [4,64,32]x[32,4,8] 256, 32, 32  meshslice os S=2  1.2 us   3.9 us 12 kB
    block/Dense_0      [4,64,32]x[32,7]   256, 7, 32   lax.dot_general: no rule matches ...

Times are modelled: the schedule of each pass on a hardware profile (`cost.seconds`), with
nothing overlapping between products. Bytes are what one chip sends in the three passes of
a training step. Kernels that lie whole on every chip although their plan would have them
cut are listed with their bytes, and so are those of products that have no plan.
"""

import dataclasses
import pathlib
from typing import Any

import flax.linen
import jax
from flax import nnx

from meshslice_jax import algorithms, cost
from meshslice_jax.gemm import of_one_replica
from meshslice_jax.hardware import HardwareSpec, hardware_spec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.nn.linen_layers import ParallelModule
from meshslice_jax.nn.placing import (
    Shardings,
    fallback_kernels,
    is_concrete,
    kernels,
    names,
    size_bytes,
)
from meshslice_jax.nn.trace import Trace, trace
from meshslice_jax.product_log import Product


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One product of a layer, and its price.

    Attributes:
      product: what was traced.
      forward_s: modelled seconds of the forward product; None where it is not on a plan
        or the profile has no rate for its dtype.
      step_s: modelled seconds of forward and both gradients.
      sent_bytes: bytes that one chip sends in these three; None off the plan.
    """

    product: Product
    forward_s: float | None = None
    step_s: float | None = None
    sent_bytes: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `explain` found; `str` is the table that it prints.

    Attributes:
      trace: all products.
      rows: those of layers and parameters, priced.
      replicated: (path, bytes of the whole kernel) of kernels that their plan would cut but
        that lie whole on every chip.
      unplanned: likewise of parameters whose product falls back.
      hardware: the profile's name.
    """

    trace: Trace
    rows: tuple[Row, ...]
    replicated: tuple[tuple[str, int], ...]
    unplanned: tuple[tuple[str, int], ...]
    hardware: str

    def __str__(self) -> str:
        table = [("layer", "lhs x rhs", "m, n, k", "runs", "forward", "step", "sent")]
        table += [_cells(row) for row in self.rows]
        widths = [max(len(cells[i]) for cells in table) for i in range(6)]
        widths[3] = max([len(cells[3]) for cells in table if cells[4]] + [0])
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(r, (*widths, 0), strict=True)).rstrip()
            for r in table
        ]
        planned = sum(row.product.plan is not None for row in self.rows)
        lines.append(
            f"{planned} of {len(self.rows)} products of layers run on a plan; times modelled for "
            f"{self.hardware}, step = forward and both gradients, sent = bytes of one chip"
        )
        lines += [
            f"no layer's: {count} x {list(lhs)} x {list(rhs)}, as lax.dot_general"
            for lhs, rhs, count in self.trace.others
        ]
        reasons = {row.product.reason: row.product.path for row in reversed(self.rows)}
        for reason, path in reversed(reasons.items()):
            if reason and "\n" in reason:
                lines.append(f"{path}: {reason}")
        lines += [f"WARNING rule {pattern!r} matched no layer" for pattern in self.trace.unmatched]
        lines += [
            f"WARNING {path}: {_bytes(size)} whole on every chip; place it with shardings(...)"
            for path, size in self.replicated
        ]
        lines += [
            f"WARNING {path}: {_bytes(size)} whole on every chip; its product is on no plan"
            for path, size in self.unplanned
        ]
        return "\n".join(lines)


def explain(
    model: Any,
    *inputs: Any,
    hardware: str | pathlib.Path | HardwareSpec | None = None,
    strict: bool = False,
    file: Any = None,
    **kwargs: Any,
) -> Explanation:
    """Prints what every product of one call runs as, its price, or why it fell back.

    The call is traced, not computed.

    Args:
      model: what `parallelize` returned: for linen the model (the first input is then the
        variables, as for `apply`), for nnx the module; or any function of arrays.
      *inputs: arguments of the call.
      hardware: the profile that prices the schedules; see `hardware_spec`. By default that
        of the ModelPlan on which the model runs; "tpu_v4" where there is none.
      strict: raise if a product of a layer or of a parameter runs off the plan and no rule
        says None, or a rule matches no layer.
      file: where to print; standard output by default.
      **kwargs: keyword arguments of the call.

    Raises:
      ValueError: with strict, the products that fall back and why; a profile that there
        is not.
      TypeError: a linen module that was not parallelized.
    """
    if isinstance(model, flax.linen.Module):
        raise TypeError(
            "a linen module runs nothing on a plan by itself; explain the model that parallelize "
            "returned"
        )
    if not callable(model) and not isinstance(model, ParallelModule):
        raise TypeError(f"explain takes a parallelized model or a function, got {model!r}")
    found = trace(model, inputs, kwargs)
    spec = hardware_spec(hardware or found.hardware or "tpu_v4")
    whole = tuple(_replicated(model, inputs, found))
    explanation = Explanation(
        trace=found,
        rows=tuple(_row(product, spec) for product in found.products),
        replicated=tuple((path, size) for path, size, planned in whole if planned),
        unplanned=tuple((path, size) for path, size, planned in whole if not planned),
        hardware=spec.name,
    )
    print(explanation, file=file)
    if strict:
        found.raise_fallbacks()
    return explanation


def _row(product: Product, hardware: HardwareSpec) -> Row:
    if product.plan is None:
        return Row(product=product)
    problem = of_one_replica(product.problem, product.plan, product.replicas)
    parts = algorithms.layer_problems(problem, product.plan.forward)
    times, sent = [], 0.0
    for name, part in parts.items():
        schedule = algorithms.schedule(part, getattr(product.plan, name), product.mesh_shape)
        sent += schedule.bytes_along("row") + schedule.bytes_along("col")
        try:
            times.append(cost.seconds(schedule, part, hardware).total_s)
        except ValueError:  # no rate for this dtype: the bytes are known all the same
            return dataclasses.replace(Row(product=product), sent_bytes=sent)
    return Row(product=product, forward_s=times[0], step_s=sum(times), sent_bytes=sent)


def _replicated(model: Any, inputs: tuple, found: Trace):
    """(path, bytes, whether planned) of kernels that are whole, where arrays are at hand."""
    tree = inputs[0] if isinstance(model, ParallelModule) and inputs else None
    if isinstance(model, nnx.Module):
        tree = nnx.state(model, nnx.Param)
    meshes = [p.mesh for p in found.products if p.plan is not None]
    if tree is None or not meshes:
        return
    shardings = Shardings(meshes[0], kernels(found.products, meshes[0]))
    unplanned = Shardings(meshes[0], tuple(fallback_kernels(found.fallbacks)))
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        kernel = shardings.kernel(names(keys))
        planned = kernel is not None and any(kernel.spec)
        if not is_concrete(leaf) or not (planned or unplanned.kernel(names(keys))):
            continue
        if not isinstance(leaf, jax.Array) or leaf.sharding.is_fully_replicated:
            yield "/".join(names(keys)), size_bytes(leaf), planned


def _cells(row: Row) -> tuple[str, ...]:
    product = row.product
    shapes = f"{_shape(product.lhs_shape)} x {_shape(product.rhs_shape)}"
    if product.plan is None:
        first = (product.reason or "").partition("\n")[0].rstrip(":")
        return (product.path, shapes, "", f"lax.dot_general: {first}", "", "", "")
    plan, problem = product.plan.forward, product.problem
    extents = f"{problem.m}, {problem.n}, {problem.k}"
    if product.trimmed:
        extents += f" (padded from {', '.join(map(str, product.trimmed))})"
    order, shape = product.mesh.axis_names, product.mesh_shape
    twin = order.index(plan.row_axis) > order.index(plan.col_axis)
    flow = plan.dataflow.value + (" twin" if twin else "")
    shape = MeshShape(shape.cols, shape.rows) if twin else shape
    runs = f"{plan.algorithm} {flow} S={plan.slice_count} on {shape}"
    if product.replicas > 1:
        runs += f" x {product.replicas} replicas"
    times = [_time(row.forward_s), _time(row.step_s)]
    return (product.path, shapes, extents, runs, *times, _bytes(row.sent_bytes))


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "no rate"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} B"
