"""Training: text, the loss curve on any mesh, checkpoints on others, the command."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import meshslice_jax as ms
from meshslice_jax import train as training
from meshslice_jax.cli.app import app
from meshslice_jax.train import log as logs
from meshslice_jax.train import text as texts
from meshslice_jax.train.checkpoint import fault

ROOT = Path(__file__).parents[1]
BATCH, SEQ = 8, 16
MODEL = training.byte_gpt(hidden=32, heads=8, layers=2, seq_len=SEQ)
DATA = training.Data(text=training.load_text(), batch=BATCH, seq_len=SEQ)
SETTINGS = training.TrainSettings(steps=6, warmup_steps=2, learning_rate=1e-2)


def trainer_of(mesh_shape, settings=SETTINGS, algorithm="meshslice"):
    mesh = ms.make_mesh(mesh_shape)
    plan = training.training_plan(
        MODEL, mesh, batch=BATCH, seq_len=SEQ, dtype=settings.dtype, algorithm=algorithm
    )
    return training.make_trainer(plan, mesh, settings)


def run(trainer, state=None, checkpoints=None, every=100, data=DATA):
    """The losses of a run by step, and its last state."""
    losses = {}
    state = training.train(
        trainer,
        data,
        trainer.init() if state is None else state,
        on_step=lambda record: losses.update({record.step: record.loss}),
        checkpoints=checkpoints,
        checkpoint_every=every,
    )
    return losses, state


# --- text ---------------------------------------------------------------------------------


def test_text_is_the_bytes_of_the_topics_or_of_a_file(tmp_path):
    text = DATA.text
    assert len(text.training) > 300_000 and len(text.validation) > 15_000
    path = tmp_path / "two.txt"
    path.write_bytes(b"ab" * 200)
    two = training.load_text(path)
    assert (len(two.training), len(two.validation)) == (380, 20)
    assert training.unigram_entropy(two.training) == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match=r"missing.txt cannot be read: No such file"):
        training.load_text(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match="a text of 20 tokens has no pieces of 33"):
        texts.sequences(two.validation, 1, 32, (0,))


def test_batches_are_a_function_of_the_step():
    first, again, next_one = DATA.pieces(0, 3), DATA.pieces(0, 3), DATA.pieces(0, 4)
    assert (first == again).all() and (first != next_one).any()
    assert first.shape == (BATCH, SEQ + 1) and first.dtype == np.int32
    whole = DATA.text.training.tobytes()
    assert all(row.astype(np.uint8).tobytes() in whole for row in first)


def test_settings_that_cannot_be_right():
    with pytest.raises(ValueError, match="steps must be at least 1"):
        training.TrainSettings(steps=0)
    with pytest.raises(ValueError, match="learning_rate and clip_norm must be positive"):
        training.TrainSettings(learning_rate=0.0)
    with pytest.raises(ValueError, match="dtype 'float16' is not one of float32, bfloat16"):
        training.TrainSettings(dtype="float16")
    with pytest.raises(ValueError, match="hidden = 30 is not divisible by heads = 4"):
        training.byte_gpt(30, 4, 1, 8)


# --- plans --------------------------------------------------------------------------------


def test_a_plan_is_one_under_which_attention_is_local():
    """Four sequences on 2x4: the fastest plan has four shards of tokens, or it is asked again."""
    mesh = ms.make_mesh((2, 4))
    model = training.byte_gpt(hidden=32, heads=8, layers=2, seq_len=64)
    plan = training.training_plan(model, mesh, batch=2, seq_len=64)
    assert {layer.forward.row_axis for layer in plan.layers.values()} == {"row"}
    with pytest.raises(ValueError, match="batch = 3 is not divisible"):
        training.training_plan(model, mesh, batch=3, seq_len=64)


# --- the loss curve, checkpoints ----------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_resumes_on_other_meshes_with_other_algorithms(tmp_path):
    trainer = trainer_of((2, 4))
    told, said = {"model": {"name": "m"}}, []
    saved = training.Checkpoints(tmp_path / "c", told, keep=2, say=said.append)
    losses, state = run(trainer, training.begin(trainer, saved, False), saved, every=2)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1]
    weights = state["weights"]["blocks"]["qkv"]["kernel"]
    assert weights.shape == (2, 32, 96) and len(weights.sharding.device_set) == 8
    moments = state["optimizer"][1][0].mu["blocks"]["qkv"]["kernel"]
    assert moments.sharding.is_equivalent_to(weights.sharding, 3)
    with pytest.raises(ValueError, match="holds checkpoints up to step 6; resume, or use another"):
        training.begin(trainer, saved, False)

    for mesh_shape, algorithm in (((4, 2), "wang"), ((1, 1), "collective")):
        other = trainer_of(mesh_shape, algorithm=algorithm)
        restored = saved.restore(4, other.abstract)
        assert int(restored["step"]) == 4
        continued, end = run(other, restored)
        assert max(abs(continued[step] - losses[step]) for step in (5, 6)) < 1e-4
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-4),
            end["weights"],
            state["weights"],
        )

    # The same mesh: bit for bit. The newest is truncated, and passed over with a message.
    truncate(tmp_path / "c" / "step_00000006")
    newer = {"model": {"name": "m", "field": "that older versions did not write"}}
    again = training.Checkpoints(tmp_path / "c", newer, say=said.append)
    continued, _ = run(trainer, training.begin(trainer, again, True))
    assert continued == {5: losses[5], 6: losses[6]}
    assert "step_00000006 is passed over" in said[0] and "were written" in said[0]
    assert said[1].endswith("step_00000004")
    stranger = training.Checkpoints(tmp_path / "c", {"model": {"name": "other"}}, say=said.append)
    with pytest.raises(ValueError, match=r"holds the model .*'m'.*, and this run has .*'other'"):
        training.begin(trainer, stranger, True)


@pytest.mark.slow
def test_the_recipe_of_the_docs_reads_a_checkpoint_on_one_device(tmp_path):
    text = (ROOT / "docs" / "training.md").read_text()
    (recipe,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert "meshslice" not in recipe
    sharding = jax.NamedSharding(ms.make_mesh((2, 2)), jax.P("row", "col"))
    kernel = jax.device_put(np.arange(32.0, dtype=np.float32).reshape(8, 4), sharding)
    saved = training.Checkpoints(tmp_path / "run", {"model": "m"})
    saved.save(100, {"weights": {"kernel": kernel}, "optimizer": (), "step": np.int32(100)})
    saved.close()
    recipe += "print(state['weights']['kernel'].sum(), len(jax.devices()))\n"
    kept = {name: value for name, value in os.environ.items() if "NUM_CPU" not in name}
    found = subprocess.run(
        [sys.executable, "-c", recipe],
        cwd=tmp_path,
        env=kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.splitlines() == ["100 {'kernel': (8, 4)}", "496.0 1"], found.stderr


def test_faults_of_a_checkpoint(tmp_path):
    saved = training.Checkpoints(tmp_path, {"model": "m"}, say=[].append)
    saved.save(1, {"x": np.arange(4)})
    saved.close()
    folder = saved.folder(1)
    assert fault(folder) is None and saved.newest() == 1
    assert json.loads((folder / "run.json").read_text()) == {"model": "m"}
    data = next(path for path in folder.rglob("*") if path.parent.name == "d")
    contents = bytearray(data.read_bytes())
    contents[-1] ^= 1
    data.write_bytes(contents)
    assert "has other contents than were written" in fault(folder)
    data.unlink()
    assert "is missing" in fault(folder)
    (folder / "seal.json").unlink()
    assert "was not written to its end" in fault(folder)
    assert saved.newest() is None
    (tmp_path / "step_00000002.orbax-checkpoint-tmp").mkdir()
    assert saved.steps() == [1]
    saved.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def truncate(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    path = max(files, key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)


def test_damaged_checkpoints_never_push_out_the_one_that_a_run_went_on_with(tmp_path):
    """A kill before the next one is written must find one that is whole."""
    first = training.Checkpoints(tmp_path, {"model": "m"}, keep=3, say=[].append)
    for step in (10, 20, 30):
        first.save(step, {"x": np.arange(4)})
    first.close()
    truncate(first.folder(20))
    truncate(first.folder(30))
    saved = training.Checkpoints(tmp_path, {"model": "m"}, keep=1, say=[].append)
    assert saved.newest() == 10
    for step, left in ((15, {10}), (25, {15}), (30, {25})):  # 30 in the place of a damaged one
        saved.save(step, {"x": np.arange(4)})
        assert left <= set(saved.steps())
    saved.close()
    assert saved.steps() == [30, 25] and saved.newest() == 30


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half_of_it(tmp_path, monkeypatch):
    saved = training.Checkpoints(tmp_path, {"model": "m"}, keep=1, say=[].append)
    saved.save(1, {"x": np.arange(4)})
    saved.save(2, {"x": np.arange(4)})
    monkeypatch.setattr(shutil, "rmtree", lambda folder: (folder / "seal.json").unlink())
    saved.save(3, {"x": np.arange(4)})
    monkeypatch.undo()
    saved.close()
    assert saved.steps() == [3, 2] and (tmp_path / "step_00000001.tmp").is_dir()
    saved.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


@pytest.mark.slow
def test_fifty_steps_on_a_mesh_are_those_on_one_device():
    """Bounds: 1e-3 in float32; in bfloat16 0.02 nats, about 2^-8 of the first loss."""
    settings = dataclasses.replace(SETTINGS, steps=50, warmup_steps=5)
    exact, _ = run(trainer_of((1, 1), settings, "collective"))
    assert exact[50] < exact[1] - 2
    for mesh_shape, algorithm in (((2, 4), "meshslice"), ((4, 2), "fsdp")):
        found, _ = run(trainer_of(mesh_shape, settings, algorithm))
        assert max(abs(found[step] - exact[step]) for step in exact) < 1e-3
    half = dataclasses.replace(settings, dtype="bfloat16")
    found, _ = run(trainer_of((2, 4), half))
    assert max(abs(found[step] - exact[step]) for step in exact) < 0.02


@pytest.mark.slow
def test_kills_at_any_moment_lose_only_the_steps_since_the_last_checkpoint():
    script = [sys.executable, ROOT / "scripts" / "kill_test.py", "--kills", "3", "--steps", "60"]
    found = subprocess.run(script, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 wrong" in found.stdout


class SlowCheckpoints:
    """Saves take a fifth of a second; what was told when they began."""

    def __init__(self, told):
        self.told, self.saves = told, []

    def save(self, step, state):
        self.saves.append((step, len(self.told)))
        time.sleep(0.2)

    def close(self):
        pass


def test_steps_are_counted_and_timed_without_the_wait_for_checkpoints():
    told = []
    saved, mesh = SlowCheckpoints(told), ms.make_mesh((1, 1))
    trainer = types.SimpleNamespace(
        settings=SETTINGS,
        data=jax.NamedSharding(mesh, jax.P("row")),
        step=lambda state, pieces: ({"step": state["step"] + 1}, jax.numpy.float32(1)),
    )
    training.train(
        trainer, DATA, {"step": 0}, on_step=told.append, checkpoints=saved, checkpoint_every=2
    )
    assert saved.saves == [(2, 2), (4, 4), (6, 6)]  # all losses of a checkpoint are told
    assert [record.step for record in told] == [1, 2, 3, 4, 5, 6]
    assert told[0].tokens_per_s is None
    assert all(record.tokens_per_s > BATCH * SEQ / 0.2 for record in told[1:])


# --- log and command ----------------------------------------------------------------------


def test_a_log_that_was_cut_off_is_read_and_continued(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "lo')
    assert logs.read_log(path) == [{"step": 0, "loss": 2.0}]
    with logs.open_log(path) as file:
        logs.append(file, step=1, loss=1.5)
    assert [record["loss"] for record in logs.read_log(path)] == [2.0, 1.5]


SMALL = "--hidden 32 --heads 8 --layers 1 --batch 8 --seq-len 16 --mesh 2x2 --devices 16".split()


def command(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.mark.slow
def test_the_command_trains_saves_plots_and_resumes(tmp_path):
    folder, plot = tmp_path / "c", tmp_path / "loss.png"
    saved = ["--checkpoint-dir", folder, "--checkpoint-every", 2]
    found = command(*SMALL, "--steps", 3, *saved, "--plot", plot, "--profile-dir", tmp_path / "p")
    assert found.exit_code == 0, found.output
    for words in ("meshslice os", "unigram entropy of the text: 3.2", "validation loss: 5."):
        assert words in found.output
    assert plot.stat().st_size > 10_000 and any((tmp_path / "p").rglob("*.xplane.pb"))
    found = command(*SMALL, "--steps", 4, *saved, "--resume")
    assert found.exit_code == 0, found.output
    assert "step_00000003" in found.output
    assert "told otherwise than before: steps (3 -> 4)" in found.output
    assert [record["step"] for record in logs.read_log(folder / "log.jsonl")] == [1, 2, 3, 4]
    assert re.findall(r"step (\d+)/4", found.output) == ["4"]


def test_the_command_says_what_is_wrong(tmp_path):
    cases = {
        ("--resume",): "--resume needs the --checkpoint-dir",
        ("--text", "missing.txt"): "missing.txt cannot be read",
        ("--mesh", "2by4"): "is not of the form ROWSxCOLS",
        ("--plot", "nowhere/loss.png"): "there is no folder",
        ("--algorithm", "cannon", "--mesh", "2x4"): "cannon",
    }
    for arguments, words in cases.items():
        found = command(*arguments, "--devices", 16)
        assert found.exit_code == 2 and words in found.output.replace("\n", ""), found.output
    plan = ms.tune("gpt3-125m", 4, batch=4, seq_len=16, mesh_shape=(2, 2))
    ms.save_plan(plan, tmp_path / "plan.json")
    found = command("--plan", tmp_path / "plan.json", "--batch", 4)
    words = "--batch cannot be chosen; leave it out, or leave --plan out"
    assert found.exit_code == 2 and words in found.output
    ms.save_plan(dataclasses.replace(plan, seq_len=4096), tmp_path / "long.json")
    found = command("--plan", tmp_path / "long.json")
    assert found.exit_code == 2 and "seq_len = 4096, and its model 'gpt3-125m' has" in found.output
    short = tmp_path / "short.txt"
    short.write_text("ab" * 200)
    found = command("--text", short, "--devices", 16)
    assert found.exit_code == 2 and "a text of 20 tokens has no pieces of 129" in found.output
