"""The policy: a fixed set within the budget, chosen and ordered without a clock or a history."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlora_cli.optim.pages import MIB
from qlora_cli.optim.placement import (
    PagingConfig,
    choose_backend,
    choose_budget,
    choose_page_bytes,
    evict_plan,
    order,
    resident_set,
)

page_sizes = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@settings(max_examples=500)
@given(page_sizes, st.integers(0, 1500))
def test_the_resident_set_is_the_longest_prefix_within_the_budget(pages: list[int], budget: Any) -> None:
    chosen = resident_set(pages, budget)
    held = sum(pages[page] for page in chosen)
    assert held <= budget
    assert chosen == frozenset(range(len(chosen)))
    assert len(chosen) == len(pages) or held + pages[len(chosen)] > budget
    assert chosen == resident_set(pages, budget)


@settings(max_examples=500)
@given(st.integers(1, 40), st.integers(0, 45), st.integers(2, 6))
def test_a_fixed_set_hits_at_least_as_often_as_the_least_recently_used_set(
    num_pages: int, room: int, steps: int
) -> None:
    fixed = len(resident_set([1] * num_pages, room)) * steps
    cache: OrderedDict[int, None] = OrderedDict((page, None) for page in range(min(room, num_pages)))
    hits = 0
    for page in list(range(num_pages)) * steps:
        hits += page in cache
        cache.pop(page, None)
        cache[page] = None
        while len(cache) > room:
            cache.popitem(last=False)
    assert fixed >= hits


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_a_step_visits_every_live_page_once_staged_first_then_residents(
    live: Any, resident: Any, staged: Any
) -> None:
    visited = order(sorted(live), resident, staged)
    assert sorted(visited) == sorted(live)
    rank = [0 if page in staged else 1 if page in resident else 2 for page in visited]
    assert rank == sorted(rank)


@settings(max_examples=500)
@given(page_sizes, st.integers(0, 2000), st.integers(0, 1500))
def test_eviction_frees_enough_from_the_top_and_leaves_a_prefix(
    pages: list[int], need: int, budget: Any
) -> None:
    resident = resident_set(pages, budget)
    given_up = evict_plan(need, pages, resident)
    freed = sum(pages[page] for page in given_up)
    assert freed >= need or len(given_up) == len(resident)
    assert not given_up or freed - pages[given_up[-1]] < need
    assert resident - set(given_up) == frozenset(range(len(resident) - len(given_up)))


def test_the_page_shrinks_until_its_slots_fit_beside_the_state_and_says_so() -> None:
    assert choose_page_bytes(None, 1280 * MIB, 4).value == 16 * MIB
    shrunk = choose_page_bytes(None, 85_196_800, 4)
    assert shrunk.value == 4 * MIB
    assert shrunk.reason == "4 MiB instead of 16, because 4 slots stand beside a state of 81.2 MiB"
    assert choose_page_bytes(None, 1000, 4).value == MIB
    assert choose_page_bytes(64, 1000, 4).value == 64 * MIB


def test_auto_becomes_a_backend_with_its_reason() -> None:
    assert choose_backend(PagingConfig(), "cuda").value == "resident"
    assert choose_backend(PagingConfig(vram_budget_mib=0), "cuda").value == "host"
    on_cpu = choose_backend(PagingConfig(), "cpu")
    assert on_cpu.value == "host"
    assert "emulated on cpu" in on_cpu.reason
    assert choose_backend(PagingConfig(backend="resident"), "cpu").value == "resident"


def test_the_budget_auto_is_the_whole_state() -> None:
    assert choose_budget("auto", 123).value == 123
    assert choose_budget(0, 123).value == 0
    assert choose_budget(2, 123).value == 2 * MIB


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "pined"}, "paging.backend must be one of auto, resident, host, got 'pined'"),
        ({"prefetch": "always"}, "paging.prefetch must be one of off, step"),
        ({"page_mib": 0}, "paging.page_mib must be above 0"),
        ({"staging_pages": 1}, "paging.staging_pages must be 2 to 16, got 1"),
        ({"vram_budget_mib": -1}, "paging.vram_budget_mib must be auto or a number >= 0, got -1"),
        ({"vram_budget_mib": "none"}, "paging.vram_budget_mib must be auto or a number >= 0, got 'none'"),
        ({"backend": "resident", "vram_budget_mib": 0}, "vram_budget_mib must be auto"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_accepted(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagingConfig(**values)


def test_a_negative_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be >= 0 bytes"):
        resident_set([1], -1)
