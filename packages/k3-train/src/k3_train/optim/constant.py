"""Warm-up, then the peak for ever."""

from k3_train.optim.schedule import WarmUpSchedule


class ConstantSchedule(WarmUpSchedule):
    """Has no floor, and no end."""

    def _height(self, step: int) -> float:
        return 1.0
