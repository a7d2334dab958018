"""The README's Python blocks run as they stand, each in a new process; its files are there."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshslice_jax.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_python_block_runs_by_itself(block):
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("JAX_NUM")},
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == re.findall(r"print\(.*\)  # (.*)", block)


def test_files_that_commands_read_were_written_by_commands_before():
    """Each --plan FILE follows an --out FILE, within the same block of commands."""
    for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL):
        written = set()
        for flag, name in re.findall(r"--(out|plan) (\S+)", block):
            assert flag == "out" or name in written, f"--plan {name}"
            written.add(name)


def test_every_algorithm_is_in_the_table():
    assert [name for name in ALGORITHMS if f"| `{name}` |" in README] == list(ALGORITHMS)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_to_files_that_exist(target):
    assert (ROOT / target).exists()


@pytest.mark.parametrize("script", sorted(set(re.findall(r"\./(scripts/\w+\.sh)", README))))
def test_scripts_are_there_and_can_be_run(script):
    assert os.access(ROOT / script, os.X_OK)


def test_the_readme_names_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = re.search(r"; extras are (.*?)\.\n", README, flags=re.DOTALL).group(1)
    assert all(f"`{extra}`" in listed for extra in project["optional-dependencies"])
