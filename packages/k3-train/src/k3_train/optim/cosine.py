"""The cosine schedule, which the report uses: warm-up, half a cosine to a floor, flat after it."""

import math

from k3_train.optim.schedule import WarmUpSchedule


class CosineSchedule(WarmUpSchedule):
    """Falls from the end of the warm-up to the horizon."""

    def _height(self, step: int) -> float:
        return (1 + math.cos(math.pi * self._progress(step, self.warmup_steps))) / 2
