"""State of other optimizers: torch's AdamW and bitsandbytes', taken over and given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_tools import ODD_SIZES, copy_of, differing, go_on, make_params, paging, train

from qlora_cli.optim.paged_adamw import PagedAdamW

ON_HOST = paging(0, 4_160, staging_pages=3)


def of_torch(steps: int, params: Any = None, **kwargs: Any) -> torch.optim.Optimizer:
    params = params or make_params()
    made = torch.optim.AdamW(params, lr=2e-4, **kwargs)
    go_on(made, steps, 1)
    return made


def bnb_optimizer(params: Any, bits: int, paged: bool) -> Any:
    optim = pytest.importorskip("bitsandbytes.optim")
    kind = optim.PagedAdamW if paged else optim.AdamW
    return (
        kind(params, lr=2e-4, weight_decay=0.01, optim_bits=bits)
        if bits == 32
        else (optim.PagedAdamW8bit if paged else optim.AdamW8bit)(params, lr=2e-4, weight_decay=0.01)
    )


def unwrapped(state_dict: dict) -> dict:
    entries = {}
    for number, entry in state_dict["state"].items():
        entry = dict(entry)
        entries[number] = {**entry.pop("__bnb_optimizer_quant_state__", {}), **entry}
    return {**state_dict, "state": entries}


def moments_of(state_dict: dict) -> dict[str, torch.Tensor]:
    state = unwrapped(state_dict)["state"]
    names = {"exp_avg": "state1", "exp_avg_sq": "state2"}
    return {
        f"{n}.{names.get(k, k)}": v.cpu()
        for n, entry in state.items()
        for k, v in entry.items()
        if isinstance(v, torch.Tensor) and k != "step"
    }


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("bits", [8, 32])
def test_state_of_bitsandbytes_is_taken_over_byte_for_byte(bits: int, paged: bool, wrapped: bool) -> None:
    params = make_params()
    theirs = bnb_optimizer(params, bits, paged)
    go_on(theirs, 4, 1)
    state = theirs.state_dict() if wrapped else unwrapped(theirs.state_dict())
    ours = PagedAdamW(
        [torch.nn.Parameter(p.detach().clone()) for p in params], paging=ON_HOST, state_bits=bits
    )
    ours.load_state_dict(state)
    assert differing(moments_of(ours.state_dict()), moments_of(theirs.state_dict())) == []
    assert ours.param_groups[0]["weight_decay"] == 0.01
    assert "alpha" not in ours.param_groups[0]
    for optimizer in (ours, theirs):
        go_on(optimizer, 1, 5)
    for mine, other in zip(ours.param_groups[0]["params"], params, strict=True):
        assert (mine - other).abs().max() <= 2e-8


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize("bits", [8, 32])
def test_bitsandbytes_takes_over_our_state_byte_for_byte(bits: int) -> None:
    ours = train(ON_HOST, 4, state_bits=bits, lr=2e-4, weight_decay=0.01)
    flat = [p for group in ours.param_groups for p in group["params"]]
    theirs = bnb_optimizer([torch.nn.Parameter(p.detach().clone()) for p in flat], bits, paged=False)
    theirs.load_state_dict(ours.export("bnb"))
    assert differing(moments_of(theirs.state_dict()), moments_of(ours.state_dict())) == []
    for optimizer in (ours, theirs):
        go_on(optimizer, 1, 5)
    for mine, other in zip(flat, theirs.param_groups[0]["params"], strict=True):
        assert (mine - other).abs().max() <= 2e-8


def test_small_fp32_state_of_bitsandbytes_stays_fp32_whatever_min_8bit_size_says() -> None:
    params = make_params((1000, 5000))
    theirs = bnb_optimizer(params, 8, paged=False)
    go_on(theirs, 2, 1)
    ours = PagedAdamW(
        [torch.nn.Parameter(p.detach().clone()) for p in params], paging=ON_HOST, min_8bit_size=0
    )
    assert ours.table.bits == (8, 8)
    ours.load_state_dict(theirs.state_dict())
    assert ours.table.bits == (32, 8)
    assert differing(moments_of(ours.state_dict()), moments_of(theirs.state_dict())) == []


def test_state_of_torch_is_taken_over_and_given_back_exactly() -> None:
    theirs = of_torch(4)
    ours = PagedAdamW(
        [torch.nn.Parameter(p.detach().clone()) for p in theirs.param_groups[0]["params"]], state_bits=32
    )
    ours.load_state_dict(theirs.state_dict())
    assert differing(moments_of(ours.state_dict()), moments_of(theirs.state_dict())) == []
    assert ours.param_groups[0]["lr"] == 2e-4
    back = torch.optim.AdamW(
        [torch.nn.Parameter(p.detach().clone()) for p in theirs.param_groups[0]["params"]]
    )
    back.load_state_dict(ours.export("torch"))
    assert differing(moments_of(back.state_dict()), moments_of(theirs.state_dict())) == []
    assert {float(entry["step"]) for entry in back.state_dict()["state"].values()} == {4.0}
    for optimizer in (ours, theirs, back):
        go_on(optimizer, 1, 5)
    for mine, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert (mine - other).abs().max() <= 2e-8


def test_bf16_moments_of_torch_are_widened() -> None:
    theirs = of_torch(3, make_params(dtype=torch.bfloat16))
    ours = PagedAdamW(make_params(dtype=torch.bfloat16), state_bits=32)
    ours.load_state_dict(theirs.state_dict())
    entry = ours.state_dict()["state"][7]
    assert torch.equal(entry["exp_avg"], theirs.state_dict()["state"][7]["exp_avg"].float())


def test_32bit_state_becomes_8bit_with_a_warning_and_the_nearest_codes() -> None:
    theirs = of_torch(4)
    ours = PagedAdamW(make_params(), paging=ON_HOST)
    with pytest.warns(UserWarning, match="moments of 3 parameters are converted"):
        ours.load_state_dict(theirs.state_dict())
    small = unwrapped(ours.export("torch"))["state"]
    for index, size in enumerate(ODD_SIZES):
        exact = theirs.state_dict()["state"][index]["exp_avg"]
        off = (small[index]["exp_avg"] - exact).abs().max() / exact.abs().max()
        assert off <= (0.01 if size >= 4096 else 0)  # half of the widest cell of the map is 0.0071


def test_8bit_state_becomes_32bit_exactly() -> None:
    small = train(ON_HOST, 4)
    wide = copy_of(small, ON_HOST, state_bits=32)
    with pytest.warns(UserWarning, match="moments of 3 parameters are converted"):
        wide.load_state_dict(small.state_dict())
    assert differing(moments_of(wide.state_dict()), moments_of(small.export("torch"))) == []


def test_8bit_state_with_other_maps_is_encoded_anew_with_a_warning() -> None:
    optimizer = train(ON_HOST, 3, params=make_params((5000,)))
    state = optimizer.state_dict()
    inner = state["state"][0]["__bnb_optimizer_quant_state__"]
    inner["qmap1"] = torch.linspace(-1, 1, 256)
    fresh = PagedAdamW(make_params((5000,)), paging=ON_HOST)
    with pytest.warns(UserWarning, match="the 8-bit maps are not those"):
        fresh.load_state_dict(state)
    theirs = inner["qmap1"][inner["state1"].long()] * inner["absmax1"].repeat_interleave(256)[:5000]
    ours = fresh.export("torch")["state"][0]["exp_avg"]
    assert (ours - theirs).abs().max() <= 0.008 * theirs.abs().max()
    assert fresh.table.bits == (8,)


def test_an_unknown_dialect_is_an_error() -> None:
    with pytest.raises(ValueError, match="dialect must be ours, bnb or torch, got 'jax'"):
        train(ON_HOST, 1).export("jax")
