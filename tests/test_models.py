"""Model shapes: against published sizes, and read from real config.json layouts."""

import json

import pytest

from meshslice_jax.models import MODELS, fc_layers, model, model_layers
from meshslice_jax.problem import GemmProblem

# Fields as in the public config.json files.
CONFIGS = {
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": None,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 131072,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "max_position_embeddings": 8192,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "vocab_size": 256000,
    },
}


def written(folder, config) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


# Billions of parameters that the models' reports print (GPT-3: Brown et al. 2020, Table D.1).
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-125m", 0.125),
        ("gpt3-350m", 0.356),
        ("gpt3-760m", 0.760),
        ("gpt3-1.3b", 1.32),
        ("gpt3-2.7b", 2.65),
        ("gpt3-6.7b", 6.66),
        ("gpt3-13b", 12.85),
        ("gpt3-175b", 174.6),
        ("megatron-530b", 530.0),
        ("llama2-7b", 6.74),
        ("llama2-13b", 13.0),
        ("llama2-70b", 69.0),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.6),
        ("llama3-405b", 405.9),
        ("mistral-7b", 7.24),
        ("qwen2-7b", 7.62),
        ("qwen2-72b", 72.7),
        ("gemma-2b", 2.51),
        ("gemma-7b", 8.54),
    ],
)
def test_weights_are_those_that_the_reports_print(name, billions):
    assert MODELS[name].weights / 1e9 == pytest.approx(billions, rel=0.02)
    assert MODELS[name].source


def test_every_model_is_in_the_list_of_published_sizes():
    (mark,) = test_weights_are_those_that_the_reports_print.pytestmark
    assert set(MODELS) == {name for name, _ in mark.args[1]}


def test_gpt_layers_are_those_of_the_paper():
    """H -> 3H, H -> H, H -> 4H, 4H -> H (MeshSlice, section 4)."""
    h, tokens = 12288, 128 * 2048
    assert fc_layers(MODELS["gpt3-175b"], tokens) == {
        "qkv": GemmProblem.uniform(m=tokens, n=3 * h, k=h, dtype="bfloat16"),
        "out": GemmProblem.uniform(m=tokens, n=h, k=h, dtype="bfloat16"),
        "ff1": GemmProblem.uniform(m=tokens, n=4 * h, k=h, dtype="bfloat16"),
        "ff2": GemmProblem.uniform(m=tokens, n=h, k=4 * h, dtype="bfloat16"),
    }


def test_gated_layers_are_fused_by_hand():
    """Llama 3 8B: 32 + 2 * 8 heads of 128 are 6144; gate and up of 14336 are 28672."""
    assert MODELS["llama3-8b"].fc_widths == {
        "qkv": (4096, 6144),
        "out": (4096, 4096),
        "gate_up": (4096, 28672),
        "down": (14336, 4096),
    }


def test_heads_need_not_add_up_to_the_width():
    """Gemma 7B: 16 heads of 256 are 4096, the residual stream is 3072 wide."""
    widths = MODELS["gemma-7b"].fc_widths
    assert widths["qkv"] == (3072, 3 * 4096)
    assert widths["out"] == (4096, 3072)


@pytest.mark.parametrize("name", MODELS)
def test_branches_cover_the_layers_in_order(name):
    shape = MODELS[name]
    assert [layer for branch in shape.branches for layer in branch] == list(shape.fc_widths)
    for branch in shape.branches:  # a branch leaves the residual stream and comes back to it
        assert shape.fc_widths[branch[0]][0] == shape.fc_widths[branch[-1]][1] == shape.hidden


def test_model_layers_takes_a_name_and_the_models_own_sequence():
    problem = model_layers("gpt3-125m", batch=2)["ff1"]
    assert problem == GemmProblem.uniform(m=4096, n=3072, k=768, dtype="float32")
    assert model_layers("gpt3-125m", seq_len=16)["ff1"].m == 16


@pytest.mark.parametrize(
    ("kind", "widths"),
    [
        ("gpt2", {"qkv": (768, 2304), "out": (768, 768), "ff1": (768, 3072), "ff2": (3072, 768)}),
        ("llama", MODELS["llama3-8b"].fc_widths),
        ("mistral", MODELS["mistral-7b"].fc_widths),
        (
            "qwen2",
            {"qkv": (896, 1152), "out": (896, 896), "gate_up": (896, 9728), "down": (4864, 896)},
        ),
        ("gemma", MODELS["gemma-2b"].fc_widths),
    ],
)
def test_config_files_of_every_architecture(tmp_path, kind, widths):
    path = written(tmp_path, CONFIGS[kind])
    found = model(path)
    assert found.fc_widths == widths
    assert found.gated == (kind != "gpt2")
    assert found.tied_embeddings == (kind in ("gpt2", "qwen2", "gemma"))
    assert found.qkv_layout == ("fused" if kind == "gpt2" else "split")
    assert model(tmp_path) == found == model(found)


def test_llama_without_kv_heads_has_as_many_as_heads(tmp_path):
    config = {k: v for k, v in CONFIGS["llama"].items() if k != "num_key_value_heads"}
    assert model(written(tmp_path, config)).kv_heads == 32


def test_explicit_head_dim_wins(tmp_path):
    found = model(written(tmp_path, CONFIGS["llama"] | {"head_dim": 64}))
    assert found.fc_widths["out"] == (32 * 64, 4096)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llama", {"model_type": "mamba"}, "unknown architecture model_type='mamba'"),
        ("llama", {"model_type": None}, "there are gpt2, llama, mistral, qwen2, gemma"),
        ("llama", {"hidden_size": None}, "field 'hidden_size' is missing"),
        ("gpt2", {"n_layer": None}, "field 'n_layer' is missing"),
        ("qwen2", {"num_key_value_heads": None}, "field 'num_key_value_heads' is missing"),
        ("gemma", {"head_dim": None}, "field 'head_dim' is missing"),
        ("llama", {"vocab_size": "many"}, "field 'vocab_size' must be a positive integer"),
        ("llama", {"num_hidden_layers": 0}, "must be a positive integer, got 0"),
        ("llama", {"tie_word_embeddings": 1}, "field 'tie_word_embeddings' must be true or false"),
        ("llama", {"num_key_value_heads": 5}, "kv_heads 5 does not divide heads 32"),
        ("llama", {"num_attention_heads": 24}, "does not divide 'hidden_size' = 4096"),
        ("gpt2", {"n_head": 11}, "'n_head' = 11 does not divide 'n_embd' = 768"),
    ],
)
def test_wrong_configs_are_refused_with_the_field(tmp_path, kind, change, words):
    path = written(tmp_path, CONFIGS[kind] | change)
    with pytest.raises(ValueError, match=words):
        model(path)


@pytest.mark.parametrize(("text", "words"), [("{", "not a JSON file"), ("[]", "holds an object")])
def test_files_that_are_no_config(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        model(path)


def test_unknown_names_are_told_what_there_is():
    with pytest.raises(ValueError, match=r"unknown model 'gpt5'.*gpt3-175b.*llama3-8b"):
        model("gpt5")


def test_shapes_that_cannot_be():
    with pytest.raises(ValueError, match="hidden must be a positive integer, got 0"):
        model(MODELS["gpt3-125m"].__class__(**(vars(MODELS["gpt3-125m"]) | {"hidden": 0})))
    with pytest.raises(ValueError, match="qkv_layout 'wide' is not"):
        model(MODELS["gpt3-125m"].__class__(**(vars(MODELS["gpt3-125m"]) | {"qkv_layout": "wide"})))
