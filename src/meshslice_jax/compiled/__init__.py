"""Compile for a TPU topology without a TPU, read the schedule, replay it.

    topology     what a topology is, meshes over described devices, the environment
    jobs, child, compiler    programs to compile, in child processes with a time limit
    options      compiler options per TPU generation, and whether they are accepted
    hlo, loop, program    the scheduled module as text, then as work, moves and waits
    replay       how long that takes on a HardwareSpec: projections, never measurements
    candidates, run    what is tried for each product, and what came of it

On real TPUs the authors' MeshSlice lost, since the compiler of that day overlapped sends
but no collectives (ISCA 2025); this room asks today's compiler what it overlaps.
"""

from meshslice_jax.compiled.compiler import Compiler as Compiler
from meshslice_jax.compiled.options import compiler_options as compiler_options
from meshslice_jax.compiled.options import probe_options as probe_options
from meshslice_jax.compiled.replay import Links as Links
from meshslice_jax.compiled.replay import replay as replay
from meshslice_jax.compiled.topology import Topology as Topology
from meshslice_jax.compiled.topology import parse_topology as parse_topology
