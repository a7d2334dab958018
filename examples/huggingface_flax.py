"""Unmodified Flax models of the transformers package on a tuned 2D plan.

    pip install -e ".[examples]"      # transformers 4.46.3, the last with Flax models
    JAX_PLATFORMS=cpu python examples/huggingface_flax.py     # on 2x4 emulated CPU devices
    JAX_PLATFORMS=cpu python examples/huggingface_flax.py --mesh 4x4 --layers 4

A small Llama (gated MLP, split q, k and v) and a small BERT with random weights, nothing is
downloaded. For each: tune a plan, put the model on it, compare the outputs with those of
the model alone, and print what every product runs as. Exits with 1 if the outputs differ
by more than the rounding of float32.
"""

import argparse
import os
import sys

import jax
import numpy as np

import meshslice_jax as ms

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
BATCH, SEQ_LEN = 8, 32


def llama(layers: int):
    """The model, its sizes, and the inputs of its module."""
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    shape = _shape("small-llama", layers, ffn=256, gated=True, tied_embeddings=False)
    ids, mask, positions = _inputs(shape)
    model = FlaxLlamaForCausalLM(LlamaConfig(**_sizes(shape)), _do_init=False)
    return model, shape, (ids, mask, positions)


def bert(layers: int):
    """The model, its sizes, and the inputs of its module."""
    from transformers import BertConfig, FlaxBertModel

    shape = _shape("small-bert", layers, ffn=512, gated=False, tied_embeddings=True)
    ids, mask, positions = _inputs(shape)
    heads = np.ones((shape.layers, shape.heads), np.float32)
    model = FlaxBertModel(BertConfig(**_sizes(shape)), _do_init=False)
    return model, shape, (ids, mask, np.zeros_like(ids), positions, heads)


def _shape(name: str, layers: int, **fields) -> ms.ModelShape:
    return ms.ModelShape(
        name=name,
        hidden=128,
        heads=8,
        kv_heads=8,
        head_dim=16,
        layers=layers,
        vocab=512,
        seq_len=SEQ_LEN,
        **fields,
    )


def _sizes(shape: ms.ModelShape) -> dict[str, int]:
    """The same as transformers calls it."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.seq_len,
    }


def _inputs(shape: ms.ModelShape):
    ids = np.random.default_rng(0).integers(0, shape.vocab, (BATCH, SEQ_LEN)).astype(np.int32)
    positions = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), ids.shape)
    return ids, np.ones_like(ids), positions


def run(name: str, build, mesh_shape: ms.MeshShape, layers: int, algorithm: str | None) -> bool:
    """Prints the explanation; whether all is on the mesh and the outputs agree."""
    model, shape, inputs = build(layers)
    plan = ms.tune(
        shape,
        mesh_shape.num_chips,
        mesh_shape=mesh_shape,
        batch=BATCH,
        seq_len=SEQ_LEN,
        dtype="float32",
        algorithm=algorithm,
    )
    # The plan is for a block; the product at the end of a model gets a plan of its own.
    end = {"end": ms.GemmPlan()}
    mesh = ms.make_mesh(mesh_shape)
    parallel, shardings = ms.nn.parallelize(
        model.module,
        dict(plan.layers) | end,
        mesh,
        *inputs,
        rules=[(r"(lm_head|pooler/dense)$", "end"), *ms.nn.DEFAULT_RULES],
    )
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(model.module.init)(keys, *inputs)

    placed = jax.device_put(variables, shardings(variables))
    alone = jax.jit(model.module.apply)(variables, *inputs)[0]
    on_mesh = jax.jit(parallel.apply)(placed, *inputs)[0]
    difference = float(np.abs(np.asarray(on_mesh) - np.asarray(alone)).max())
    largest = float(np.abs(np.asarray(alone)).max())

    print(f"\n{name}, {mesh_shape} mesh")
    found = ms.nn.explain(parallel, placed, *inputs, strict=True)
    print(f"largest output {largest:.3g}, largest difference {difference:.2g}")
    return difference <= 1e-5 * max(1.0, largest) and not found.replicated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="2x4", help="ROWSxCOLS (2x4)")
    parser.add_argument("--layers", type=int, default=2, help="blocks of each model (2)")
    parser.add_argument("--algorithm", choices=sorted(ms.ALGORITHMS), help="instead of tuning it")
    options = parser.parse_args()
    mesh_shape = ms.mesh.parse_mesh_shape(options.mesh)
    ms.emulate_devices(mesh_shape.num_chips)
    right = [
        run("FlaxLlamaForCausalLM", llama, mesh_shape, options.layers, options.algorithm),
        run("FlaxBertModel", bert, mesh_shape, options.layers, options.algorithm),
    ]
    print("outputs agree" if all(right) else "WRONG: outputs differ or a kernel is not placed")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
