"""What the optimizer refuses, each with one message that names the parameter or the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


def check_group(group: Mapping[str, Any]) -> None:
    """Check the scalars of a parameter group.

    Args:
        group: The group.

    Raises:
        ValueError: Naming the first scalar out of range.
    """
    lr, eps, decay = float(group["lr"]), group["eps"], group["weight_decay"]
    betas = tuple(group["betas"])
    if not 0 <= lr < math.inf:
        raise ValueError(f"lr must be finite and >= 0, got {lr}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas needs two numbers in [0, 1), got {list(betas)}")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be finite and > 0, got {eps}")
    if not 0 <= decay < math.inf:
        raise ValueError(f"weight_decay must be finite and >= 0, got {decay}")


def check_param(param: Tensor, device: torch.device, name: str) -> None:
    """Check that the state of a parameter can be kept in pages.

    Args:
        param: The parameter.
        device: Where all parameters must be.
        name: What to call it.

    Raises:
        ValueError: If its dtype, layout or device does not do.
    """
    if str(param.dtype) not in DTYPES:
        raise ValueError(f"{name} is {param.dtype}; moments are kept for fp32, bf16 and fp16 parameters")
    if not param.is_contiguous():
        raise ValueError(f"{name} is not contiguous; its blocks of 256 elements would not be")
    if param.device != device:
        raise ValueError(f"{name} is on {param.device}, others are on {device}; use one optimizer a device")


def check_grads(params: Sequence[Tensor], live: Sequence[int], names: Callable[[], list[str]]) -> None:
    """Check the gradients of one step before anything is updated.

    Args:
        params: All parameters.
        live: Indices of those that have a gradient.
        names: Gives the names of all parameters; called for a message only.

    Raises:
        ValueError: If a gradient is sparse, or not of its parameter's shape and device.
    """
    for index in live:
        param, grad = params[index], params[index].grad
        if grad is not None and (grad.is_sparse or grad.device != param.device or grad.shape != param.shape):
            found = "sparse" if grad.is_sparse else f"{tuple(grad.shape)} on {grad.device}"
            expected = f"{tuple(param.shape)} on {param.device}"
            raise ValueError(f"the gradient of {names()[index]} is {found}, expected {expected}")


def own_groups(state_dict: Mapping[str, Any], mine: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Take the groups of a state dict without keys that only another optimizer knows.

    Args:
        state_dict: The state dict.
        mine: Groups of the optimizer that loads it.

    Returns:
        One group for each of `mine`, with the scalars of the state dict.

    Raises:
        ValueError: If the groups do not have the same sizes, or a scalar is out of range.
    """
    theirs = state_dict["param_groups"]
    if [len(group["params"]) for group in theirs] != [len(group["params"]) for group in mine]:
        found, expected = ([len(group["params"]) for group in groups] for groups in (theirs, mine))
        raise ValueError(f"the state dict has groups of {found} parameters, this optimizer of {expected}")
    kept = [
        {**own, **{k: v for k, v in group.items() if k in own or k in ("params", "initial_lr")}}
        for own, group in zip(mine, theirs, strict=True)
    ]
    for group in kept:
        check_group(group)
    return kept
