"""A plan for training on a mesh that is given: tuned, and one under which attention is local.

The tuner knows the FC layers, not what lies between them. The fastest plan may leave
tokens over more chips than there are sequences, or heads over more than there are heads;
such a plan would be refused. So this asks again, with every layer the way round that rows
hold tokens, then the other way, and takes the first plan that the model can use.
"""

from jax.sharding import Mesh

from meshslice_jax.autotune import tune
from meshslice_jax.mesh import MeshShape
from meshslice_jax.model_plan import ModelPlan
from meshslice_jax.model_shape import ModelShape
from meshslice_jax.nn.layout import block_layout

#: Mesh axes of tokens and features in every layer, or whatever is fastest.
_WAYS = ({}, {"row_axis": "row", "col_axis": "col"}, {"row_axis": "col", "col_axis": "row"})


def byte_gpt(hidden: int, heads: int, layers: int, seq_len: int) -> ModelShape:
    """A GPT over bytes, with an MLP four times as wide and tied embeddings.

    Raises:
      ValueError: heads that do not divide hidden, or a size that is not positive.
    """
    if heads < 1 or hidden % heads:
        raise ValueError(f"hidden = {hidden} is not divisible by heads = {heads}")
    return ModelShape(
        name=f"gpt-bytes-{layers}x{hidden}",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        layers=layers,
        vocab=256,
        gated=False,
        tied_embeddings=True,
        seq_len=seq_len,
        positions="learned",
    )


def training_plan(
    model: ModelShape,
    mesh: Mesh,
    *,
    batch: int,
    seq_len: int,
    dtype: str = "float32",
    algorithm: str | None = None,
    hardware: str = "tpu_v4",
) -> ModelPlan:
    """The fastest plan of a model on a mesh that `nn.GPT` can use.

    Args:
      model: the model.
      mesh: with axes "row" and "col", and others for replicas.
      batch: sequences of a step, over all replicas.
      seq_len: tokens of a sequence.
      dtype: of activations.
      algorithm: the one to use; None leaves it to the tuner.
      hardware: profile by which plans are compared.

    Raises:
      ValueError: no plan runs on this mesh, with the reason.
    """
    shape = MeshShape(mesh.shape["row"], mesh.shape["col"])
    refused = None
    for way in _WAYS:
        plan = tune(
            model,
            mesh.size,
            hardware=hardware,
            batch=batch,
            seq_len=seq_len,
            dtype=dtype,
            data_parallel=mesh.size // shape.num_chips,
            algorithm=algorithm,
            mesh_shape=shape,
            overrides=dict.fromkeys(model.fc_widths, way) if way else None,
        )
        try:
            block_layout(plan, mesh)
            return plan
        except ValueError as error:
            refused = refused or error
    raise refused
