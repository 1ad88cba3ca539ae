"""The learning rate of a step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_cli.train.schedule import NAMES, Schedule

schedules = st.builds(
    Schedule,
    name=st.sampled_from(NAMES),
    total_steps=st.integers(1, 500),
    warmup_ratio=st.floats(0, 1),
    min_lr_ratio=st.floats(0, 1),
    decay_ratio=st.floats(0, 1),
)


@given(schedules)
def test_no_step_trains_with_a_rate_of_zero_or_above_the_peak(schedule: Schedule) -> None:
    factors = [schedule.factor(step) for step in range(1, schedule.total_steps + 1)]
    assert all(0 < factor <= 1 for factor in factors)


@given(schedules)
def test_the_rate_rises_through_the_warm_up_and_never_rises_after_it(schedule: Schedule) -> None:
    factors = [schedule.factor(step) for step in range(1, schedule.total_steps + 1)]
    warm, rest = factors[: schedule.warmup_steps], factors[schedule.warmup_steps :]
    assert warm == sorted(warm)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(rest, rest[1:], strict=False))


@given(schedules)
def test_the_first_step_after_the_warm_up_has_the_peak_rate(schedule: Schedule) -> None:
    if schedule.warmup_steps < schedule.total_steps:
        assert schedule.factor(schedule.warmup_steps + 1) == 1


def test_cosine_is_half_way_down_in_the_middle() -> None:
    schedule = Schedule("cosine", total_steps=100, min_lr_ratio=0.2)
    assert math.isclose(schedule.factor(51), 0.6)


def test_wsd_keeps_the_peak_until_its_decay_begins() -> None:
    schedule = Schedule("wsd", total_steps=100, decay_ratio=0.2)
    assert [schedule.factor(step) for step in (1, 80, 81, 91)] == [1, 1, 1, 0.5]


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="cosine"):
        Schedule("cosin", total_steps=1)
