"""Paging changes where Adam's state lies and nothing else: every bit of parameters and state is the same.

The reference is the `resident` backend, which has no host slabs, no slots and no copies. Sizes are
chosen to break it: parameters below a block, one element around a block and around `min_8bit_size`,
partly full last pages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qlora_cli.optim.paged_adamw import PagedAdamW
from qlora_cli.optim.placement import PagingConfig

MIB = 2**20
SIZES = (1, 255, 256, 257, 4095, 4096, 9_000)
DESIGN_SIZES = (1, 255, 256, 257, 4095, 4096, 99_999, 100_000)
BUDGETS = ("none", "one page", "half", "all but one", "all")
LAYOUTS = [(page, budget) for page in (2_100, 8_192) for budget in BUDGETS] + [(MIB, "none"), (MIB, "all")]
KINDS = [(torch.float32, 0.0), (torch.float32, 0.01), (torch.bfloat16, 0.01), (torch.float16, 0.0)]
STEPS = 8


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    used = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(used)


@functools.cache
def gradients(sizes: tuple[int, ...], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    made = []
    for size in sizes:
        noise = 1e-3 * torch.randn(size, generator=generator)
        made.append(noise * torch.exp(torch.randn(size, generator=generator)))
    return made


def train(
    config: PagingConfig,
    dtype: torch.dtype,
    *,
    sizes: Any = SIZES,
    steps: int = STEPS,
    device: str = "cpu",
    **kwargs: Any,
) -> tuple[dict[str, Tensor], PagedAdamW]:
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter((0.02 * torch.randn(n, generator=generator)).to(device, dtype)) for n in sizes
    ]
    optimizer = PagedAdamW(params, paging=config, **kwargs)
    for step in range(1, steps + 1):
        for param, grad in zip(params, gradients(sizes, step), strict=True):
            param.grad = grad.to(device, dtype)
        optimizer.step()
    found = {f"{k}": p.detach().cpu() for k, p in enumerate(params)}
    for index, entry in optimizer.state_dict()["state"].items():
        inner = {**entry, **entry.get("__bnb_optimizer_quant_state__", {})}
        found |= {f"{index}.{k}": v for k, v in inner.items() if isinstance(v, Tensor)}
    return found, optimizer


@functools.cache
def resident(dtype: torch.dtype, bits: int, decay: float) -> dict[str, Tensor]:
    return train(PagingConfig(backend="resident"), dtype, state_bits=bits, weight_decay=decay)[0]


def assert_bit_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


def budgets(optimizer: PagedAdamW) -> dict[str, int]:
    sizes = [page.num_bytes for page in optimizer.table.pages]
    return {
        "none": 0,
        "one page": sizes[0],
        "half": sum(sizes) // 2,
        "all but one": sum(sizes[:-1]),
        "all": sum(sizes),
    }


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(("dtype", "decay"), KINDS)
@pytest.mark.parametrize(("page_bytes", "budget"), LAYOUTS)
def test_training_is_bit_equal_at_any_budget_and_page_size(
    page_bytes: int, budget: str, dtype: torch.dtype, bits: int, decay: float
) -> None:
    layout = train(PagingConfig(page_mib=page_bytes / MIB), dtype, steps=0, state_bits=bits)[1]
    config = PagingConfig(
        backend="host",
        page_mib=page_bytes / MIB,
        vram_budget_mib=budgets(layout)[budget] / MIB,
        staging_pages=3,
    )
    found, optimizer = train(config, dtype, state_bits=bits, weight_decay=decay)
    assert_bit_equal(found, resident(dtype, bits, decay))
    moving = len(layout.table.pages) - len(optimizer._pages.pager.resident)
    assert optimizer.counters.pages_fetched == moving * STEPS  # the test really paged
    assert moving > 0 or budget == "all"


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(("prefetch", "page_mib"), [("step", 1), ("off", 4), ("step", 16)])
def test_training_is_bit_equal_at_the_page_sizes_of_real_runs(
    prefetch: str, page_mib: int, bits: int
) -> None:
    kwargs = {"sizes": DESIGN_SIZES, "steps": 50, "state_bits": bits}
    expected, _ = train(PagingConfig(backend="resident"), torch.bfloat16, **kwargs)
    config = PagingConfig(page_mib=page_mib, vram_budget_mib=0, prefetch=prefetch)
    found, optimizer = train(config, torch.bfloat16, **kwargs)
    assert_bit_equal(found, expected)
    assert optimizer.counters.pages_written == 50 * len(optimizer.table.pages)


def test_the_comparison_notices_one_wrong_bit() -> None:
    expected = resident(torch.float32, 8, 0.0)
    found = {name: value.clone() for name, value in expected.items()}
    found["6"].view(torch.int32)[11] ^= 1
    with pytest.raises(AssertionError):
        assert_bit_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", ["none", "half", "all"])
def test_training_on_a_gpu_is_bit_equal_at_any_budget(budget: str, dtype: torch.dtype, bits: int) -> None:
    expected, _ = train(PagingConfig(backend="resident"), dtype, device="cuda", state_bits=bits)
    layout = train(PagingConfig(page_mib=8_192 / MIB), dtype, steps=0, device="cuda", state_bits=bits)[1]
    config = PagingConfig(backend="host", page_mib=8_192 / MIB, vram_budget_mib=budgets(layout)[budget] / MIB)
    found, optimizer = train(config, dtype, device="cuda", state_bits=bits)
    assert_bit_equal(found, expected)
    assert optimizer.counters.pages_fetched > 0 or budget == "all"


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_and_a_cpu_compute_the_same_bits(dtype: torch.dtype, bits: int) -> None:
    on_gpu, _ = train(PagingConfig(vram_budget_mib=0), dtype, device="cuda", state_bits=bits)
    assert_bit_equal(on_gpu, train(PagingConfig(), dtype, state_bits=bits)[0])
