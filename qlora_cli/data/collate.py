"""Tokenized examples → a batch of tensors: the first line of the data path that touches torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qlora_cli.data.sources import Origin
from qlora_cli.data.templates import IGNORED, Tokenized


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples padded on the right to one length.

    Attributes:
        input_ids: Token ids, the pad token behind each example.
        attention_mask: 1 on tokens, 0 on padding.
        labels: Token ids where supervised, else -100; not shifted.
        num_supervised: Labels that are not -100.
        origins: File and row of each example.

    Shape:
        input_ids, attention_mask, labels: (B, L), int64.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    num_supervised: int
    origins: tuple[Origin, ...]

    def to(self, device: torch.device | str) -> Batch:
        """Copy the tensors to a device.

        Args:
            device: Where to.
        """
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.attention_mask.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.num_supervised,
            self.origins,
        )


def collate(
    examples: Sequence[Tokenized],
    pad_token_id: int,
    pad_to_multiple_of: int = 8,
    max_seq_len: int | None = None,
) -> Batch:
    """Pad examples to the longest of them and stack them.

    Padding is what lies behind the length of an example, never what has a certain id: where pad and eos
    are one token, the eos of an answer keeps its label.

    Args:
        examples: At least one.
        pad_token_id: Id that fills the padding.
        pad_to_multiple_of: The padded length is a multiple of this, unless `max_seq_len` is shorter.
        max_seq_len: The padded length is not rounded up beyond this; None sets no bound.

    Returns:
        The batch.

    Raises:
        ValueError: If there is no example.

    Shape:
        Tensors are (len(examples), L).
    """
    if not examples:
        raise ValueError("a batch needs at least one example")
    longest = max(len(example.input_ids) for example in examples)
    length = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    if max_seq_len is not None:
        length = max(longest, min(length, max_seq_len))
    shape = (len(examples), length)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    for row, example in enumerate(examples):
        size = len(example.input_ids)
        input_ids[row, :size] = torch.tensor(example.input_ids)
        attention_mask[row, :size] = 1
        labels[row, :size] = torch.tensor(example.labels)
    num_supervised = sum(example.num_supervised for example in examples)
    return Batch(input_ids, attention_mask, labels, num_supervised, tuple(e.origin for e in examples))
