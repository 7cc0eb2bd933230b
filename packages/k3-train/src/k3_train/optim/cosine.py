"""The learning-rate schedule: linear warm-up, cosine to a floor, flat after it (report 5).

The horizon is a number of the configuration, not the length of a run: a run that is stopped and
resumed sees the learning rates of a run that was never stopped.
"""

import math


class CosineSchedule:
    """Factors in (0, 1] that multiply every peak learning rate.

    total_steps: the horizon. warmup_ratio: its share of linear warm-up, at least one step.
    min_lr_ratio: the floor, reached at the horizon and kept after it.
    """

    def __init__(self, *, total_steps: int, warmup_ratio: float, min_lr_ratio: float) -> None:
        self.total_steps = total_steps
        self.warmup_steps = max(1, round(total_steps * warmup_ratio))
        self.min_lr_ratio = min_lr_ratio

    def factor(self, step: int) -> float:
        """The factor of the update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decay_steps = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step + 1 - self.warmup_steps) / decay_steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine
