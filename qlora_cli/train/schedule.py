"""Learning rate as a pure function of the step number, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from dataclasses import dataclass

NAMES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True)
class Schedule:
    """Warm-up followed by a decay of the peak learning rate.

    Attributes:
        name: `constant`, `linear`, `cosine` (half a period, Loshchilov and Hutter 2017, eq. 5) or `wsd`
            (warm-up, stable, decay; Hu et al. 2024, MiniCPM, section 4.2, here with a linear decay).
        total_steps: Optimizer steps of the whole run, at least 1.
        warmup_ratio: Share of `total_steps` over which the rate rises linearly from 0, in [0, 1].
        min_lr_ratio: Lowest rate as a share of the peak, in [0, 1]; `constant` has none.
        decay_ratio: Share of `total_steps` that `wsd` spends decaying, in [0, 1].
    """

    name: str
    total_steps: int
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.0
    decay_ratio: float = 0.1

    def __post_init__(self) -> None:
        """Refuse a name this module does not know and a run without steps."""
        if self.name not in NAMES:
            raise ValueError(f"unknown schedule `{self.name}`; accepted: {', '.join(NAMES)}")
        if self.total_steps < 1:
            raise ValueError(f"a run has at least 1 step, got {self.total_steps}")

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up; the step after them runs at the peak rate."""
        return min(math.ceil(self.warmup_ratio * self.total_steps), self.total_steps)

    def factor(self, step: int) -> float:
        """Share of the peak learning rate that a step uses.

        Args:
            step: Optimizer step, counted from 1. Steps past `total_steps` get the factor of the last.

        Returns:
            A factor in (0, 1] during the warm-up, in [min_lr_ratio, 1] after it. The first step is never 0.
        """
        warmup = self.warmup_steps
        if step <= warmup:
            return step / warmup
        if self.name == "constant":
            return 1.0
        start = warmup
        if self.name == "wsd":
            start = max(warmup, self.total_steps - round(self.decay_ratio * self.total_steps))
            if step <= start:
                return 1.0
        # progress is 0 at the first step after `start` and stays below 1 at the last step of the run
        progress = min((step - start - 1) / max(self.total_steps - start, 1), 1.0)
        shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.name == "cosine" else 1.0 - progress
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * shape
