"""Time of what is not a fully connected layer, from rooflines.

The paper's end-to-end ratio adds the rest of a block as measured on one TPUv4; it does
not print that time. Here it is the sum of three rooflines, none of them fitted: the
products of attention at 80 % of the MXU's peak, passes over the score matrices in
float32 (attention was not fused), and passes over activations of the model's width.
The pass counts are assumptions; the times implied by the paper's two pairs of ratios
(9.1 ms for GPT-3, 15.4 ms for Megatron-NLG) lie within 7 % of the result.
"""

from meshslice_jax.hardware import HardwareSpec
from meshslice_jax.models import ModelShape

_MXU_FRACTION = 0.8  # assumed: attention's products are small
_SCORE_PASSES = 4 + 7  # over the score matrices, forward and backward, unfused softmax
_SCORE_BYTES = 4  # float32 scores
# Reads and writes of width H: GeLU 4 x (2 + 3), two layer norms 2 + 3 each, two residual
# additions 3 + 2 each; forward + backward.
_ACTIVATION_PASSES = 4 * 5 + 2 * 5 + 2 * 5
_ACTIVATION_BYTES = 2  # bfloat16


def non_fc_s(
    model: ModelShape, batch: int, seq_len: int, num_chips: int, hardware: HardwareSpec
) -> float:
    """Seconds of one block outside its FC layers, forward and backward.

    Args:
      model: the model.
      batch: sequences over all chips.
      seq_len: tokens of a sequence.
      num_chips: chips over which sequences and heads are spread.
      hardware: peak FLOP/s and HBM bandwidth.
    """
    scores = batch * model.heads * seq_len**2 / num_chips
    # Two products of 2 * scores * head_dim FLOPs, forward once, backward twice.
    attention_flops = 3 * 2 * 2 * scores * model.head_dim
    hbm_bytes = (
        scores * _SCORE_PASSES * _SCORE_BYTES
        + batch * seq_len * model.hidden / num_chips * _ACTIVATION_PASSES * _ACTIVATION_BYTES
    )
    peak = hardware.flops_per_s("bfloat16") * _MXU_FRACTION
    return attention_flops / peak + hbm_bytes / hardware.hbm_bytes_per_s
