"""Which layer of somebody else's model runs on which plan, by the layer's path.

A rule is a regular expression and what it chooses: the name of a layer in the plan ("qkv"),
a plan, or None, which leaves the layer as it is. The first rule that is found anywhere in a
path ("decoder/layers/3/self_attn/q_proj") decides. The default rules know the names that
common models give their layers; whoever has others writes rules in front of them:

    rules=[(r"experts/", None), (r"/mixer$", "ff1"), *DEFAULT_RULES]

A ModelPlan calls the MLP's products ff1 and ff2, or gate_up and down where it is gated;
the default rules find either.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping

from jax.sharding import AbstractMesh, Mesh

from meshslice_jax.dot_general import DotGeneral
from meshslice_jax.mesh import MeshShape
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.plan import GemmPlan, LayerPlan, as_layer_plan

Rule = tuple[str, "str | GemmPlan | LayerPlan | None"]

#: Names of layers in Flax's own attentions, transformers' Flax models (BERT, GPT-2, GPT-J,
#: GPT-NeoX, Llama, Mistral, Gemma, OPT, T5, ViT), and models in their manner.
DEFAULT_RULES: tuple[Rule, ...] = (
    (r"(^|/)(lm_head|embed_out|output_projection|decoder/logits)$", "lm_head"),
    (r"(^|/)(pooler/dense|pooler|classifier|score|seq_relationship|qa_outputs)$", None),
    (
        r"(^|/)(query|key|value|[qkv]|[qkv]_proj|qkv|qkv_proj|c_attn|query_key_value|in_proj)$",
        "qkv",
    ),
    (r"(^|/)(attention/output/dense|attention/dense|attn/c_proj|attn/proj)$", "out"),
    (r"(^|/)(SelfAttention|EncDecAttention|attention)/(wo|o)$", "out"),
    (r"(^|/)(out|o|o_proj|out_proj)$", "out"),
    (r"(^|/)(gate|up|gate_proj|up_proj|gate_up|gate_up_proj|wi|wi_\d|w1|w3)$", "ff1"),
    (r"(^|/)(fc1|fc_in|c_fc|ff1|lin1|linear1|dense_h_to_4h|intermediate/dense)$", "ff1"),
    (r"(^|/)(down|down_proj|wo|w2|fc2|fc_out|ff2|lin2|linear2|dense_4h_to_h)$", "ff2"),
    (r"(^|/)(mlp/c_proj|output/dense)$", "ff2"),
)
_OTHER_NAME = {"ff1": "gate_up", "ff2": "down", "gate_up": "ff1", "down": "ff2"}
#: The name of the one plan that is given for all layers.
_ANY = "*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What becomes of a layer.

    Attributes:
      op: the product that it is to run, or None: it stays as it is.
      reason: why it stays as it is.
      chosen: whether a rule says so, rather than the lack of one.
    """

    op: DotGeneral | None = None
    reason: str | None = None
    chosen: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """Rules, plans and how to run them; hashable, equal for equal settings.

    Attributes:
      rules: (regular expression, layer of the plan, plan or None), in order.
      plans: (layer of the plan, its plan); "*" is one plan for every layer.
      mesh: the mesh, or None for the one in context.
      pad: see `dot_general`.
      on_unsupported: see `dot_general`.
      hardware: name of the profile that a ModelPlan was made for.
    """

    rules: tuple[Rule, ...]
    plans: tuple[tuple[str, LayerPlan], ...]
    mesh: Mesh | AbstractMesh | None
    pad: bool
    on_unsupported: str
    hardware: str | None = None

    def unmatched(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Regular expressions that are found in none of the paths, the default rules apart."""
        own = [pattern for pattern, target in self.rules if (pattern, target) not in DEFAULT_RULES]
        return tuple(p for p in own if not any(re.search(p, path) for path in paths))

    def choose(self, path: str, *, hooked: bool) -> Choice:
        """What becomes of the layer at `path`.

        Args:
          path: names from the root, joined by "/".
          hooked: whether the layer takes a product as an argument.
        """
        return _choose(self, path, hooked)

    def op(self, plan: LayerPlan) -> DotGeneral:
        """A plan as a product."""
        return DotGeneral(
            plan=plan, mesh=self.mesh, pad=self.pad, on_unsupported=self.on_unsupported
        )


@functools.lru_cache(maxsize=4096)
def _choose(assignment: Assignment, path: str, hooked: bool) -> Choice:
    plans = dict(assignment.plans)
    for pattern, target in assignment.rules:
        if not re.search(pattern, path):
            continue
        if target is None:
            return Choice(reason=f"rule {pattern!r} leaves it as it is", chosen=True)
        if isinstance(target, LayerPlan):
            return Choice(op=assignment.op(target))
        for name in (target, _OTHER_NAME.get(target), _ANY):
            if name in plans:
                return Choice(op=assignment.op(plans[name]))
        return Choice(reason=f"the plan has no layer {target!r}")
    if hooked and _ANY in plans:
        return Choice(op=assignment.op(plans[_ANY]))
    return Choice(reason="no rule matches its path")


def assign(
    plan: ModelPlan | Mapping[str, GemmPlan | LayerPlan] | GemmPlan | LayerPlan,
    mesh: Mesh | AbstractMesh | None,
    *,
    rules: list[Rule] | None = None,
    batch_axes: tuple[str, ...] | None = None,
    pad: bool = False,
    on_unsupported: str = "error",
) -> Assignment:
    """An Assignment from what users write; the arguments are those of `parallelize`.

    Raises:
      ValueError: a ModelPlan of another mesh shape, plans for axes that the mesh lacks, a
        rule that names a layer which the plan lacks, or that is no regular expression.
      TypeError: something that is no plan.
    """
    plans = _plans(plan, mesh)
    given = DEFAULT_RULES if rules is None else tuple((str(p), target) for p, target in rules)
    checked = tuple((p, _target(p, target, plans, batch_axes, mesh)) for p, target in given)
    if mesh is not None:
        direct = {f"rule {p!r}": t for p, t in checked if isinstance(t, LayerPlan)}
        _check_axes(plans | direct, mesh)
    return Assignment(
        rules=checked,
        plans=tuple((name, _batched(found, batch_axes, mesh)) for name, found in plans.items()),
        mesh=mesh,
        pad=pad,
        on_unsupported=on_unsupported,
        hardware=plan.hardware if isinstance(plan, ModelPlan) else None,
    )


def with_axes(plan: ModelPlan, row: str, col: str) -> dict[str, LayerPlan]:
    """The plans of a ModelPlan's layers for a mesh that calls "row" and "col" otherwise.

    Args:
      plan: of a mesh with the axes "row" and "col".
      row: what the mesh calls the first.
      col: and the second.

    Returns:
      Layer -> plan, as `parallelize` takes it.
    """
    new = {"row": row, "col": col}
    return {
        name: _each_pass(
            layer, lambda one: {"row_axis": new[one.row_axis], "col_axis": new[one.col_axis]}
        )
        for name, layer in plan.layers.items()
    }


def _each_pass(plan: LayerPlan, changes: Callable[[GemmPlan], dict]) -> LayerPlan:
    """A LayerPlan with some fields of its three passes changed."""
    passes = {name: getattr(plan, name) for name in ("forward", "grad_lhs", "grad_rhs")}
    return LayerPlan(
        **{name: dataclasses.replace(one, **changes(one)) for name, one in passes.items()}
    )


def _check_axes(plans: Mapping[str, LayerPlan], mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError if a plan needs an axis that the mesh lacks."""
    for name, plan in plans.items():
        one = plan.forward
        if not {one.row_axis, one.col_axis, *one.batch_axes} <= set(mesh.axis_names):
            batch = f", batch_axes={one.batch_axes!r}" if one.batch_axes else ""
            raise ValueError(
                f"the plan of {'every layer' if name == _ANY else name} has "
                f"row_axis={one.row_axis!r}, col_axis={one.col_axis!r}{batch}, and the mesh has "
                f"the axes {', '.join(map(repr, mesh.axis_names))}; name the mesh's axes so, set "
                "row_axis and col_axis of the GemmPlan, or pass "
                "ms.nn.with_axes(model_plan, row=..., col=...) for a ModelPlan"
            )


def _plans(plan, mesh) -> dict[str, LayerPlan]:
    if isinstance(plan, ModelPlan):
        if mesh is None:
            return dict(plan.layers)
        _check_axes(plan.layers, mesh)
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        if MeshShape(sizes["row"], sizes["col"]) != plan.mesh_shape:
            raise ValueError(
                f"the plan is for a {plan.mesh_shape} mesh with axes 'row' and 'col', and this "
                f"one has {sizes}; make that mesh, tune for this one, or pass plan.layers to run "
                "the layers' plans here all the same"
            )
        return dict(plan.layers)
    if isinstance(plan, Mapping):
        return {str(name): as_layer_plan(found) for name, found in plan.items()}
    return {_ANY: as_layer_plan(plan)}


def _target(pattern: str, target, plans, batch_axes, mesh):
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"rule {pattern!r} is no regular expression: {error}") from None
    if target is None:
        return None
    if not isinstance(target, str):
        return _batched(as_layer_plan(target), batch_axes, mesh)
    # One plan for all layers has them under every name that rules use for layers.
    known = set(plans) | ({t for _, t in DEFAULT_RULES if t} if _ANY in plans else set())
    if (pattern, target) not in DEFAULT_RULES and not known & {target, _OTHER_NAME.get(target)}:
        having = "is one for all layers, '*'" if _ANY in plans else f"has {', '.join(plans)}"
        raise ValueError(f"rule {pattern!r} asks for layer {target!r}, and the plan {having}")
    return target


def _batched(plan: LayerPlan, batch_axes: tuple[str, ...] | None, mesh) -> LayerPlan:
    """The plan with the data axes of the mesh, unless it names its own."""
    forward = plan.forward
    if forward.batch_axes:
        return plan
    if batch_axes is None:
        names = () if mesh is None else mesh.axis_names
        batch_axes = tuple(n for n in names if n not in (forward.row_axis, forward.col_axis))
    return _each_pass(plan, lambda one: {"batch_axes": tuple(batch_axes)})
