"""MeshSlice and its peers: 2D tensor-parallel products for JAX meshes."""

import importlib

from meshslice_jax.algorithms import ALGORITHMS as ALGORITHMS
from meshslice_jax.algorithms import check as check
from meshslice_jax.algorithms import legal_slice_counts as legal_slice_counts
from meshslice_jax.algorithms import schedule as schedule
from meshslice_jax.autotune import TuneReport as TuneReport
from meshslice_jax.autotune import tune as tune
from meshslice_jax.autotune import tune_report as tune_report
from meshslice_jax.block import OVERLAPPED_BLOCK as OVERLAPPED_BLOCK
from meshslice_jax.block import BlockSchedule as BlockSchedule
from meshslice_jax.compiled import compiler_options as compiler_options
from meshslice_jax.cost import CostBreakdown as CostBreakdown
from meshslice_jax.cost import seconds as seconds
from meshslice_jax.dataflow import Dataflow as Dataflow
from meshslice_jax.dot_general import dot_general as dot_general
from meshslice_jax.faults import Faults as Faults
from meshslice_jax.gemm import matmul as matmul
from meshslice_jax.gemm import placements as placements
from meshslice_jax.hardware import HARDWARE as HARDWARE
from meshslice_jax.hardware import HardwareSpec as HardwareSpec
from meshslice_jax.hardware import hardware_spec as hardware_spec
from meshslice_jax.layout import StoredRhs as StoredRhs
from meshslice_jax.layout import from_layout as from_layout
from meshslice_jax.layout import to_layout as to_layout
from meshslice_jax.mesh import MeshShape as MeshShape
from meshslice_jax.mesh import emulate_devices as emulate_devices
from meshslice_jax.mesh import factorisations as factorisations
from meshslice_jax.mesh import make_mesh as make_mesh
from meshslice_jax.model_plan import ModelPlan as ModelPlan
from meshslice_jax.model_plan import load_plan as load_plan
from meshslice_jax.model_plan import save_plan as save_plan
from meshslice_jax.models import MODELS as MODELS
from meshslice_jax.models import ModelShape as ModelShape
from meshslice_jax.models import fc_layers as fc_layers
from meshslice_jax.models import model as model
from meshslice_jax.plan import GemmPlan as GemmPlan
from meshslice_jax.plan import LayerPlan as LayerPlan
from meshslice_jax.plan_simulation import simulate_plan as simulate_plan
from meshslice_jax.problem import GemmProblem as GemmProblem
from meshslice_jax.simulate import simulate as simulate
from meshslice_jax.simulate import simulate_block as simulate_block
from meshslice_jax.timeline import Timeline as Timeline
from meshslice_jax.timeline import write_trace as write_trace

__version__ = "0.1.0"


def __getattr__(name: str):
    """`ms.nn`, imported when it is first asked for: it imports Flax."""
    if name == "nn":
        return importlib.import_module("meshslice_jax.nn")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
