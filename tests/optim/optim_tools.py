"""Parameters, gradients and short trainings that the tests of the optimizer share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qlora_cli.optim.kernels import EagerKernel, Hyper, Piece
from qlora_cli.optim.paged_adamw import PagedAdamW
from qlora_cli.optim.placement import PagingConfig

MIB = 2**20
ODD_SIZES = (1, 255, 256, 257, 4095, 4096, 9_999, 10_000)


def make_params(
    sizes: Sequence[int] = ODD_SIZES, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    values = (torch.randn(size, generator=generator) * 0.02 for size in sizes)
    return [torch.nn.Parameter(value.to(device, dtype)) for value in values]


def set_grads(params: Sequence[Tensor], step: int, spread: float = 0.5) -> None:
    """Gradients that depend on the step and the position only."""
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + index)
        noise = torch.randn(param.shape, generator=generator)
        scale = torch.exp(spread * torch.randn(param.shape, generator=generator))
        param.grad = (1e-3 * noise * scale).to(param.device, param.dtype)


def paging(budget_bytes: int | None = None, page_bytes: int | None = None, **more: Any) -> PagingConfig:
    budget = "auto" if budget_bytes is None else budget_bytes / MIB
    return PagingConfig(
        vram_budget_mib=budget, page_mib=None if page_bytes is None else page_bytes / MIB, **more
    )


RESIDENT = PagingConfig(backend="resident")


def train(
    config: PagingConfig,
    steps: int,
    *,
    params: list[torch.nn.Parameter] | None = None,
    first_step: int = 1,
    before: Callable[[PagedAdamW, int], None] | None = None,
    optimizer: type[PagedAdamW] = PagedAdamW,
    **kwargs: Any,
) -> PagedAdamW:
    """Train made-up gradients for some steps; parameters are `result.param_groups[0]["params"]`."""
    params = params or make_params()
    made = optimizer([(f"layer.{k}", p) for k, p in enumerate(params)], paging=config, **kwargs)
    go_on(made, steps, first_step, before)
    return made


def go_on(optimizer: PagedAdamW, steps: int, first_step: int, before: Any = None) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first_step, first_step + steps):
        set_grads(params, step)
        if before is not None:
            before(optimizer, step)
        optimizer.step()


def bits_of(optimizer: PagedAdamW) -> dict[str, Tensor]:
    """Every bit that training may depend on: parameters and state, without padding."""
    found: dict[str, Tensor] = {}
    names = optimizer.param_names()
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()["state"]
    for index, (name, param) in enumerate(zip(names, flat, strict=True)):
        found[name] = param.detach().cpu().clone()
        entry = dict(state.get(index, {}))
        entry |= entry.pop("__bnb_optimizer_quant_state__", {})
        found |= {f"{name}.{key}": value for key, value in entry.items() if isinstance(value, Tensor)}
    return found


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names whose bytes differ; -0.0 and 0.0 differ too."""
    assert left.keys() == right.keys()
    return [name for name, value in left.items() if not torch.equal(raw(value), raw(right[name]))]


def copy_of(optimizer: PagedAdamW, config: PagingConfig, **kwargs: Any) -> PagedAdamW:
    """A fresh optimizer over copies of the parameters, without state."""
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    params = [torch.nn.Parameter(p.detach().clone()) for p in flat]
    return PagedAdamW(list(zip(optimizer.param_names(), params, strict=True)), paging=config, **kwargs)


def kernel_step(
    p: Tensor, g: Tensor, state: dict[str, Tensor], hyper: Hyper, max_blocks: int | None = None
) -> EagerKernel:
    """One update of one flat parameter from flat state, in place."""
    numel, blocks = p.numel(), -(-p.numel() // 256)
    padded = {
        name: torch.nn.functional.pad(value, (0, blocks * 256 - numel)).view(blocks, 256)
        if value.numel() == numel and name in ("exp_avg", "exp_avg_sq")
        else value.clone()
        for name, value in state.items()
    }
    kernel = EagerKernel(p.device)
    if max_blocks is not None:
        kernel._max_blocks = max_blocks
    with torch.no_grad():
        kernel.update_(padded, [Piece(p.detach(), g, 0, hyper)])
    for name in state:
        state[name] = padded[name].view(-1)[: state[name].numel()].clone()
    return kernel
