"""Warm-up, stable, decay (MiniCPM, arXiv 2404.06395): a plateau, then a line to the floor."""

from k3_train.optim.schedule import WarmUpSchedule


class WSDSchedule(WarmUpSchedule):
    """Falls in the last `decay_ratio` of the horizon, but not before the end of the warm-up."""

    def _height(self, step: int) -> float:
        decay_steps = round(self.total_steps * self.decay_ratio)
        start = max(self.warmup_steps, self.total_steps - decay_steps)
        return 1 - max(0.0, self._progress(step, start))
