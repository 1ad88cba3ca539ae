"""The optimizer as training sees it: groups, schedules, missing gradients, traffic, memory, the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_streams import AdversarialStreams, PoisonedBackend
from optim_tools import (
    MIB,
    ODD_SIZES,
    RESIDENT,
    bits_of,
    differing,
    go_on,
    make_params,
    paging,
    set_grads,
    train,
)

from qlora_cli.optim.backend import HostBackend, InlineStreams
from qlora_cli.optim.paged_adamw import PagedAdamW
from qlora_cli.optim.placement import PagingConfig

ON_HOST = paging(0, 8192, staging_pages=3)


class Adversarial(PagedAdamW):
    """Runs copies and kernels in a random order over memory that is poisoned when free."""

    seed = 0

    def _make_backend(self) -> Any:
        cpu = torch.device("cpu")
        return lambda _, sizes, resident: PoisonedBackend(sizes, resident, cpu, AdversarialStreams(self.seed))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("bits", [8, 32])
def test_any_order_of_execution_gives_the_bits_of_resident(
    bits: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adversarial, "seed", seed)
    sizes = (300, 4096, 9_000, 700)
    config = paging(5_000 * (seed % 3), 4_096, staging_pages=2 + seed % 3)
    found = train(config, 4, params=make_params(sizes), state_bits=bits, optimizer=Adversarial)
    expected = train(RESIDENT, 4, params=make_params(sizes), state_bits=bits)
    assert differing(bits_of(found), bits_of(expected)) == []
    found.close()


def accumulate_clip_and_freeze(optimizer: PagedAdamW, step: int) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    first = [p.grad.clone() for p in params]
    set_grads(params, step + 500)
    for param, grad in zip(params, first, strict=True):
        param.grad += grad
    torch.nn.utils.clip_grad_norm_(params, 0.01)
    params[step % len(params)].grad = None
    if step >= 5:
        params[3].requires_grad_(False)
        params[3].grad = None


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=8),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-3, total_steps=20),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda s: 1 / (s + 1), lambda s: 0.5, lambda s: 1.0]),
    ],
    ids=["linear", "cosine", "one-cycle", "lambda"],
)
@pytest.mark.parametrize("bits", [8, 32])
def test_groups_schedules_clipping_and_missing_gradients_work_as_without_paging(
    bits: int, schedule: Callable[..., Any]
) -> None:
    results = []
    for config in (ON_HOST, paging(9_000, 4_096), RESIDENT):
        params = make_params()
        groups = [
            {"params": params[:3], "lr": 1e-3},
            {"params": params[3:6], "weight_decay": 0.1},
            {"params": params[6:], "betas": (0.8, 0.99), "eps": 1e-6},
        ]
        optimizer = PagedAdamW(groups, lr=3e-4, paging=config, state_bits=bits)
        scheduler = schedule(optimizer)
        for step in range(1, 9):
            set_grads(params, step)
            accumulate_clip_and_freeze(optimizer, step)
            optimizer.step()
            scheduler.step()
        results.append(bits_of(optimizer))
    assert differing(results[0], results[2]) == []
    assert differing(results[1], results[2]) == []


def test_a_group_added_later_keeps_the_state_of_the_others() -> None:
    results = []
    for config in (ON_HOST, RESIDENT):
        params, late = make_params(), make_params((5_000, 100))
        optimizer = train(config, 3, params=params)
        optimizer.add_param_group({"params": [("late.0", late[0]), ("late.1", late[1])], "lr": 1e-2})
        go_on(optimizer, 3, 4)
        results.append(bits_of(optimizer))
    assert differing(*results) == []
    alone = train(RESIDENT, 6, params=make_params())
    assert differing(bits_of(alone), {k: v for k, v in results[0].items() if "late" not in k}) == []


def test_a_closure_is_run_with_gradients_and_its_loss_returned() -> Any:
    (param,) = make_params((500,))
    optimizer = PagedAdamW([param])

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    before = closure().item()
    assert optimizer.step(closure).item() == before
    assert closure().item() < before


def test_training_a_module_lowers_its_loss() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
    optimizer = PagedAdamW(model.named_parameters(), lr=1e-2, paging=paging(0, 4096))
    x = torch.randn(256, 64)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = ((model(x) - x[:, :1]) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


# ---- traffic and memory


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("budget", [0, 10_000, None])
def test_each_step_moves_exactly_the_live_state_that_is_not_resident(budget: Any, bits: int) -> None:
    optimizer = train(paging(budget, 4_096), 1, state_bits=bits)
    sizes = [page.num_bytes for page in optimizer.table.pages]
    resident = sum(sizes[page] for page in optimizer._pages.pager.resident)
    assert resident <= optimizer.choices["budget_bytes"].value
    before = optimizer.counters.h2d_bytes
    go_on(optimizer, 1, 2)
    assert optimizer.counters.h2d_bytes - before == sum(sizes) - resident
    assert optimizer.counters.h2d_bytes == optimizer.counters.d2h_bytes


def test_a_page_without_a_live_segment_is_neither_fetched_nor_written() -> None:
    params = make_params((10_000, 10_000, 10_000))
    optimizer = PagedAdamW(params, paging=paging(0, 4_160))
    set_grads(params, 1)
    params[1].grad = None
    optimizer.step()
    touched = optimizer.table.pages_of([0, 2])
    assert optimizer.counters.pages_fetched == optimizer.counters.pages_written == len(touched)
    assert len(touched) < len(optimizer.table.pages)
    for param in params:
        param.grad = None
    optimizer.step()
    assert optimizer.counters.pages_fetched == len(touched)


def test_all_state_is_on_pages_however_small_the_tensors() -> None:
    optimizer = PagedAdamW(make_params((1, 17, 300, 4096)), paging=paging(0, 4096))
    assert optimizer.record(1.0)["resident_mib"] == 0
    assert optimizer.table.state_bytes == 2048 * 4 + 520 * 16


@pytest.mark.parametrize("staging", [2, 4])
def test_device_memory_is_the_budget_between_steps_and_the_slots_within_one(staging: int) -> None:
    optimizer = train(paging(10_000, 4_160, staging_pages=staging), 3)
    backend, pager = optimizer._pages.pager.backend, optimizer._pages.pager
    assert backend.device_bytes <= 10_000
    assert pager.peak_device_bytes == backend.device_bytes + staging * 4_160


def test_a_closed_optimizer_frees_its_memory_and_says_so_when_used() -> None:
    with train(ON_HOST, 2) as optimizer:
        backend = optimizer._pages.pager.backend
        slabs = [weakref.ref(slab) for slab in backend._host]
    gc.collect()
    assert all(slab() is None for slab in slabs)
    assert backend.device_bytes == 0
    assert "closed" in repr(optimizer)
    optimizer.close()
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.record(1.0)):
        with pytest.raises(RuntimeError, match="was closed"):
            use()


def living_slabs() -> int:
    gc.collect()
    return sum(type(x) is torch.Tensor and x.dtype == torch.uint8 for x in gc.get_objects())


def test_fifty_cycles_leave_no_slab_behind() -> None:
    before = 0
    for cycle in range(51):
        optimizer = train(ON_HOST, 3, params=make_params((300, 4096)))
        if cycle % 2:
            with pytest.raises(ZeroDivisionError):
                fail_in_the_middle(optimizer)
        optimizer.close()
        del optimizer
        if cycle == 0:
            before = living_slabs()
    assert living_slabs() == before


def fail_in_the_middle(optimizer: PagedAdamW) -> None:
    update = optimizer._kernel.update_
    calls = []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise ZeroDivisionError
        update(*args)

    optimizer._kernel.update_ = failing
    try:
        optimizer.step()
    finally:
        optimizer._kernel.update_ = update


def test_an_exception_in_a_kernel_leaves_whole_pages_and_training_can_go_on() -> None:
    params = make_params((20_000, 9_000))
    optimizer = train(paging(0, 4_160), 2, params=params)
    before = bits_of(optimizer)
    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle(optimizer)
    after = bits_of(optimizer)
    first_page = optimizer.table.pages[0].segments[0].num_elems
    codes = [
        state["layer.0.exp_avg"] if "layer.0.exp_avg" in state else state["layer.0.state1"]
        for state in (before, after)
    ]
    assert not torch.equal(codes[0].view(-1)[:first_page], codes[1].view(-1)[:first_page])
    assert torch.equal(codes[0].view(-1)[first_page:], codes[1].view(-1)[first_page:])
    assert optimizer._pages.pager.backend.device_bytes == 0
    go_on(optimizer, 1, 4)


# ---- what is refused


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and >= 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas needs two numbers in \[0, 1\), got \[0.9, 1.0\]"),
        ({"eps": 0.0}, "eps must be finite and > 0, got 0.0"),
        ({"weight_decay": float("nan")}, "weight_decay must be finite and >= 0, got nan"),
        ({"state_bits": 4}, "state_bits must be 8 or 32, got 4"),
        ({"min_8bit_size": -1}, "min_8bit_size must be >= 0, got -1"),
        ({"kernel": "fast"}, "kernel must be one of auto, eager, got 'fast'"),
    ],
)
def test_a_value_out_of_range_is_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedAdamW(make_params((10,)), **kwargs)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: torch.zeros(4, 5).t(), "w is not contiguous"),
        (lambda: torch.zeros(4, dtype=torch.float64), "w is torch.float64"),
        (lambda: torch.zeros(4, device="meta"), "w is on meta, others are on cpu"),
    ],
)
def test_a_parameter_that_cannot_be_paged_is_named_and_nothing_is_added(bad: Any, message: str) -> None:
    optimizer = PagedAdamW([("v", torch.nn.Parameter(torch.zeros(3)))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("w", torch.nn.Parameter(bad()))]})
    assert optimizer.param_names() == ["v"]
    go_on(optimizer, 1, 1)


def test_a_sparse_gradient_is_refused_before_anything_is_updated() -> None:
    params = make_params((500, 600))
    optimizer = PagedAdamW([("a", params[0]), ("b", params[1])])
    set_grads(params, 1)
    params[1].grad = params[1].grad.to_sparse()
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match="the gradient of b is sparse"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert optimizer.state_dict()["state"] == {}


# ---- choices and fallbacks


def test_what_was_auto_is_recorded_with_its_reason() -> None:
    optimizer = PagedAdamW(make_params((5000,)))
    choices = {name: (choice.value, choice.reason) for name, choice in optimizer.choices.items()}
    assert choices["backend"] == (
        "host",
        "no GPU: the device memory that pages move to and from is emulated on cpu",
    )
    assert choices["page_bytes"][0] == MIB
    assert choices["budget_bytes"] == (
        optimizer.table.state_bytes,
        "vram_budget_mib is auto, so all state stays resident",
    )
    assert choices["kernel"] == ("eager", "the only kernel there is")


@pytest.mark.parametrize("pinned", [0, 2])
def test_memory_that_cannot_be_pinned_is_reported_once_and_pageable_memory_serves(
    pinned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Any:
    calls = []

    def refuse(_: HostBackend, num_bytes: int) -> Any:
        calls.append(num_bytes)
        if len(calls) > pinned:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(HostBackend, "_pin", refuse)
    monkeypatch.setattr(HostBackend, "_device_slab", lambda self, size: torch.empty(size, dtype=torch.uint8))
    backend = HostBackend([512] * 5, frozenset({0}), torch.device("cuda"), InlineStreams())
    expected = "host memory cannot be pinned (CUDA error: out of memory); pageable memory is used"
    assert backend.fallbacks == [expected]
    assert [record.message for record in caplog.records] == [expected]
    assert len(calls) == pinned + 1
    assert all(int(backend.host_buffer(page).sum()) == 0 for page in range(5))


@pytest.mark.gpu
def test_slabs_are_pinned_and_nothing_stays_on_the_gpu_at_budget_0() -> None:
    before = torch.cuda.memory_allocated()
    params = make_params((2_000_000, *ODD_SIZES), device="cuda")
    held = torch.cuda.memory_allocated() - before
    optimizer = PagedAdamW(params, paging=PagingConfig(vram_budget_mib=0))
    go_on(optimizer, 3, 1)
    optimizer.zero_grad()
    torch.cuda.synchronize()
    optimizer.record(1.0)
    assert all(slab.is_pinned() for slab in optimizer._pages.pager.backend._host)
    assert optimizer._pages.pager.backend.device_bytes == 0
    scratch = optimizer._kernel._scratch.nbytes
    assert torch.cuda.memory_allocated() - before - held - scratch <= 4 * MIB


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_a_step_in_the_steady_state_does_not_wait_for_the_gpu() -> None:
    params = make_params((200_000, 5_000), device="cuda", dtype=torch.bfloat16)
    optimizer = PagedAdamW(params, paging=PagingConfig(vram_budget_mib=0))
    go_on(optimizer, 3, 1)
    set_grads(params, 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        optimizer.record(1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_steps_on_changing_streams_give_the_same_bits() -> None:
    results = []
    for on_streams in (False, True):
        params = make_params(device="cuda")
        optimizer = PagedAdamW(params, paging=paging(0, 8_192))
        for step in range(1, 7):
            stream = torch.cuda.Stream() if on_streams else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                set_grads(params, step)
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
        results.append(bits_of(optimizer))
    assert differing(*results) == []
