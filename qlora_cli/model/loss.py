"""Sum of the token losses of a batch, with logits only where there is a label.

Of a batch of chats a third of the tokens or less is supervised, and the logits are its largest tensor: 49 to
256 thousand values for each position. So the hidden states of supervised positions are picked out in front of
the output head, by a hook, whatever the architecture does to logits behind it (soft caps and scales act on
each position for itself).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

IGNORED = -100
CHUNK_VALUES = 2**24  # logits upcast to fp32 at a time: 64 MiB


class Labelled(Protocol):
    """What a batch must have; `labels` are not shifted and -100 where there is no loss."""

    @property
    def input_ids(self) -> Tensor:
        """Token ids, (B, L) int64."""

    @property
    def attention_mask(self) -> Tensor:
        """1 on tokens, 0 on padding, (B, L) int64."""

    @property
    def labels(self) -> Tensor:
        """Token ids where supervised, (B, L) int64."""


def training_loss(model: nn.Module, batch: Labelled) -> Tensor:
    """Sum of the cross entropies of the batch's supervised tokens, each predicted from those before it.

    Args:
        model: A causal language model, with or without adapter, in any mode.
        batch: On the model's device.

    Returns:
        () fp32, nats; 0 with zero gradients where nothing is supervised.
    """
    targets = batch.labels[:, 1:]
    rows, columns = torch.nonzero(targets != IGNORED, as_tuple=True)
    with _head_sees_only(model, rows, columns, batch.input_ids.shape):
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    # a whole row is never supervised (its first token has none to be predicted from), so (1, N) is not (B, L)
    is_whole = logits.shape[:2] == batch.input_ids.shape  # where the head is not called on (B, L, H)
    picked = logits[rows, columns] if is_whole else logits[0]
    loss: Tensor = _SummedCrossEntropy.apply(picked, targets[rows, columns])
    return loss


@contextmanager
def _head_sees_only(model: nn.Module, rows: Tensor, columns: Tensor, shape: torch.Size) -> Iterator[None]:
    """Pick the positions out of the output head's input, (B, L, H) -> (1, N, H), while the block runs."""
    inner: Any = getattr(model, "module", model)  # a wrapper of several processes
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if head is None:
        yield
        return

    def pick(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = inputs[0]
        if hidden.shape[:2] != shape:
            return None
        return (hidden[rows, columns].unsqueeze(0), *inputs[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


class _SummedCrossEntropy(torch.autograd.Function):
    """Cross entropy summed over rows, in fp32, that keeps nothing but the logits for its backward pass.

    torch's own keeps an fp32 copy of all logits as well. Chunks bound what is upcast at a time.

    Shape:
        logits: (N, V) in any float dtype; targets: (N,) int64; result: () fp32.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum logsumexp(row) - row[target]."""
        lse = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for part in _chunks(logits):
            values = logits[part].float()
            lse[part] = torch.logsumexp(values, dim=-1)
            total += (lse[part] - values.gather(1, targets[part, None]).squeeze(1)).sum()
        ctx.save_for_backward(logits, targets, lse)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        """(softmax - one-hot) * gradient, in the dtype of the logits."""
        logits, targets, lse = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for part in _chunks(logits):
            values = (logits[part].float() - lse[part, None]).exp_()
            values.scatter_add_(1, targets[part, None], values.new_full((len(values), 1), -1.0))
            grad[part] = values.mul_(grad_outputs[0])
        return grad, None


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of rows whose logits are about `CHUNK_VALUES` values."""
    size = max(CHUNK_VALUES // max(logits.shape[-1], 1), 1)
    return [slice(start, start + size) for start in range(0, len(logits), size)]
