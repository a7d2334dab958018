"""The examples run as a user runs them, in a process of their own."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install -e '.[examples]'",
)
def test_hugging_face_models_run_unmodified():
    found = subprocess.run(
        [sys.executable, EXAMPLES / "huggingface_flax.py", "--layers=1", "--algorithm=meshslice"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
        timeout=300,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "8 of 8 products of layers run on a plan" in found.stdout
    assert "7 of 7 products of layers run on a plan" in found.stdout
    assert found.stdout.endswith("outputs agree\n")


@pytest.mark.slow
def test_the_python_blocks_of_the_flax_guide_run():
    guide = (EXAMPLES.parent / "docs" / "flax.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=200,
    )
    assert found.returncode == 0, found.stderr
    assert "6 of 6 products of layers run on a plan" in found.stdout
