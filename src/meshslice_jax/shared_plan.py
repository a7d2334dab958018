"""One plan for all processes: what process 0 decided.

Processes that run different plans wait for each other for ever. The tuner gives the same
answer everywhere if it is asked the same, but a plan may also come from a file that differs
between hosts, from a profile that was measured on each, or from another version.
"""

from meshslice_jax import compat, distributed
from meshslice_jax.model_plan import ModelPlan, plan_from_json, plan_to_json


def shared_plan(plan: ModelPlan) -> ModelPlan:
    """Process 0's plan, on every process of the program; all must call it.

    Raises:
      RuntimeError: process 0 does not answer in time.
    """
    if compat.num_processes() == 1:
        return plan
    return plan_from_json(distributed.first_text(plan_to_json(plan)), "the plan of process 0")
