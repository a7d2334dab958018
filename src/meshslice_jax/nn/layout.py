"""Where everything of a decoder block lies on the mesh, read off a `ModelPlan`.

The placements of the FC layers' inputs and outputs are the plan's. What lies between the
layers follows from them, so that nothing else has to move:

    stream      the residual stream x[batch, seq, hidden]: where most FC layers want their
                input or leave their output
    attention   where qkv leaves its output: batch over the axes of m, heads over those of
                n. A chip then holds whole sequences of whole heads, and attention is local
    norms       hidden over the stream's axes: one sum of two numbers a token
    embedding   [vocab, hidden], vocab over the stream's feature axes and hidden over its
                token axes: what the output layer, an OS product, wants as its rhs

With rows and cols as token and feature axes (an OS layer) that is batch over rows and heads
over cols. Tokens are m: on every axis that cuts m, whole sequences are cut off, so the
batch must divide by it. What does not fit is refused, all of it at once.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshslice_jax.collectives import Axis
from meshslice_jax.dot_general import dot_general
from meshslice_jax.gemm import placements
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.model_shape import ModelShape
from meshslice_jax.plan import GemmPlan, LayerPlan
from meshslice_jax.prediction import FrozenMapping
from meshslice_jax.site import axes_in, spec_entry, with_auto_axes

#: PartitionSpec entries of tokens and features.
Place = tuple[object, object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Placements of a model's activations and weights; static and hashable.

    Attributes:
      shape: the model.
      mesh: the mesh, with Auto axes.
      batch_axes: mesh axes of the data-parallel replicas.
      layers: FC layer -> its plan, with the batch axes in it.
      head: the plan of the output layer.
      stream: entries for tokens and features of the residual stream.
      attention: entries for tokens and heads between qkv and out.
      product: `dot_general`, or what else gives a product for (plan, mesh=).
    """

    shape: ModelShape
    mesh: Mesh
    batch_axes: tuple[str, ...]
    layers: FrozenMapping
    head: LayerPlan
    stream: Place
    attention: Place
    product: Callable = dot_general

    def size(self, entry) -> int:
        """The number of shards that an entry of a PartitionSpec makes."""
        return self.axis(entry).size

    def axis(self, entry) -> Axis:
        """The mesh axes of an entry of a PartitionSpec as one direction."""
        names = axes_in(entry)
        return Axis(names, tuple(self.mesh.shape[name] for name in names))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A PartitionSpec on this mesh."""
        return NamedSharding(self.mesh, spec)

    def place(self, x: jax.Array, place: Place) -> jax.Array:
        """An activation [batch, seq, features], with tokens and features as `place` says."""
        tokens, features = place
        return jax.lax.with_sharding_constraint(
            x, self.sharding(PartitionSpec(tokens, None, features))
        )

    def within_replica(self, entry):
        """An entry for tokens without the axes of the replicas: where weights may lie."""
        return spec_entry(tuple(axis for axis in axes_in(entry) if axis not in self.batch_axes))

    def check_call(self, batch: int) -> None:
        """Returns if a batch can run here.

        Raises:
          ValueError: whole sequences of it cannot be cut off everywhere.
          NotImplementedError: see `check_context`.
        """
        check_context()
        if faults := _batch_faults(self, batch):
            raise ValueError(_message(self.mesh, faults))


def check_context() -> None:
    """Returns if no mesh with Explicit axes is in context.

    Raises:
      NotImplementedError: there is one.
    """
    context = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in context.axis_types:
        raise NotImplementedError(
            f"the mesh in context (jax.set_mesh) has axis_types {context.axis_types}; this model "
            "places its activations by constraints on Auto axes: make and call it outside of that "
            "context, or under jax.set_mesh(ms.make_mesh(...))"
        )


def block_layout(plan: ModelPlan, mesh: Mesh, *, product: Callable = dot_general) -> BlockLayout:
    """Reads the placements off a plan.

    Args:
      plan: of the model; its mesh shape is that of the axes "row" and "col".
      mesh: the mesh; axes other than "row" and "col" hold the plan's data-parallel
        replicas. Of one with Explicit axes the layout has the devices, as an Auto mesh.
      product: of the FC layers and the output layer: gives, for (plan, mesh=), a callable
        with `lax.dot_general`'s signature.

    Raises:
      ValueError: a mesh whose sizes are not the plan's, or a model that does not fit it.
      NotImplementedError: a mesh with Explicit axes in context, or a plan with overlap that
        exists in the simulator only.
    """
    check_context()
    _check_mesh(plan, mesh)
    mesh = with_auto_axes(mesh)
    batch_axes = tuple(axis for axis in mesh.axis_names if axis not in ("row", "col"))
    layers = {name: _with_batch_axes(layer, batch_axes) for name, layer in plan.layers.items()}
    stream = _stream(layers, plan.model.branches)
    layout = BlockLayout(
        shape=plan.model,
        mesh=mesh,
        batch_axes=batch_axes,
        layers=FrozenMapping(layers),
        head=_head_plan(stream, batch_axes),
        stream=stream,
        attention=tuple(placements(layers["qkv"])[2]),
        product=product,
    )
    if faults := _faults(layout, plan.batch):
        raise ValueError(_message(mesh, faults))
    return layout


def _faults(layout: BlockLayout, batch: int) -> list[str]:
    """All that keeps a model from lying on the mesh as the layout says."""
    shape, (tokens, features) = layout.shape, layout.stream
    wanted = [
        ("kv_heads", shape.kv_heads, layout.attention[1], "whole groups of heads"),
        ("vocab", shape.vocab, features, "rows of the embedding"),
        ("hidden", shape.hidden, features, "features of the stream"),
        ("hidden", shape.hidden, layout.within_replica(tokens), "columns of the embedding"),
    ]
    if shape.gated:
        wanted.append(("ffn", shape.ffn, placements(layout.layers["gate_up"])[2][1], "gates"))
    return _batch_faults(layout, batch) + [
        _fault(name, extent, layout, entry, what)
        for name, extent, entry, what in wanted
        if extent % layout.size(entry)
    ]


def _batch_faults(layout: BlockLayout, batch: int) -> list[str]:
    entries = {layout.stream[0]: "the stream"}
    for name, layer in layout.layers.items():
        lhs, _, out = placements(layer)
        entries.setdefault(lhs[0], f"the input of {name}")
        entries.setdefault(out[0], f"the output of {name}")
    return [
        _fault("batch", batch, layout, entry, f"whole sequences of {what}")
        for entry, what in entries.items()
        if batch % layout.size(entry)
    ]


def _fault(name: str, extent: int, layout: BlockLayout, entry, what: str) -> str:
    axes = "*".join(axes_in(entry))
    return (
        f"{name} = {extent} is not divisible by mesh axis {axes!r} of size {layout.size(entry)} "
        f"({what})"
    )


def _message(mesh: Mesh, faults: list[str]) -> str:
    lines = [f"the model does not fit the mesh {dict(mesh.shape)} as planned:"]
    lines += [f"  - {fault}" for fault in faults]
    lines.append(
        "  use a batch, heads and a vocabulary that divide (a vocabulary may be padded: "
        "dataclasses.replace(model, vocab=...)), or a plan for another mesh_shape"
    )
    return "\n".join(lines)


def _check_mesh(plan: ModelPlan, mesh: Mesh) -> None:
    if plan.modelled_only:
        raise NotImplementedError(
            "the plan's block_schedule overlaps products in ways that only the simulator knows; "
            "tune with allow_modelled=False"
        )
    sizes = dict(mesh.shape)
    found = sizes.get("row"), sizes.get("col")
    replicas = math.prod(size for axis, size in sizes.items() if axis not in ("row", "col"))
    if found != tuple(plan.mesh_shape) or replicas != plan.data_parallel:
        raise ValueError(
            f"the plan is for a {plan.mesh_shape} mesh with axes 'row' and 'col' and "
            f"{plan.data_parallel} replicas on further axes, and the mesh is {sizes}; make it with "
            'ms.make_mesh(plan.mesh_shape), or ms.make_mesh((data_parallel, rows, cols), ("data", '
            '"row", "col"))'
        )


def _with_batch_axes(layer: LayerPlan, batch_axes: tuple[str, ...]) -> LayerPlan:
    parts = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return LayerPlan(
        **{name: dataclasses.replace(part, batch_axes=batch_axes) for name, part in parts.items()}
    )


def _stream(layers: dict[str, LayerPlan], branches: tuple[tuple[str, ...], ...]) -> Place:
    """The placement of the residual stream from which the fewest branches have to move.

    Norms and the output layer want tokens on some axis; a layer that leaves them whole (1D
    tensor parallelism, split over features) is moved to where the others are.
    """
    ends = [tuple(placements(layers[branch[0]])[0]) for branch in branches]
    ends += [tuple(placements(layers[branch[-1]])[2]) for branch in branches]
    batch_axes = layers[branches[0][0]].forward.batch_axes
    usable = [end for end in ends if set(axes_in(end[0])) - set(batch_axes)]
    plain = (spec_entry((*batch_axes, "row")), "col")
    return max(dict.fromkeys([*usable, plain]), key=ends.count)


def _head_plan(stream: Place, batch_axes: tuple[str, ...]) -> LayerPlan:
    """The output layer: the logits, its largest matrix, stay; whole gathers of the others."""
    tokens = tuple(axis for axis in axes_in(stream[0]) if axis not in batch_axes)
    row, col = tokens + axes_in(stream[1])
    algorithm = "fsdp" if len(tokens) == 2 else "collective"
    plan = GemmPlan(
        algorithm=algorithm, dataflow="os", row_axis=row, col_axis=col, batch_axes=batch_axes
    )
    return LayerPlan(forward=plan)
