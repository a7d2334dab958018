"""One training step as a compiled function of the state; the state as plain dicts.

The state is {"weights", "optimizer", "step"}: the weights by layer and name, in natural
shapes, and optax's own tree beside them with its moments placed as their weights. Nothing
in it knows the mesh, so it can be saved on one and restored on another.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshslice_jax.dot_general import dot_general
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.nn import GPT
from meshslice_jax.train.settings import TrainSettings

#: {"weights": ..., "optimizer": ..., "step": ...}
State = dict[str, Any]
_DECAYED = ("kernel", "table")


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipping."""
    warmup = min(settings.warmup_steps, settings.steps)
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else settings.learning_rate,
        peak_value=settings.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(settings.steps, warmup + 1),
        end_value=settings.final_fraction * settings.learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(rate, b2=0.95, weight_decay=settings.weight_decay, mask=_decayed),
    )


def _decayed(weights):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in _DECAYED, weights)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A model, its optimizer and where their arrays lie; `make_trainer` makes it.

    Attributes:
      settings: of the run.
      model: random numbers -> the model.
      graph: the model without its arrays.
      structure: the tree of its arrays as nnx wants it.
      optimizer: optax's.
      abstract: shapes, dtypes and shardings of the state, for restoring one.
      data: sharding of pieces [batch, seq + 1].
    """

    settings: TrainSettings
    model: Callable[[nnx.Rngs], GPT]
    graph: nnx.GraphDef
    structure: Any
    optimizer: optax.GradientTransformation
    abstract: State
    data: NamedSharding

    @property
    def shardings(self) -> State:
        """Where the arrays of the state lie."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    def init(self) -> State:
        """The first state, every array made where it belongs."""
        model = self.model(nnx.Rngs(self.settings.seed))
        weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        make = jax.jit(self.optimizer.init, out_shardings=self.shardings["optimizer"])
        step = jax.jit(lambda: jnp.int32(0), out_shardings=self.shardings["step"])()
        return {"weights": weights, "optimizer": make(weights), "step": step}

    def loss(self, weights, pieces: jax.Array) -> jax.Array:
        """The mean loss in nats of pieces[batch, seq + 1]."""
        # Dicts and nnx states order their leaves alike, by name.
        state = jax.tree.unflatten(self.structure, jax.tree.leaves(weights))
        return nnx.merge(self.graph, state).loss(pieces[:, :-1], pieces[:, 1:])

    @functools.cached_property
    def step(self) -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
        """(state, pieces) -> (the next state, the loss before it); the state is donated."""

        def step(state: State, pieces: jax.Array):
            loss, gradient = jax.value_and_grad(self.loss)(state["weights"], pieces)
            with jax.numpy_dtype_promotion("standard"):  # optax multiplies floats and counts
                updates, optimizer = self.optimizer.update(
                    gradient, state["optimizer"], state["weights"]
                )
            weights = optax.apply_updates(state["weights"], updates)
            return {"weights": weights, "optimizer": optimizer, "step": state["step"] + 1}, loss

        scalar = self.shardings["step"]
        return jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, scalar))

    @functools.cached_property
    def evaluate(self) -> Callable[[Any, jax.Array], jax.Array]:
        """(weights, pieces) -> the loss."""
        return jax.jit(self.loss, out_shardings=self.shardings["step"])


def make_trainer(
    plan: ModelPlan, mesh: Mesh, settings: TrainSettings, *, product: Callable = dot_general
) -> Trainer:
    """A trainer of a plan's model.

    Args:
      plan: of the model.
      mesh: its mesh, see `nn.layout.block_layout`.
      settings: of the run.
      product: of the FC layers; see `block_layout`.

    Raises:
      ValueError: the model does not fit the mesh as planned.
    """

    def model(rngs: nnx.Rngs) -> GPT:
        return GPT(
            plan,
            mesh,
            rngs=rngs,
            dtype=settings.dtype,
            remat=settings.remat,
            product=product,
        )

    shapes = nnx.eval_shape(lambda: model(nnx.Rngs(0)))
    graph, state = nnx.split(shapes, nnx.Param)
    layout = shapes.layout
    placed = jax.tree.map(
        lambda one: _abstract(one.get_value(), layout.sharding(one.spec)),
        state,
        is_leaf=lambda one: isinstance(one, nnx.Variable),
    )
    weights = nnx.to_pure_dict(placed)
    optimizer = make_optimizer(settings)
    everywhere = layout.sharding(PartitionSpec())
    return Trainer(
        settings=settings,
        model=model,
        graph=graph,
        structure=jax.tree.structure(state),
        optimizer=optimizer,
        abstract={
            "weights": weights,
            "optimizer": _abstract_optimizer(optimizer, weights, everywhere),
            "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
        },
        data=layout.sharding(PartitionSpec(layout.stream[0], None)),
    )


def _abstract(leaf, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _abstract_optimizer(optimizer, weights, everywhere: NamedSharding):
    """The optimizer's tree; what it keeps for each weight lies where the weight does."""
    return optax.tree_map_params(
        optimizer,
        lambda leaf, weight: _abstract(leaf, weight.sharding),
        jax.eval_shape(optimizer.init, weights),
        weights,
        transform_non_params=lambda leaf: _abstract(leaf, everywhere),
    )
