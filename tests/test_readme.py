"""The README's Python blocks run as they stand, in order, in one new process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshslice_jax.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("JAX_NUM")},
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    promised = re.findall(r"print\(.*\)  # (.*)", "\n".join(blocks))
    assert found.stdout.splitlines() == promised


def test_every_algorithm_is_in_the_table():
    assert [name for name in ALGORITHMS if f"| `{name}` |" in README] == list(ALGORITHMS)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_to_files_that_exist(target):
    assert (ROOT / target).exists()


@pytest.mark.parametrize("script", sorted(set(re.findall(r"\./(scripts/\w+\.sh)", README))))
def test_scripts_are_there_and_can_be_run(script):
    assert os.access(ROOT / script, os.X_OK)
