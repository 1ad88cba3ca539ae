"""Which micro-batches a step trains."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_cli.train.steps import StepPlan, count_steps


def plan(num_batches: int, window: int, total_steps: int) -> StepPlan:
    return StepPlan(
        epoch_batches=lambda epoch: [[epoch * num_batches + i] for i in range(num_batches)],
        window=window,
        num_batches=num_batches,
        total_steps=total_steps,
    )


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 4))
def test_whole_epochs_train_every_micro_batch_once_in_order(
    num_batches: int, window: int, epochs: int
) -> None:
    steps = count_steps(num_batches, window, float(epochs), None)
    trained = [i for _, _, batches in plan(num_batches, window, steps).windows(1) for [i] in batches]
    assert trained == list(range(num_batches * epochs))


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 60), st.data())
def test_going_on_at_a_step_gives_the_windows_of_the_uninterrupted_run(
    num_batches: int, window: int, total: int, data: st.DataObject
) -> None:
    whole = list(plan(num_batches, window, total).windows(1))
    first = data.draw(st.integers(1, total))
    assert list(plan(num_batches, window, total).windows(first)) == whole[first - 1 :]


def test_a_window_never_reaches_into_the_next_epoch() -> None:
    windows = [list(batches) for _, _, batches in plan(num_batches=3, window=2, total_steps=4).windows(1)]
    assert windows == [[[0], [1]], [[2]], [[3], [4]], [[5]]]


def test_the_epoch_of_a_step_is_the_share_of_data_seen() -> None:
    assert [epoch for _, epoch, _ in plan(3, 2, 4).windows(1)] == pytest.approx([2 / 3, 1, 5 / 3, 2])


@given(st.integers(1, 1000), st.integers(1, 16), st.floats(0.01, 10))
def test_a_fraction_of_an_epoch_is_rounded_up_to_whole_steps(
    num_batches: int, window: int, epochs: float
) -> None:
    exact = epochs * math.ceil(num_batches / window)
    assert exact - 1e-6 <= count_steps(num_batches, window, epochs, None) < exact + 1


@pytest.mark.parametrize(("epochs", "max_steps"), [(None, None), (1.0, 5)])
def test_a_run_has_either_epochs_or_steps(epochs: float | None, max_steps: int | None) -> None:
    with pytest.raises(ValueError, match="not both"):
        count_steps(1, 1, epochs, max_steps)
