"""Page arithmetic: every byte of the state lies on exactly one page, at the sizes the design promises."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_cli.optim.pages import BLOCK, MIB, block_bytes, blocks_per_page, formats, page_table, state_bytes

LLAMA_8B = [  # (in, out) of the seven linear layers
    (4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096),
]  # fmt: skip


def lora_numels(rank: int) -> list[int]:
    return [rank * size for _ in range(32) for pair in LLAMA_8B for size in pair]


sizes = st.lists(st.integers(0, 3000), min_size=1, max_size=12)
tables = st.tuples(sizes, st.integers(2048, 200_000), st.integers(0, 2000), st.sampled_from([8, 32]))


def test_blocks_and_full_pages_have_the_documented_sizes() -> None:
    assert (block_bytes(8), block_bytes(32)) == (520, 2048)
    assert (blocks_per_page(16 * MIB, 8), blocks_per_page(16 * MIB, 32)) == (32_256, 8_192)


@pytest.mark.parametrize(("rank", "mib8", "mib32"), [(8, 40.625, 160), (16, 81.25, 320), (64, 325, 1280)])
def test_the_state_of_an_8b_lora_has_the_published_size_and_all_of_it_is_on_pages(
    rank: int, mib8: float, mib32: float
) -> None:
    numels = lora_numels(rank)
    for bits, mib in ((8, mib8), (32, mib32)):
        table = page_table(numels, formats(numels, bits), 16 * MIB)
        assert table.state_bytes == mib * MIB == state_bytes(numels, table.bits)


@given(tables)
def test_every_element_lies_on_exactly_one_page_in_order(case: Any) -> None:
    numels, page_bytes, small, wish = case
    table = page_table(numels, formats(numels, wish, small), page_bytes)
    for param, numel in enumerate(numels):
        assert sum(s.num_elems for s in table.by_param[param]) == numel
        expected = 0
        for segment in table.by_param[param]:
            assert segment.elem0 == expected
            assert segment.elem0 % BLOCK == 0
            expected += segment.num_elems
    assert sorted(s.param for p in table.pages for s in p.segments) == sorted(
        s.param for of_one in table.by_param for s in of_one
    )


@given(tables)
def test_segments_fill_their_page_without_gap_or_overlap(case: Any) -> None:
    numels, page_bytes, small, wish = case
    table = page_table(numels, formats(numels, wish, small), page_bytes)
    for number, page in enumerate(table.pages):
        assert page.number == number
        block = 0
        for segment in page.segments:
            assert (segment.page, segment.block0) == (number, block)
            assert table.bits[segment.param] == page.bits
            block += segment.num_blocks
        assert block == page.num_blocks
        assert page.num_bytes <= page_bytes
        assert list(page.areas().values())[-1][1] == page.num_bytes


@given(tables)
def test_areas_of_a_page_touch_and_full_pages_are_aligned(case: Any) -> None:
    numels, page_bytes, small, wish = case
    for page in page_table(numels, formats(numels, wish, small), page_bytes).pages:
        edges = [0, *(stop for _, stop in page.areas().values())]
        assert [start for start, _ in page.areas().values()] == edges[:-1]
        if page.num_blocks % 64 == 0:
            assert all(edge % 256 == 0 for edge in edges)


@given(sizes)
def test_small_parameters_get_32_bits_and_pages_of_their_own(numels: list[int]) -> None:
    table = page_table(numels, formats(numels, 8, 1000), 10_000)
    for numel, bits in zip(numels, table.bits, strict=True):
        assert bits == (32 if numel < 1000 else 8)
    assert [page.bits for page in table.pages] == sorted(page.bits for page in table.pages)


def test_a_page_too_small_for_a_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds no block"):
        page_table([10], (8,), 519)


def test_bits_other_than_8_and_32_are_an_error() -> None:
    with pytest.raises(ValueError, match="state_bits must be 8 or 32, got 16"):
        formats([1], 16)
