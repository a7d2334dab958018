"""What a training run is told: one frozen value."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a GPT is trained: AdamW, linear warm-up, cosine decay, clipped gradients.

    Attributes:
      steps: of the whole run; the learning rate decays to its end.
      learning_rate: the highest.
      warmup_steps: over which it rises.
      final_fraction: the learning rate at the end, as a fraction of the highest.
      weight_decay: of kernels and tables; norms and biases do not decay.
      clip_norm: the most that the norm of all gradients together may be.
      seed: of the first weights and of the data's order.
      dtype: of activations and products; parameters and sums are float32.
      remat: whether blocks are computed again in the backward pass.

    Raises:
      ValueError: a number that cannot be right.
    """

    steps: int = 500
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    remat: bool = False

    def __post_init__(self):
        if self.steps < 1 or not self.warmup_steps >= 0:
            raise ValueError(
                f"steps must be at least 1 and warmup_steps at least 0, got {self.steps} and "
                f"{self.warmup_steps}"
            )
        if not (self.learning_rate > 0 and self.clip_norm > 0 and self.weight_decay >= 0):
            raise ValueError(
                "learning_rate and clip_norm must be positive and weight_decay at least 0, got "
                f"{self.learning_rate}, {self.clip_norm} and {self.weight_decay}"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype {self.dtype!r} is not one of float32, bfloat16")
