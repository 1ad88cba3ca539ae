"""Batches: padding by length, never by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qlora_cli.data.collate import collate
from qlora_cli.data.sources import Origin
from qlora_cli.data.templates import Tokenized

PAD = 0
EXAMPLES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), min_size=1, max_size=5)


def example(ids: list[int], row: int = 1) -> Tokenized:
    return Tokenized(ids, [-100, *ids[1:]], Origin("train.jsonl", row), "train")


@given(EXAMPLES, st.integers(1, 16), st.none() | st.integers(30, 40))
def test_a_batch_holds_its_examples_and_padding_behind_them(
    rows: list[list[int]], multiple: int, bound: int | None
) -> None:
    examples = [example(ids, number) for number, ids in enumerate(rows)]
    batch = collate(examples, PAD, multiple, bound)
    longest, length = max(map(len, rows)), batch.input_ids.shape[1]
    assert batch.input_ids.shape == batch.attention_mask.shape == batch.labels.shape
    assert batch.input_ids.dtype == batch.attention_mask.dtype == batch.labels.dtype == torch.int64
    assert longest <= length < longest + multiple
    assert length % multiple == 0 or length in (bound, longest)
    for ids, mask, labels, each in zip(
        batch.input_ids, batch.attention_mask, batch.labels, examples, strict=True
    ):
        size = len(each.input_ids)
        assert ids.tolist() == each.input_ids + [PAD] * (length - size)
        assert mask.tolist() == [1] * size + [0] * (length - size)
        assert labels.tolist() == each.labels + [-100] * (length - size)
    assert batch.num_supervised == int((batch.labels != -100).sum())
    assert batch.origins == tuple(each.origin for each in examples)


def test_a_last_token_equal_to_the_pad_token_keeps_its_label() -> None:
    batch = collate([example([5, 6, PAD]), example([7])], PAD)
    assert batch.labels[0, :3].tolist() == [-100, 6, PAD]
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert batch.num_supervised == 2


def test_rounding_up_never_passes_the_longest_allowed() -> None:
    assert collate([example([1] * 9)], PAD, max_seq_len=12).input_ids.shape == (1, 12)
    assert collate([example([1] * 9)], PAD, max_seq_len=9).input_ids.shape == (1, 9)
    assert collate([example([1] * 9)], PAD).input_ids.shape == (1, 16)


def test_no_example_makes_no_batch() -> None:
    with pytest.raises(ValueError, match="at least one"):
        collate([], PAD)


def test_moving_a_batch_keeps_what_it_holds() -> None:
    batch = collate([example([1, 2])], PAD)
    moved = batch.to("cpu")
    assert torch.equal(moved.labels, batch.labels)
    assert (moved.num_supervised, moved.origins) == (batch.num_supervised, batch.origins)
