"""Reading a Hugging Face config.json as a ModelShape.

The files of one architecture name their fields alike, and another architecture names them
otherwise, so each has its reader. A field that the architecture needs and the file lacks is
an error, not a guess; a default is taken only where the architecture itself defines it
(GPT-2's inner width, Llama's number of key-value heads, tied embeddings).
"""

import dataclasses
import json
import os
import types

from meshslice_jax.model_shape import ModelShape


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
        positions="learned",
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
