"""What the commands share: consoles, usage errors, lists, files, devices, headers."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform as host
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import typer
from rich.console import Console

import meshslice_jax
from meshslice_jax import compat, distributed
from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.mesh import MeshShape, emulate_devices
from meshslice_jax.model_plan import ModelPlan, load_plan

#: Width of tables that go to a file or a pipe, where no terminal sets one.
PLAIN_WIDTH = 170
#: Environment variables that change what JAX does; also every JAX_*.
FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
PLATFORMS = ("cpu", "tpu", "gpu")


def stdout() -> Console:
    """The console for results; of several processes the first prints them."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(width=width, highlight=False, emoji=False, quiet=not distributed.is_first())


def stderr() -> Console:
    """The console for progress and errors."""
    return Console(stderr=True, highlight=False, emoji=False)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Prints text as it is, without markup or line breaks of its own."""
    console.print(text, style=style, markup=False, soft_wrap=True)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns an error of the caller's making into a message and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        say(stderr(), f"error: {error}", style="red")
        raise typer.Exit(2) from error


def comma_list(text: str) -> tuple[str, ...]:
    """Reads "a,b" as ("a", "b"), each once.

    Raises:
      ValueError: nothing between two commas.
    """
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        raise ValueError(f"{text!r} is not a list such as a,b")
    return tuple(dict.fromkeys(items))


def positive_ints(text: str, what: str) -> tuple[int, ...]:
    """Reads "1,4" as (1, 4).

    Raises:
      ValueError: an item is not a positive integer.
    """
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() and int(item) > 0 for item in items):
        raise ValueError(f"{what} {text!r} is not a list of positive integers such as 1,4")
    return tuple(int(item) for item in items)


def check_outputs(*paths: Path | None, draws: bool = False) -> None:
    """Raises before any work where what was asked for could not be written.

    Args:
      *paths: files to be written; None is not asked for.
      draws: whether a plot was asked for.

    Raises:
      ValueError: a folder that is not there, or a path that cannot be written.
      RuntimeError: matplotlib is not installed.
    """
    for path in paths:
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.absolute().parent}")
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name a file in it")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise ValueError(f"{path} cannot be written")
    if draws and importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib")


def refuse_choices(context: typer.Context, names: Sequence[str]) -> None:
    """Raises where the command line chooses what a plan has chosen already.

    Args:
      context: of the command.
      names: parameters that a plan decides.

    Raises:
      ValueError: some of them are given, named as options.
    """
    given = [
        next(option for option in parameter.opts if option.startswith("--"))
        for parameter in context.command.params
        if parameter.name in names
        and context.get_parameter_source(parameter.name).name == "COMMANDLINE"
    ]
    if given:
        has_model = any(parameter.name == "model" for parameter in context.command.params)
        raise ValueError(
            f"--plan is run as it is, so {', '.join(given)} cannot be chosen; leave "
            f"{'it' if len(given) == 1 else 'them'} out, or "
            + ("use --model instead of --plan" if has_model else "leave --plan out")
        )


def read_plan(path: Path) -> ModelPlan:
    """The ModelPlan in a file; what is to be noted of it is said.

    Raises:
      ValueError: the file cannot be read, or its plan is not one.
    """
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = load_plan(path)
    except OSError as error:
        raise ValueError(f"plan {path} cannot be read: {error.strerror}") from None
    for warning in caught:
        say(stderr(), f"note: {warning.message}", style="yellow")
    return plan


def profile_line(spec: HardwareSpec) -> str:
    """The profile behind modelled numbers, and which of its constants were fitted."""
    fitted = [fact.field for fact in spec.facts if fact.fitted]
    constants = f"fitted: {', '.join(fitted)}" if fitted else "no constant was fitted"
    return f"profile {spec.name} ({constants}); times are modelled, nothing was measured"


def find_devices(platform: str, shape: MeshShape, count: int | None) -> list[jax.Device]:
    """The devices of a platform; on "cpu" as many emulated ones as asked for.

    Joins the other processes first, if there are any: then the devices are all of theirs.

    Args:
      platform: "cpu", "tpu" or "gpu".
      shape: the mesh that they must fill.
      count: how many to emulate; None is what the mesh needs.

    Raises:
      ValueError: an unknown platform, or fewer devices than the mesh needs.
      RuntimeError: JAX already runs without them, or the platform is not there.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform {platform!r} is not one of {', '.join(PLATFORMS)}")
    several = distributed.initialize().num_processes > 1
    if several and count is not None:
        raise ValueError(
            "each of several processes brings devices of its own, so --devices can't be chosen; "
            "use --devices-per-process of `meshslice launch`"
        )
    if platform == "cpu" and not several:
        count = shape.num_chips if count is None else count
        if count < shape.num_chips:
            raise ValueError(f"a {shape} mesh needs {shape.num_chips} devices, got {count}")
        if not compat.jax_has_started():
            jax.config.update("jax_platforms", "cpu")
        emulate_devices(count)
    elif count is not None:
        raise ValueError(f"devices are emulated on cpu only; {platform} has those that it has")
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise RuntimeError(
            f"no {platform} is visible to JAX ({error}); see `meshslice doctor`"
        ) from error
    if len(devices) < shape.num_chips:
        raise ValueError(
            f"a {shape} mesh needs {shape.num_chips} devices and there are {len(devices)} "
            f"({platform})" + _way_out(platform, shape, several)
        )
    return devices


def _way_out(platform: str, shape: MeshShape, several: bool) -> str:
    if platform != "cpu" or not several:
        return ""
    each = -(-shape.num_chips // compat.num_processes())
    return f"; use --devices-per-process {each} of `meshslice launch`"


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def flags_in_effect() -> dict[str, str]:
    """Environment variables that are set and change what JAX does."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in FLAG_VARIABLES or name.startswith("JAX_")
    }


def num_threads() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def header(devices: list[jax.Device]) -> str:
    """Versions, devices and flags in one line."""
    versions = [f"meshslice-jax {meshslice_jax.__version__}"]
    versions += [f"{name} {version_of(name)}" for name in ("jax", "jaxlib")]
    versions.append(f"Python {host.python_version()}")
    flags = [f"{name}={value!r}" for name, value in flags_in_effect().items()] or ["no flags set"]
    kind = devices[0].device_kind
    count = f"{len(devices)} x {kind}"
    if compat.num_processes() > 1:
        count += f" in {compat.num_processes()} processes"
    return " | ".join([", ".join(versions), count, " ".join(flags)])


def emulation_banner(devices: list[jax.Device]) -> str | None:
    """The warning that belongs to every time measured on emulated devices."""
    if devices[0].platform != "cpu":
        return None
    return (
        f"EMULATED: {len(devices)} devices share {num_threads()} CPU threads. Times compare "
        "programs with each other on this machine; they do not predict hardware."
    )
