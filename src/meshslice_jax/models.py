"""Model shapes as data, and the products of one transformer block.

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
import json
import os
import types

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
      qkv_layout: how its public checkpoints store the attention inputs: "fused"
        (q | k | v side by side in one matrix) or "split" (one matrix each).
      source: where the numbers come from.

    Raises:
      ValueError: a size that is not positive, or kv_heads that do not divide heads.
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
        if self.qkv_layout not in ("fused", "split"):
            raise ValueError(
                f"model {self.name!r}: qkv_layout {self.qkv_layout!r} is not 'fused' or 'split'"
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


def model_layers(
    source, *, batch: int = 1, seq_len: int | None = None, dtype: str = "float32"
) -> dict[str, GemmProblem]:
    """`fc_layers` of a model given by name, path or record.

    Args:
      source: as for `model`.
      batch: sequences.
      seq_len: tokens of a sequence; None is the model's own.
      dtype: dtype of all three matrices.
    """
    shape = model(source)
    return fc_layers(shape, batch * (seq_len or shape.seq_len), dtype)


def model(source: "str | os.PathLike | ModelShape") -> ModelShape:
    """The model of a name in `MODELS`, of a Hugging Face config.json, or a record as it is.

    Args:
      source: a name, a path to a config.json or to a folder that holds one, or a ModelShape.

    Raises:
      ValueError: a name that is not there, or a config that cannot be read.
    """
    if isinstance(source, ModelShape):
        return source
    if isinstance(source, str) and source in MODELS:
        return MODELS[source]
    path = os.fspath(source)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    if os.path.isfile(path):
        return read_config(path)
    raise ValueError(f"unknown model {path!r}: no such file, and not one of {', '.join(MODELS)}")


def _gpt(name: str, layers: int, hidden: int, heads: int, head_dim: int, source: str) -> ModelShape:
    """A GPT block: as many kv heads as heads, ffn = 4 hidden, GPT-2's vocabulary."""
    return ModelShape(
        name=name,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=4 * hidden,
        layers=layers,
        vocab=50257,
        gated=False,
        tied_embeddings=True,
        seq_len=2048,
        qkv_layout="fused",
        source=source,
    )


def _gated(
    name, layers, hidden, heads, kv_heads, ffn, vocab, seq_len, source, head_dim=128, tied=False
) -> ModelShape:
    """A Llama-like block: gated MLP, grouped-query attention."""
    return ModelShape(
        name=name,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        layers=layers,
        vocab=vocab,
        gated=True,
        tied_embeddings=tied,
        seq_len=seq_len,
        source=source,
    )


_GPT3 = "Brown et al. 2020, Table 2.1; vocabulary of GPT-2"
_LLAMA2 = "Touvron et al. 2023 (Llama 2) and the config.json of meta-llama/Llama-2"
_LLAMA3 = "Grattafiori et al. 2024 (Llama 3), Table 3"
_MISTRAL = "Jiang et al. 2023, Table 1"
_QWEN2 = "Yang et al. 2024 (Qwen2), Table 1, and the config.json of Qwen/Qwen2"
_GEMMA = "Gemma Team 2024, Table 1 (its feed-forward width counts both halves), config.json"

