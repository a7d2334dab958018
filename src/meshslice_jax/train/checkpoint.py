"""Checkpoints that are whole or passed over: Orbax, with a seal.

    DIR/step_00000100/     the state, as Orbax writes it: arrays in natural, global shapes
        run.json           what the run was told (model, settings, text)
        seal.json          size and SHA-256 of every file: written last
    DIR/step_00000200.orbax-checkpoint-tmp/    a save that was killed: ignored, then removed

Saves are asynchronous: `save` returns when the arrays are copied, a thread writes them into
a temporary folder, seals it and renames it; an old one is renamed before it is removed. A run
that is killed at any moment leaves either the old checkpoints or the new one too. Before a
checkpoint is loaded, its files are compared with its seal; one that is truncated, damaged or
without a seal is passed over with a message, and the one before it is taken.

Arrays are restored with the shardings of the run that loads them, whatever mesh, plan or
number of processes wrote them.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

_PREFIX, _SEAL, _RUN = "step_", "seal.json", "run.json"
#: Written by Orbax when it commits, after the seal.
_UNSEALED = {_SEAL, "_CHECKPOINT_METADATA"}


class _Sealing(ocp.StandardCheckpointHandler):
    """Writes what the run was told and the seal, before Orbax renames the folder."""

    def __init__(self, run: Mapping[str, Any]):
        super().__init__()
        self.run = dict(run)

    def finalize(self, directory: os.PathLike) -> None:
        super().finalize(directory)
        if jax.process_index() == 0:
            folder = Path(os.fspath(directory))
            _write(folder / _RUN, self.run)
            _write(folder / _SEAL, _contents(folder))


@ocp.args.register_with_handler(_Sealing, for_save=True, for_restore=True)
class _Save(ocp.args.StandardSave):
    """Orbax finds a handler by the type of its arguments."""


def _contents(folder: Path) -> dict[str, list]:
    """Name -> (bytes, SHA-256) of every file that a seal covers."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.name not in _UNSEALED:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = [path.stat().st_size, digest]
    return found


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(fields, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def fault(folder: Path) -> str | None:
    """Why a checkpoint may not be loaded, or None if all its files are as they were sealed."""
    try:
        sealed = json.loads((folder / _SEAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"it has no readable {_SEAL}, so it was not written to its end"
    found = _contents(folder)
    for name, (size, digest) in sealed.items():
        if name not in found:
            return f"{name} is missing"
        if found[name][0] != size:
            return f"{name} has {found[name][0]} bytes, and {size} were written"
        if found[name][1] != digest:
            return f"{name} has other contents than were written"
    return None


class Checkpoints:
    """The checkpoints of a run in one folder; all processes of the run use it alike.

    Args:
      directory: the folder, on a file system that all processes see; made if need be.
      run: what the run was told, as JSON values; kept with every checkpoint. "model" has to
        be the same in a run that goes on with it.
      keep: how many of the newest to keep; those that were passed over do not count.
      say: what to do with messages.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        run: Mapping[str, Any],
        *,
        keep: int = 3,
        say: Callable[[str], None] = print,
    ):
        self.directory = Path(directory).absolute()
        self.run, self.keep, self.say = dict(run), keep, say
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
        self._passed_over: set[int] = set()
        self._checkpointer = ocp.AsyncCheckpointer(_Sealing(run))

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.directory / f"{_PREFIX}{step:08d}"

    def steps(self) -> list[int]:
        """Steps whose saves were committed, newest first, damaged ones included."""
        names = [path.name for path in self.directory.glob(f"{_PREFIX}*") if path.is_dir()]
        numbers = [name.removeprefix(_PREFIX) for name in names]
        return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)

    def save(self, step: int, state: Any) -> None:
        """Starts to save a state; waits only for the save before it.

        The state may be donated to the next step as soon as this returns.
        """
        self._checkpointer.wait_until_finished()
        self._remove_old()
        self._passed_over.discard(step)
        self._checkpointer.save(self.folder(step), args=_Save(state), force=True)

    def _remove_old(self) -> None:
        """Leaves the newest that may be loaded, and what is newer than they are."""
        if jax.process_index() == 0:
            whole = [step for step in self.steps() if step not in self._passed_over]
            for step in self.steps():
                if len(whole) > self.keep and step < whole[self.keep - 1]:
                    doomed = self.folder(step).with_suffix(".tmp")  # `clear` finishes the work
                    self.folder(step).rename(doomed)
                    shutil.rmtree(doomed)

    def newest(self) -> int | None:
        """The newest step whose checkpoint is whole; says which were passed over, and why."""
        for step in self.steps():
            found = fault(self.folder(step))
            if found is None:
                return step
            self._passed_over.add(step)
            self.say(f"checkpoint {self.folder(step)} is passed over: {found}")
        return None

    def run_of(self, step: int) -> dict[str, Any]:
        """What the run that saved a checkpoint was told."""
        return json.loads((self.folder(step) / _RUN).read_text(encoding="utf-8"))

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a checkpoint, placed as `abstract` says.

        Args:
          step: a step for which `fault` is None.
          abstract: shapes, dtypes and shardings of the state.
        """
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(self.folder(step), abstract)

    def clear(self) -> None:
        """Removes what killed saves and removals have left."""
        if jax.process_index() == 0:
            for path in self.directory.glob(f"{_PREFIX}*tmp*"):
                shutil.rmtree(path)

    def close(self) -> None:
        """Waits for the last save."""
        self._checkpointer.wait_until_finished()
        self._checkpointer.close()
