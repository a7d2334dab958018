"""Models by name: the shapes that ship with the package, each with its source.

`model` turns a name, a Hugging Face config.json or a record into a `ModelShape`;
`fc_layers` turns that into the products of a block (see `model_shape`).
"""

import difflib
import os
import types

from meshslice_jax.model_config import read_config as read_config
from meshslice_jax.model_shape import ModelShape as ModelShape
from meshslice_jax.model_shape import fc_layers as fc_layers
from meshslice_jax.problem import GemmProblem


def model_layers(
    source, *, batch: int = 1, seq_len: int | None = None, dtype: str = "float32"
) -> dict[str, GemmProblem]:
    """`fc_layers` of a model given by name, path or record.

    Args:
      source: as for `model`.
      batch: sequences.
      seq_len: tokens of a sequence; None is the model's own.
      dtype: dtype of all three matrices.

    Raises:
      ValueError: as for `model`, or more tokens than the model has learned positions for.
    """
    shape = model(source)
    seq_len = shape.seq_len if seq_len is None else seq_len
    shape.check_seq_len(seq_len)
    return fc_layers(shape, batch * seq_len, dtype)


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
    if path.endswith(".json") or not isinstance(source, str):
        raise ValueError(f"model {path!r}: no such file")
    near = difflib.get_close_matches(str(path), MODELS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(
        f"unknown model {path!r}: no such file, and not one of {', '.join(MODELS)}{hint}"
    )


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
        positions="learned",
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
