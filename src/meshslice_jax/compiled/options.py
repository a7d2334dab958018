"""Compiler options that let collectives run beside products, per TPU generation.

What was found by compiling (jax 0.10.2, libtpu 0.0.52), not by measuring:

- v4 compiles every collective as synchronous unless told otherwise.
  `xla_enable_async_all_gather` makes all-gathers asynchronous, and only one at a time
  unless `xla_max_concurrent_async_all_gathers` allows two: both moving matrices of an
  output-stationary product. No option makes a reduce-scatter asynchronous.
- v5e fuses gathers into products by default; asking for asynchronous ones as on v4 is
  not needed.
- v5p and v6e keep gathers and reduce-scatters synchronous whatever they are told.
- Permutes are asynchronous everywhere. All-to-alls are so where they are forced to be,
  which on v5e makes the gathers synchronous.
- The combiner may merge the reduce-scatters of slices back into one, which undoes the
  slicing; `xla_jf_crs_combiner_threshold_count=1` keeps them apart.

Options are part of a program, never of the process: they go to `compile(compiler_options=)`
or `jax.jit(..., compiler_options=)`, and nobody sets them behind the user's back.
"""

import types
from collections.abc import Iterable, Mapping
from dataclasses import fields

from meshslice_jax.compiled.compiler import Compiler
from meshslice_jax.compiled.jobs import Options, ProbeJob
from meshslice_jax.compiled.topology import GENERATIONS, Generation, Topology
from meshslice_jax.dataflow import Dataflow
from meshslice_jax.hardware import HardwareSpec, hardware_spec
from meshslice_jax.plan import GemmPlan, LayerPlan

#: v4: asynchronous all-gathers, one for each moving matrix.
ASYNC_GATHERS = types.MappingProxyType(
    {"xla_enable_async_all_gather": True, "xla_max_concurrent_async_all_gathers": 2}
)
#: Keeps the reduce-scatters of slices apart.
KEEP_SLICES = types.MappingProxyType({"xla_jf_crs_combiner_threshold_count": 1})
#: All-to-alls beside products.
ASYNC_ALL_TO_ALLS = types.MappingProxyType(
    {"xla_tpu_enable_async_all_to_all": True, "xla_tpu_force_async_all_to_all": True}
)
#: What XLA's own decomposition of a partitioned einsum may be told.
GSPMD_MODES = types.MappingProxyType(
    {
        "windowed": types.MappingProxyType({}),
        "whole": types.MappingProxyType({"xla_jf_spmd_threshold_for_windowed_einsum_mib": 100_000}),
        "post_spmd": types.MappingProxyType(
            {
                "xla_jf_spmd_threshold_for_windowed_einsum_mib": 100_000,
                "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
                "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
            }
        ),
    }
)


def generation_of(hardware: str | HardwareSpec) -> Generation:
    """The TPU generation that a hardware profile describes.

    Raises:
      ValueError: the profile is of no generation whose compiler is known here.
    """
    name = hardware_spec(hardware).name
    for generation in GENERATIONS.values():
        if name == generation.hardware or name.startswith(f"{generation.hardware}_"):
            return generation
    raise ValueError(
        f"no compiler options are known for hardware {name!r}; they are for "
        f"{', '.join(g.hardware for g in GENERATIONS.values())}"
    )


def compiler_options(hardware: str | HardwareSpec, plan) -> Options:
    """Options under which the TPU compiler overlaps what a plan means to overlap.

    Pass them to `jax.jit(f, compiler_options=...)` or to `lowered.compile(...)`; on other
    platforms they are not known. `probe_options` asks the installed compiler about them.

    Args:
      hardware: a TPU profile or its name, such as "tpu_v4".
      plan: a GemmPlan for its product; a LayerPlan or ModelPlan for a program of all of its
        products.

    Raises:
      ValueError: hardware of no known TPU generation.
      TypeError: not a plan.
    """
    if isinstance(plan, GemmPlan):
        return _of_product(generation_of(hardware), plan)
    if isinstance(plan, LayerPlan):
        return options_of_plans(hardware, (getattr(plan, f.name) for f in fields(plan)))
    layers = getattr(plan, "layers", None)  # a ModelPlan; its room is above this one
    if not isinstance(layers, Mapping):
        raise TypeError(
            f"plan must be a GemmPlan, a LayerPlan or a ModelPlan, got {type(plan).__name__}"
        )
    return options_of_plans(hardware, layers.values())


def _of_product(generation: Generation, plan: GemmPlan) -> Options:
    found: Options = {}
    if generation.name == "v4":
        found |= ASYNC_GATHERS
    if plan.dataflow is Dataflow.OS:
        return found
    if plan.reduce_scatter == "all_to_all" or plan.scatter_group > 1:
        found |= ASYNC_ALL_TO_ALLS
    if plan.reduce_scatter == "native" and plan.slice_count > 1:
        found |= KEEP_SLICES
    return found


def options_of_plans(
    hardware: str | HardwareSpec, plans: Iterable[GemmPlan | LayerPlan]
) -> Options:
    """The options of all products of one program together."""
    found: Options = {}
    for plan in plans:
        found |= compiler_options(hardware, plan)
    return found


def probe_options(
    topology: Topology, options: Mapping[str, object], limit_s: float = 60.0
) -> dict[str, str]:
    """Which options the installed compiler refuses, and what it says.

    Each is tried by itself in a child process, since some abort the process.

    Args:
      topology: what to compile for.
      options: name -> value.
      limit_s: seconds for each.

    Returns:
      name -> reason, of those that are refused; empty where all are accepted.

    Raises:
      RuntimeError: libtpu is not installed.
    """
    refused = {}
    with Compiler(topology, limit_s) as compiler:
        for name, value in options.items():
            job = ProbeJob(
                topology=str(topology), mesh_shape=(topology.num_chips, 1), options={name: value}
            )
            if error := compiler.compile(job).error:
                refused[name] = error.split("\n")[0]
    return refused