#: Name -> shape of the models that need no config file.
MODELS = types.MappingProxyType(
    {
        shape.name: shape
        for shape in (
            _gpt("gpt3-125m", 12, 768, 12, 64, _GPT3),
            _gpt("gpt3-350m", 24, 1024, 16, 64, _GPT3),
            _gpt("gpt3-760m", 24, 1536, 16, 96, _GPT3),
            # The table prints 24 heads of 128, which is not the width 2048 of its own row.
            _gpt("gpt3-1.3b", 24, 2048, 16, 128, _GPT3 + "; 16 heads for its 24, see models.py"),
            _gpt("gpt3-2.7b", 32, 2560, 32, 80, _GPT3),
            _gpt("gpt3-6.7b", 32, 4096, 32, 128, _GPT3),
            # The table prints 5140, which is not its 40 heads of 128.
            _gpt("gpt3-13b", 40, 5120, 40, 128, _GPT3 + "; width 5120 for its 5140"),
            _gpt("gpt3-175b", 96, 12288, 96, 128, _GPT3),
            # Smith et al. have 128 heads of 160; the FC layers are the same.
            _gpt(
                "megatron-530b",
                105,
                20480,
                160,
                128,
                "Smith et al. 2022 (layers, width); heads as in MeshSlice, ISCA 2025, section 4",
            ),
            _gated("llama2-7b", 32, 4096, 32, 32, 11008, 32000, 4096, _LLAMA2),
            _gated("llama2-13b", 40, 5120, 40, 40, 13824, 32000, 4096, _LLAMA2),
            _gated("llama2-70b", 80, 8192, 64, 8, 28672, 32000, 4096, _LLAMA2),
            _gated("llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, _LLAMA3),
            _gated("llama3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, _LLAMA3),
            _gated("llama3-405b", 126, 16384, 128, 8, 53248, 128256, 8192, _LLAMA3),
            _gated("mistral-7b", 32, 4096, 32, 8, 14336, 32000, 8192, _MISTRAL),
            _gated("qwen2-7b", 28, 3584, 28, 4, 18944, 152064, 32768, _QWEN2),
            _gated("qwen2-72b", 80, 8192, 64, 8, 29568, 152064, 32768, _QWEN2),
            _gated(
                "gemma-2b", 18, 2048, 8, 1, 16384, 256000, 8192, _GEMMA, head_dim=256, tied=True
            ),
            _gated(
                "gemma-7b", 28, 3072, 16, 16, 24576, 256000, 8192, _GEMMA, head_dim=256, tied=True
            ),
        )
    }
)


def read_config(path: str | os.PathLike) -> ModelShape:
    """Reads a Hugging Face config.json of gpt2, llama, mistral, qwen2 or gemma.

    Raises:
      ValueError: the file is not JSON, its model_type is not one of these, or a field is
        missing or of the wrong kind; the message names the file and the field.
    """
    with open(path, encoding="utf-8") as file:
        try:
            config = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a config.json holds an object, got {type(config).__name__}")
    kind = config.get("model_type")
    if kind not in _READERS:
        raise ValueError(
            f"{path}: unknown architecture model_type={kind!r} "
            f"(architectures={config.get('architectures')!r}); there are {', '.join(_READERS)}"
        )
    return _READERS[kind](_Fields(path, kind, config))


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A config whose fields are read with errors that name them."""

    path: str | os.PathLike
    kind: str
    values: dict

    @property
    def name(self) -> str:
        """The model's own name, or the folder that its config lies in."""
        folder = os.path.basename(os.path.dirname(os.path.abspath(self.path)))
        return self.values.get("_name_or_path") or folder or self.kind

    def size(self, field: str, default: int | None = None) -> int:
        """A positive integer; absent or null is `default`, or an error without one."""
        value = self.values.get(field)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.path}: field {field!r} is missing ({self.kind} needs it)")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{self.path}: field {field!r} must be a positive integer, got {value!r}"
            )
        return value

    def flag(self, field: str, default: bool) -> bool:
        """A boolean; absent or null is `default`."""
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: field {field!r} must be true or false, got {value!r}")
        return value


def _read_gpt2(config: _Fields) -> ModelShape:
    hidden, heads = config.size("n_embd"), config.size("n_head")
    if hidden % heads:
        raise ValueError(
            f"{config.path}: field 'n_head' = {heads} does not divide 'n_embd' = {hidden}"
        )
    return ModelShape(
        name=config.name,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config.size("n_inner", 4 * hidden),
        layers=config.size("n_layer"),
        vocab=config.size("vocab_size"),
        gated=False,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        seq_len=config.size("n_positions"),
        qkv_layout="fused",
        source=os.fspath(config.path),
    )


def _read_gated(config: _Fields) -> ModelShape:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    # Only Llama's own default is "as many as heads"; elsewhere it depends on the version.
    kv_heads = config.size("num_key_value_heads", heads if config.kind == "llama" else None)
    if config.kind == "gemma":
        head_dim = config.size("head_dim")
    elif config.values.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"{config.path}: field 'head_dim' is missing and 'num_attention_heads' = {heads} "
            f"does not divide 'hidden_size' = {hidden}"
        )
    else:
        head_dim = config.size("head_dim", hidden // heads)
    return ModelShape(
        name=config.name,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.size("intermediate_size"),
        layers=config.size("num_hidden_layers"),
        vocab=config.size("vocab_size"),
        gated=True,
        tied_embeddings=config.flag("tie_word_embeddings", config.kind == "gemma"),
        seq_len=config.size("max_position_embeddings"),
        source=os.fspath(config.path),
    )


_READERS = types.MappingProxyType(
    {
        "gpt2": _read_gpt2,
        "llama": _read_gated,
        "mistral": _read_gated,
        "qwen2": _read_gated,
        "gemma": _read_gated,
    }
)
