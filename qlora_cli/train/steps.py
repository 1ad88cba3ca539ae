"""Which examples a step trains: a pure function of the seed, so that a step number is a data position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

MicroBatch = Sequence[int]


@dataclass(frozen=True)
class StepPlan:
    """Cuts every epoch's micro-batches into the accumulation windows of optimizer steps.

    The last window of an epoch may hold fewer micro-batches: it is stepped like the others and its loss is
    divided by what it holds; nothing is carried into the next epoch.

    Attributes:
        epoch_batches: Epoch number from 0 to that epoch's micro-batches (lists of example indices), always
            the same for one epoch, and of the same number for all epochs.
        window: Micro-batches a full step takes: `gradient_accumulation_steps` times the number of processes.
        num_batches: Micro-batches in one epoch.
        total_steps: Optimizer steps of the whole run.
    """

    epoch_batches: Callable[[int], Sequence[MicroBatch]]
    window: int
    num_batches: int
    total_steps: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch, the last, smaller one counted."""
        return math.ceil(self.num_batches / self.window)

    def windows(self, first_step: int) -> Iterator[tuple[int, float, Sequence[MicroBatch]]]:
        """Yield the steps of the run from one on.

        Args:
            first_step: Step to begin with, counted from 1.

        Yields:
            `(step, epoch, micro_batches)`; `epoch` is the fraction of epochs done after the step.
        """
        per_epoch = self.steps_per_epoch
        batches: Sequence[MicroBatch] = ()
        loaded = -1
        for step in range(first_step, self.total_steps + 1):
            epoch, index = divmod(step - 1, per_epoch)
            if epoch != loaded:
                batches, loaded = self.epoch_batches(epoch), epoch
            end = min((index + 1) * self.window, self.num_batches)
            yield step, epoch + end / self.num_batches, batches[index * self.window : end]


def count_steps(num_batches: int, window: int, epochs: float | None, max_steps: int | None) -> int:
    """Number of optimizer steps of a run.

    Args:
        num_batches: Micro-batches in one epoch, at least 1.
        window: Micro-batches a full step takes.
        epochs: Passes over the data, may be a fraction; None when `max_steps` is given.
        max_steps: Steps, whatever the epochs; None when `epochs` is given.

    Returns:
        At least 1.

    Raises:
        ValueError: If neither or both of `epochs` and `max_steps` are given.
    """
    if (epochs is None) == (max_steps is None):
        raise ValueError("one of `epochs` and `max_steps` is needed, not both")
    if max_steps is not None:
        return max_steps
    assert epochs is not None
    return max(1, math.ceil(round(epochs * math.ceil(num_batches / window), 9)))
