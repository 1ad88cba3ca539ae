"""The binding to bitsandbytes' 4-bit layers: which they are, and what must not happen to them.

bitsandbytes 0.50 keeps its weight in one of two layouts on a CPU. With AVX512-BF16, the first forward in
eval mode without gradients repacks it for an inference kernel (`Linear4bit.forward`); a later training
forward then runs on that kernel, which gives its input no gradient, and nothing is said. No layer loaded
here repacks. The rest of what such a layer changes in a forward (`compute_dtype` where none was given, the
dtype of a bias) is settled at load as well, so that an evaluation leaves it as it found it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

BLOCK_SIZE = 64  # weights that share one absmax; bitsandbytes' default


@contextmanager
def _no_kernel_download() -> Iterator[None]:
    """Import bitsandbytes without its attempt to fetch a CPU kernel from the hub.

    Where the package `kernels` is installed, importing bitsandbytes downloads and loads a binary; where it is
    not, it says so on stderr. The kernel serves only the inference layout above.
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    was_disabled, had_module = logger.disabled, "kernels" in sys.modules
    module = sys.modules.get("kernels")
    logger.disabled = True
    sys.modules["kernels"] = None  # type: ignore[assignment]  # the import system's word for "not there"
    try:
        yield
    finally:
        logger.disabled = was_disabled
        if had_module:
            sys.modules["kernels"] = module  # type: ignore[assignment]
        else:
            del sys.modules["kernels"]


with _no_kernel_download():
    import bitsandbytes


def linear4bit_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The 4-bit layers of a model.

    Args:
        model: A base, or a base with an adapter.

    Returns:
        Name and layer, in module order; names are those within `model`.
    """
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            yield name, module


def keep_training_layout(model: nn.Module) -> None:
    """Settle the state that a 4-bit layer would otherwise change during a forward.

    Args:
        model: A quantised base as loaded, not moved between devices since.
    """
    for _, layer in linear4bit_layers(model):
        layer.support_avx512bf16_for_cpu = False
        if layer.bias is not None and layer.compute_dtype is not None:
            layer.bias.data = layer.bias.data.to(layer.compute_dtype)
