"""What the schedules share: linear warm-up, and a horizon (report 5).

The horizon is a number of the configuration, not the length of a run: a run that is stopped and
resumed sees the learning rates of a run that was never stopped.
"""


class WarmUpSchedule:
    """Factors in (0, 1] that multiply every peak learning rate.

    total_steps: the horizon. warmup_ratio: its share of linear warm-up, at least one step.
    min_lr_ratio: the floor, reached at the horizon and kept after it. decay_ratio: the share of the
    horizon that a schedule with a plateau decays in. What comes after the warm-up is a subclass's.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        warmup_ratio: float,
        min_lr_ratio: float,
        decay_ratio: float = 0.0,
    ) -> None:
        self.total_steps = total_steps
        self.warmup_steps = max(1, round(total_steps * warmup_ratio))
        self.min_lr_ratio, self.decay_ratio = min_lr_ratio, decay_ratio

    def factor(self, step: int) -> float:
        """The factor of the update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * self._height(step)

    def _height(self, step: int) -> float:
        """Above the floor after the warm-up: 1 at the peak, 0 at the floor."""
        raise NotImplementedError

    def _progress(self, step: int, start: int) -> float:
        """How much of the way from `start` to the horizon is done with this update, at most 1."""
        return min(1.0, (step + 1 - start) / max(1, self.total_steps - start))
