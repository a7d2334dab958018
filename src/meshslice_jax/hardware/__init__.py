"""Hardware as data: `hardware_spec("tpu_v4")`, a path to a JSON file, or a record."""

import pathlib
import types

from meshslice_jax.hardware import profiles
from meshslice_jax.hardware.spec import Fact as Fact
from meshslice_jax.hardware.spec import HardwareSpec as HardwareSpec
from meshslice_jax.hardware.spec import load_spec as load_spec
from meshslice_jax.hardware.spec import spec_from_json as spec_from_json
from meshslice_jax.hardware.spec import spec_to_json as spec_to_json

#: Name -> profile.
HARDWARE = types.MappingProxyType(
    {
        spec.name: spec
        for spec in (
            profiles.TPU_V4,
            profiles.TPU_V5E,
            profiles.TPU_V5P,
            profiles.TPU_V6E,
            profiles.TPU_7X,
            profiles.TPU_V4_PAPER,
            profiles.TPU_V4_PAPER_1C,
            profiles.TPU_V4_PAPER_3,
            profiles.TPU_V4_PROTOTYPE,
            profiles.TPU_V4_LOWLAT,
            profiles.TPU_V4_COMPILED,
            profiles.TPU_V5E_COMPILED,
            profiles.TPU_V5P_COMPILED,
            profiles.TPU_V6E_COMPILED,
        )
    }
)


def hardware_spec(which: str | pathlib.Path | HardwareSpec) -> HardwareSpec:
    """The spec that `which` means.

    Args:
      which: a name in HARDWARE, the path of a JSON file (a Path, or text that ends in
        ".json"), or a spec.

    Raises:
      ValueError: no profile has that name, or the file is not a spec.
      TypeError: none of the three kinds.
    """
    if isinstance(which, HardwareSpec):
        return which
    if isinstance(which, pathlib.Path) or (isinstance(which, str) and which.endswith(".json")):
        if not pathlib.Path(which).is_file():
            raise ValueError(f"hardware file {str(which)!r} does not exist")
        return load_spec(which)
    if not isinstance(which, str):
        raise TypeError(
            f"hardware must be a name, a path or a HardwareSpec, got {type(which).__name__}"
        )
    if which not in HARDWARE:
        raise ValueError(
            f"unknown hardware {which!r}; there are {', '.join(HARDWARE)}, or give the path of "
            "a JSON file with the fields of HardwareSpec"
        )
    return HARDWARE[which]
