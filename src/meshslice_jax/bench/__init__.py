"""Measured products: every algorithm beside XLA's own partitioning and a dense product.

A case is one pass (forward, dlhs, drhs) of one layer, timed as the runtime executes it,
with the storage order that the dataflow table gives. Its candidates are the plans asked
for and two baselines:

    gspmd   jit(lax.dot_general) on the same mesh, its three matrices placed as a plan's
            are; one for each dataflow, and one for each 1D placement, whose mesh is
            written as the algorithm sees it (1x16)
    dense   the same product on one device

Operands are integers in {-1, 0, 1}, so every right answer is the same to the bit in any
order of summation; an answer is compared with NumPy's before any time is taken of it.
A ModelPlan runs as it is (`planned`), without choices of candidates. Beside measured times
stands what the closed form projects for a hardware profile, which is modelled.

What cannot run is a row with its reason. Times of emulated devices compare programs
with each other on this machine; they predict no hardware.
"""

from meshslice_jax.bench.candidates import Candidate as Candidate
from meshslice_jax.bench.candidates import candidates as candidates
from meshslice_jax.bench.cases import PASSES as PASSES
from meshslice_jax.bench.cases import Options as Options
from meshslice_jax.bench.cases import Pass as Pass
from meshslice_jax.bench.cases import Row as Row
from meshslice_jax.bench.cases import cases as cases
from meshslice_jax.bench.cases import product as product
from meshslice_jax.bench.measure import run as run
from meshslice_jax.bench.planned import check_memory as check_memory
from meshslice_jax.bench.planned import plan_options as plan_options
