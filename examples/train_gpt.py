"""A small GPT on an emulated 2x4 mesh, with Flax and Optax as one writes them anyway.

    python examples/train_gpt.py
    python examples/train_gpt.py --steps 1000 --text book.txt

Only the mesh, the plan and `ms.nn.GPT`, which takes both, are ours. The text is what every
Python installation carries, the help topics of pydoc, as bytes. `meshslice train` is the
same with checkpoints, plots and meshes of your choice.
"""

import argparse

import optax
from flax import nnx

import meshslice_jax as ms
from meshslice_jax.train import byte_gpt, load_text, training_plan, unigram_entropy
from meshslice_jax.train.text import sequences

BATCH, SEQ_LEN = 16, 128


@nnx.jit
def train_step(model: ms.nn.GPT, optimizer: nnx.Optimizer, pieces):
    """One update; the loss before it."""

    def loss(model):
        return model.loss(pieces[:, :-1], pieces[:, 1:])

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--text", help="a file; by default Python's help topics")
    options = parser.parse_args()

    ms.emulate_devices(8)
    mesh = ms.make_mesh((2, 4))
    shape = byte_gpt(hidden=128, heads=8, layers=4, seq_len=SEQ_LEN)
    plan = training_plan(shape, mesh, batch=BATCH, seq_len=SEQ_LEN, algorithm="meshslice")
    model = ms.nn.GPT(plan, mesh, rngs=nnx.Rngs(0))

    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=3e-3,
        warmup_steps=min(50, options.steps // 2),
        decay_steps=options.steps,
        end_value=3e-4,
    )
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, update, wrt=nnx.Param)

    text = load_text(options.text)
    print(f"unigram entropy of the text: {unigram_entropy(text.training):.4f} nats a byte")
    for step in range(options.steps):
        pieces = sequences(text.training, BATCH, SEQ_LEN, seed=(0, step))
        loss = train_step(model, optimizer, pieces)
        if step % 20 == 0 or step + 1 == options.steps:
            print(
                f"step {step + 1}/{options.steps}  loss {float(loss):.4f} nats a byte", flush=True
            )


if __name__ == "__main__":
    main()
