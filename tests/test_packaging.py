"""The package as a whole: what importing it does, which way imports go, the built wheel."""

import ast
import graphlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import meshslice_jax
from meshslice_jax.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshslice_jax"
#: The order of the rooms; a room imports only those before it. Rooms that are not named
#: here come after the schedule and before the command line, without a cycle.
ORDER = (
    "compat distributed problem mesh dataflow plan schedule collectives site algorithms layout "
    "gemm cost simulate compiled models autotune flatten padding product_log dot_general launch nn "
    "train bench cli"
).split()
FIRST = ORDER[: ORDER.index("gemm") + 1]


def python(code, cwd=ROOT, **environment):
    """Runs code in a new process without the tests' JAX settings; returns its output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=kept | {"JAX_PLATFORMS": "cpu"} | environment,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def room(path):
    """The room of a source file: the module or folder right below the package."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports():
    """Room -> rooms that it imports."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        if path == SOURCE / "__init__.py":
            continue
        rooms = found.setdefault(room(path), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "meshslice_jax":
                rooms |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                rooms |= set(re.findall(r"^meshslice_jax\.(\w+)", node.module))
        rooms -= {room(path)}
    return found


def test_imports_go_downward_only():
    graph = imports()
    for name, rooms in graph.items():
        if name in ORDER:
            above = [other for other in rooms if other in ORDER[ORDER.index(name) :]]
            assert not above, f"{name} imports {above}, which come after it"
        if name in FIRST:
            assert rooms <= set(ORDER), f"{name} imports {sorted(rooms - set(ORDER))}"
    list(graphlib.TopologicalSorter(graph).static_order())  # raises on a cycle


def test_algorithms_never_import_each_other():
    for path in (SOURCE / "algorithms").glob("*.py"):
        if path.stem in ALGORITHMS:
            named = set(re.findall(r"algorithms(?:\.| import )(\w+)", path.read_text()))
            assert not named & set(ALGORITHMS), f"{path.name} imports {named}"


def test_importing_the_package_starts_no_device_and_no_flax():
    code = """
import sys, meshslice_jax
from meshslice_jax import cli, compat
heavy = {"flax", "optax", "orbax", "matplotlib", "libtpu"} & set(sys.modules)
print(sorted(heavy), compat.jax_has_started())
"""
    assert python(code) == "[] False"


def test_public_names_leave_the_packages_of_the_same_name_alone():
    import meshslice_jax.reproduce

    assert meshslice_jax.hardware.HARDWARE is meshslice_jax.HARDWARE
    assert meshslice_jax.hardware_spec("tpu_v4") is meshslice_jax.HARDWARE["tpu_v4"]
    assert callable(meshslice_jax.reproduce.reproduce)
    assert callable(meshslice_jax.tune)
    assert callable(meshslice_jax.simulate)


def test_modules_are_short_enough_to_be_one_concept():
    lines = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > 450}


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == meshslice_jax.__version__
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel. It is built without isolation, so that no network is needed."""
    out = tmp_path_factory.mktemp("wheel")
    call = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    found = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_every_module_the_marker_of_types_and_the_licence(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"meshslice_jax/{path.relative_to(SOURCE)}" for path in SOURCE.rglob("*.py")}
    assert modules <= names
    assert "meshslice_jax/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)


def test_the_wheel_runs_outside_the_checkout(wheel, tmp_path):
    home = tmp_path / "installed"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(home), str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True, timeout=120)
    code = """
import jax.numpy as jnp, meshslice_jax as ms
ms.emulate_devices(4)
out = ms.matmul(jnp.ones((4, 8)), jnp.ones((8, 4)), ms.GemmPlan(), mesh=ms.make_mesh((2, 2)))
print(ms.__file__, out.sum())
"""
    where, total = python(code, cwd=tmp_path, PYTHONPATH=str(home)).split()
    assert where.startswith(str(home))
    assert float(total) == 4 * 4 * 8
    script = home / "bin" / "meshslice"
    assert "meshslice_jax.cli" in script.read_text()


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")])
def test_the_source_is_clean(arguments):
    call = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
    found = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout
