"""`meshslice doctor`: versions, devices, flags in effect, and what each command lacks."""

import platform as host

import jax
import typer
from rich.console import Console
from rich.table import Table

import meshslice_jax
from meshslice_jax.cli import common

#: Distributions whose versions matter, beside the package's own.
PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "flax",
    "optax",
    "orbax-checkpoint",
    "typer",
    "rich",
    "msgspec",
    "matplotlib",
    "libtpu",
)
#: Command -> (packages that it needs, platform whose devices it needs, how to get them).
NEEDS = {
    "bench": (("jax", "jaxlib", "numpy", "msgspec"), "cpu", "pip install meshslice-jax"),
    "bench --plot": (("matplotlib",), None, "pip install matplotlib"),
    "bench --platform tpu": (("libtpu",), "tpu", "pip install libtpu on a TPU VM"),
    "bench --platform gpu": ((), "gpu", "a JAX built for the GPU, see jax.dev"),
    "tune": (("jax", "numpy", "msgspec"), None, "pip install meshslice-jax"),
    "simulate, reproduce": (("jax", "numpy", "msgspec"), None, "pip install meshslice-jax"),
    "simulate --plot, reproduce --plot": (
        ("matplotlib",),
        None,
        "pip install matplotlib",
    ),
}


def doctor() -> None:
    """Print versions, devices, flags in effect, and what is missing for each command."""
    console = common.stdout()
    _print_versions(console)
    healthy = _print_devices(console)
    _print_flags(console)
    missing = {command: missing_for(command) for command in NEEDS}
    table = Table("command", "state", "way out", box=None, pad_edge=False)
    for command, lacks in missing.items():
        state = f"missing {', '.join(lacks)}" if lacks else "ready"
        table.add_row(command, state, NEEDS[command][2].replace("[", r"\[") if lacks else "")
    console.print()
    console.print(table)
    if missing["bench"] or not healthy:
        raise typer.Exit(1)


def missing_for(command: str) -> list[str]:
    """Packages and devices that a command in `NEEDS` lacks here."""
    packages, platform, _ = NEEDS[command]
    lacks = [name for name in packages if common.version_of(name) is None]
    if platform is not None and isinstance(find_platform(platform), str):
        lacks.append(f"{platform} devices")
    return lacks


def find_platform(platform: str | None) -> list[jax.Device] | str:
    """The devices of a platform (None: JAX's default), or why there are none."""
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]


def _print_versions(console: Console) -> None:
    table = Table("package", "version", box=None, pad_edge=False)
    table.add_row("Python", f"{host.python_version()} on {host.system()} {host.machine()}")
    table.add_row("meshslice-jax", meshslice_jax.__version__)
    for name in PACKAGES:
        table.add_row(name, common.version_of(name) or "not installed")
    console.print(table)


def _print_devices(console: Console) -> bool:
    devices = find_platform(None)
    console.print()
    if isinstance(devices, str):
        console.print(f"devices: none ({devices})", markup=False, soft_wrap=True)
        return False
    kinds = sorted({device.device_kind for device in devices})
    console.print(
        f"devices: {len(devices)} x {', '.join(kinds)} (platform {devices[0].platform}, "
        f"process {jax.process_index()} of {jax.process_count()}), {common.num_threads()} CPU "
        "threads; `meshslice bench --devices N` emulates N devices on the CPU",
        markup=False,
        soft_wrap=True,
    )
    return True


def _print_flags(console: Console) -> None:
    console.print()
    flags = common.flags_in_effect()
    if not flags:
        console.print("flags in effect: none of XLA_FLAGS, LIBTPU_INIT_ARGS, JAX_*")
        return
    console.print("flags in effect:")
    for name, value in flags.items():
        console.print(f"  {name}={value}", markup=False, soft_wrap=True)
