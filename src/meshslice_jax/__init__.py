"""MeshSlice and its peers: 2D tensor-parallel products for JAX meshes."""

from meshslice_jax.algorithms import ALGORITHMS as ALGORITHMS
from meshslice_jax.algorithms import check as check
from meshslice_jax.algorithms import legal_slice_counts as legal_slice_counts
from meshslice_jax.algorithms import schedule as schedule
from meshslice_jax.dataflow import Dataflow as Dataflow
from meshslice_jax.gemm import matmul as matmul
from meshslice_jax.gemm import placements as placements
from meshslice_jax.mesh import MeshShape as MeshShape
from meshslice_jax.mesh import emulate_devices as emulate_devices
from meshslice_jax.mesh import factorisations as factorisations
from meshslice_jax.mesh import make_mesh as make_mesh
from meshslice_jax.plan import GemmPlan as GemmPlan
from meshslice_jax.plan import LayerPlan as LayerPlan
from meshslice_jax.problem import GemmProblem as GemmProblem

__version__ = "0.1.0"
