"""A model used aside from its training: for an evaluation or a sample that must leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode without gradients, and everything back as it was afterwards.

    What is put back: the mode of each module for itself, the random state of the CPU and of every GPU in use,
    and whether gradients are recorded. What is not touched cannot differ: the 4-bit layers keep their layout
    (`qlora_cli.model.nf4`), and `inference_mode` is not used, whose tensors would end up in cached buffers
    that a later backward pass refuses.

    Args:
        model: Any model, in any mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    cpu = torch.get_rng_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = torch.cuda.get_rng_state_all() if in_use else []
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
