"""The sizes of a model, and the products of one transformer block.

A `ModelShape` holds the few numbers that fix the fully connected (FC) layers of a
decoder block: widths, heads, depth, vocabulary. `fc_layers` turns them into named
products `out[m, n] = lhs[m, k] @ rhs[k, n]` with m = tokens (batch x sequence),
k = the layer's input width and n = its output width:

    plain MLP (GPT)     qkv      hidden -> (heads + 2 kv_heads) head_dim
                        out      heads head_dim -> hidden
                        ff1      hidden -> ffn
                        ff2      ffn -> hidden
    gated MLP (Llama)   qkv, out as above
                        gate_up  hidden -> 2 ffn
                        down     ffn -> hidden

Layers that read the same input are fused into one product, as the paper does with
query, key and value: qkv has the columns of q, k and v side by side, gate_up those of
gate and up. One gather of the input then serves them all. Where a checkpoint stores
them apart, `qkv_layout` says so. (MeshSlice, ISCA 2025, section 4 for the GPT layers.)
"""

import dataclasses

from meshslice_jax.problem import GemmProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer.

    Attributes:
      name: what the command line and plans call it.
      hidden: width of the residual stream.
      heads: query heads.
      kv_heads: key and value heads; fewer than `heads` is grouped-query attention.
      head_dim: width of one head; heads * head_dim need not be `hidden`.
      ffn: inner width of the MLP (of each half where it is gated).
      layers: number of blocks.
      vocab: rows of the embedding table.
      gated: whether the MLP is gated (gate and up), as in Llama.
      tied_embeddings: whether the output layer shares the embedding table.
      seq_len: the sequence length that the model was trained with.
      positions: "learned", a table of seq_len positions, so that no sequence can be longer; or
        "rotary", computed for any length.
      qkv_layout: how its public checkpoints store the attention inputs: "fused"
        (q | k | v side by side in one matrix) or "split" (one matrix each).
      source: where the numbers come from.

    Raises:
      ValueError: a size that is not positive, kv_heads that do not divide heads, or a word
        that is none of a field's.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int
    vocab: int
    gated: bool
    tied_embeddings: bool
    seq_len: int
    positions: str = "rotary"
    qkv_layout: str = "split"
    source: str = ""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ValueError(
                    f"model {self.name!r}: {field.name} must be a positive integer, got {value!r}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model {self.name!r}: kv_heads {self.kv_heads} does not divide heads {self.heads}"
            )
        if self.positions not in ("learned", "rotary"):
            raise ValueError(
                f"model {self.name!r}: positions {self.positions!r} is not 'learned' or 'rotary'"
            )
        if self.qkv_layout not in ("fused", "split"):
            raise ValueError(
                f"model {self.name!r}: qkv_layout {self.qkv_layout!r} is not 'fused' or 'split'"
            )

    def check_seq_len(self, seq_len: int) -> None:
        """Returns if the model has positions for a sequence of so many tokens.

        Raises:
          ValueError: it has learned fewer.
        """
        if self.positions == "learned" and seq_len > self.seq_len:
            raise ValueError(
                f"seq_len {seq_len} is more than the {self.seq_len} positions that model "
                f"{self.name!r} has learned; use seq_len {self.seq_len} or less, and a larger "
                "batch for as many tokens"
            )

    @property
    def fc_widths(self) -> dict[str, tuple[int, int]]:
        """Input and output width (k, n) of each FC layer of a block, in order."""
        attention = self.heads * self.head_dim
        qkv = attention + 2 * self.kv_heads * self.head_dim
        widths = {"qkv": (self.hidden, qkv), "out": (attention, self.hidden)}
        if self.gated:
            return widths | {
                "gate_up": (self.hidden, 2 * self.ffn),
                "down": (self.ffn, self.hidden),
            }
        return widths | {"ff1": (self.hidden, self.ffn), "ff2": (self.ffn, self.hidden)}

    @property
    def branches(self) -> tuple[tuple[str, ...], ...]:
        """The FC layers of a block between two additions to the residual stream."""
        first, second, third, fourth = self.fc_widths
        return (first, second), (third, fourth)

    @property
    def block_weights(self) -> int:
        """Weights of the FC layers of one block."""
        return sum(k * n for k, n in self.fc_widths.values())

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding table and of the output layer where it is apart."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def weights(self) -> int:
        """FC and embedding weights of the model (norms, biases and positions are left out)."""
        return self.layers * self.block_weights + self.embedding_weights


def fc_layers(shape: ModelShape, tokens: int, dtype: str = "bfloat16") -> dict[str, GemmProblem]:
    """The products of one block, by layer name, in the order in which they run.

    Args:
      shape: the model.
      tokens: batch x sequence length, the m of every layer.
      dtype: dtype of all three matrices.
    """
    return {
        name: GemmProblem.uniform(m=tokens, n=n, k=k, dtype=dtype)
        for name, (k, n) in shape.fc_widths.items()
    }
