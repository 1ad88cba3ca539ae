"""The arithmetic: against the written rule, torch's AdamW and bitsandbytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_oracle import Q1, Q2, adamw8_, encode, exact_sqrt, zero_state
from optim_tools import differing, kernel_step, make_params, set_grads
from torch import Tensor

from qlora_cli.optim import kernels
from qlora_cli.optim.kernels import Hyper, Piece
from qlora_cli.optim.paged_adamw import PagedAdamW
from qlora_cli.optim.pages import BLOCK

LR, B1, B2, EPS = 2e-4, 0.9, 0.999, 1e-8


def grads(numel: int, step: int, spread: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(numel, generator=generator)
    return (1e-3 * noise * torch.exp(spread * torch.randn(numel, generator=generator))).to(dtype)


def values_near_every_border(q: torch.Tensor) -> torch.Tensor:
    border = (q[:-1] + q[1:]) * 0.5
    up, down = (torch.nextafter(border, torch.tensor(end)) for end in (2.0, -2.0))
    return torch.cat([border, up, down, q, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38])])


@pytest.mark.parametrize(("signed", "q"), [(True, Q1), (False, Q2)])
def test_the_table_finds_the_code_of_the_search_over_all_borders(signed: bool, q: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.rand(200_000, generator=generator) * 2 - 1
    small = torch.exp(-25 * torch.rand(200_000, generator=generator)) * torch.sign(flat)
    x = torch.cat([values_near_every_border(q), flat, small]).clamp(-1, 1)
    x = x if signed else x.abs()
    x = torch.nn.functional.pad(x, (0, -x.numel() % (BLOCK - 1))).view(-1, BLOCK - 1)
    x = torch.cat([x, torch.ones(len(x), 1)], 1)  # absmax 1, so that x is its own scaled value
    expected = encode(x, q)
    if signed:
        expected = torch.where((expected == 127) & torch.signbit(x), 126, expected)
    codes, absmax = kernels.quantise(x, signed)
    assert torch.equal(codes.long(), expected)
    assert absmax.unique().tolist() == [1.0]
    assert torch.equal(kernels.dequantise(codes, absmax, signed), q[codes.long()])


def test_the_maps_are_those_of_bitsandbytes_bit_for_bit() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        theirs = functional.create_dynamic_map(signed=signed)
        assert torch.equal(kernels.dynamic_map(signed), theirs)


def test_roots_are_correctly_rounded_so_that_no_cpu_computes_another_number() -> None:
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) ** 4 * 1e-3
    roots = torch.empty_like(values)
    kernels._sqrt(values, roots)
    assert torch.equal(roots, exact_sqrt(values))


def test_kernels_and_pages_agree_on_the_block() -> None:
    assert kernels.BLOCK == BLOCK


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eight_bit_steps_equal_the_written_rule_bit_for_bit(
    dtype: torch.dtype, spread: float, decay: float
) -> None:
    p = (0.02 * torch.randn(5000, generator=torch.Generator().manual_seed(0))).to(dtype)
    mine, theirs, state, oracle = p.clone(), p.clone(), zero_state(5000), zero_state(5000)
    for step in range(1, 16):
        g = grads(5000, step, spread, dtype)
        g[:: 97 + step] = 0
        kernel_step(mine, g, state, Hyper(LR, B1, B2, EPS, decay, step))
        adamw8_(theirs, g, oracle, step, LR, B1, B2, EPS, decay)
        assert differing({"p": mine, **state}, {"p": theirs, **oracle}) == [], step


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(1, 1500),
    seed=st.integers(0, 2**31),
    bad=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30, 1e18]), max_size=6),
    t=st.integers(1, 2000),
)
def test_any_gradient_gives_what_the_written_rule_gives(numel: int, seed: int, bad: Any, t: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(numel, generator=generator)
    state = {
        "exp_avg": torch.randint(0, 256, (numel,), generator=generator).to(torch.uint8),
        "exp_avg_sq": torch.randint(0, 256, (numel,), generator=generator).to(torch.uint8),
        "absmax1": torch.rand(-(-numel // 256), generator=generator),
        "absmax2": torch.rand(-(-numel // 256), generator=generator),
    }
    g = torch.randn(numel, generator=generator)
    for value in bad:
        g[int(torch.randint(0, numel, (1,), generator=generator))] = value
    mine, theirs, oracle = p.clone(), p.clone(), dict(state)
    kernel = kernel_step(mine, g, state, Hyper(LR, B1, B2, EPS, 0.01, t))
    adamw8_(theirs, g, oracle, t, LR, B1, B2, EPS, 0.01)
    assert differing({"p": mine, **state}, {"p": theirs, **oracle}) == []
    assert kernel.counts()[0] == int((~torch.isfinite(g)).sum())


def test_a_gradient_that_is_not_finite_leaves_its_parameter_alone_and_clears_its_state() -> None:
    p, state = torch.ones(600), zero_state(600)
    kernel_step(p, grads(600, 1, 0.0), state, Hyper(LR, B1, B2, EPS, 0.1, 1))
    before, g = p.clone(), grads(600, 2, 0.0)
    g[[3, 300, 599]] = torch.tensor([math.nan, math.inf, -math.inf])
    kernel = kernel_step(p, g, state, Hyper(LR, B1, B2, EPS, 0.1, 2))
    for index in (3, 300, 599):
        assert p[index] == before[index]
        assert (state["exp_avg"][index], state["exp_avg_sq"][index]) == (127, 0)
    moved = torch.ones(600, dtype=torch.bool).index_fill(0, torch.tensor([3, 300, 599]), False)
    assert (p[moved] != before[moved]).all()
    assert kernel.counts()[0] == 3


def test_a_gradient_whose_square_overflows_does_not_poison_its_block() -> None:
    p, state, g = torch.ones(256), zero_state(256), grads(256, 1, 0.0)
    g[7] = 3e38
    kernel = kernel_step(p, g, state, Hyper(LR, B1, B2, EPS, 0.0, 1))
    assert p[7] == 1
    assert kernel.counts()[0] == 1
    kernel_step(p, grads(256, 2, 0.0), state, Hyper(LR, B1, B2, EPS, 0.0, 2))
    assert torch.isfinite(p).all()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_block_of_zeros_gets_the_codes_of_zero_and_moves_nothing(zero: float) -> None:
    p, state = torch.ones(300), zero_state(300)
    kernel_step(p, torch.full((300,), zero), state, Hyper(LR, B1, B2, EPS, 0.0, 1))
    assert state["exp_avg"].unique().tolist() == [127]
    assert state["exp_avg_sq"].unique().tolist() == [0]
    assert state["absmax1"].tolist() == state["absmax2"].tolist() == [0, 0]
    assert (p == 1).all()


def test_a_negative_first_moment_never_becomes_zero_but_a_positive_one_may() -> None:
    g = torch.full((256,), 1.0)
    g[1], g[2] = -1e-8, 1e-8
    p, state = torch.zeros(256), zero_state(256)
    kernel_step(p, g, state, Hyper(LR, B1, B2, EPS, 0.0, 1))
    assert state["exp_avg"][:3].tolist() == [255, 126, 127]


def test_elements_whose_second_moment_was_lost_are_counted() -> None:
    g = torch.full((256,), 1.0)
    g[5] = 1e-4  # its square is 1e-8 of the largest, the smallest code stands for 3.25e-7
    p, state = torch.zeros(256), zero_state(256)
    kernel = kernel_step(p, g, state, Hyper(LR, B1, B2, EPS, 0.0, 1))
    assert state["exp_avg_sq"][5] == 0
    assert kernel.counts() == (0, 1)


def test_padding_never_enters_an_absmax() -> None:
    p, state, g = torch.zeros(300), zero_state(300), grads(300, 1, 0.0)
    blocks = {name: value.new_full((2, 256), 255) for name, value in state.items() if "exp" in name}
    blocks |= {"absmax1": torch.full((2,), 1e6), "absmax2": torch.full((2,), 1e6)}
    for name in ("exp_avg", "exp_avg_sq"):  # real lanes zero, padding the largest code there is
        blocks[name].view(-1)[:300] = 127 if name == "exp_avg" else 0
    kernel = kernels.EagerKernel(p.device)
    kernel.update_(blocks, [Piece(p, g, 0, Hyper(LR, B1, B2, EPS, 0.0, 1))])
    assert blocks["absmax1"][1] == (g[256:] * (1.0 - B1)).abs().max()


def two_steps(bits: int, max_blocks: int | None) -> dict[str, torch.Tensor]:
    numel = 70_003
    state = zero_state(numel) if bits == 8 else {k: torch.zeros(numel) for k in ("exp_avg", "exp_avg_sq")}
    p = grads(numel, 0, 0.0)
    for step in (1, 2):
        kernel_step(p, grads(numel, step, 1.0), state, Hyper(LR, B1, B2, EPS, 0.01, step), max_blocks)
    return {"p": p, **state}


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("max_blocks", [1, 3, 64])
def test_cuts_at_whole_blocks_change_no_bit(bits: int, max_blocks: int) -> None:
    assert differing(two_steps(bits, None), two_steps(bits, max_blocks)) == []


@pytest.mark.parametrize("bits", [8, 32])
def test_the_number_of_threads_changes_no_bit(bits: int) -> None:
    one = two_steps(bits, None)
    torch.set_num_threads(2)
    two = two_steps(bits, None)
    torch.set_num_threads(1)
    assert differing(one, two) == []


def test_cuts_at_half_a_block_change_the_state() -> None:
    whole, halves, g = zero_state(1024), zero_state(1024, 128), grads(1024, 1, 1.0)
    p = torch.zeros(1024)
    adamw8_(p.clone(), g, whole, 1)
    adamw8_(p.clone(), g, halves, 1, block=128)
    assert not torch.equal(whole["exp_avg"], halves["exp_avg"])


def test_one_step_from_equal_state_agrees_with_bitsandbytes_pytorch_code() -> None:
    pytest.importorskip("triton")
    theirs = pytest.importorskip("bitsandbytes.backends.triton.kernels_optim")
    for spread in (0.0, 0.5, 2.0):
        p, state = grads(20_000, 99, 0.0), zero_state(20_000)
        for step in range(1, 6):
            kernel_step(p, grads(20_000, step, spread), state, Hyper(LR, B1, B2, EPS, 0.01, step))
        q, other, g = p.clone(), {k: v.clone() for k, v in state.items()}, grads(20_000, 6, spread)
        kernel_step(p, g, state, Hyper(LR, B1, B2, EPS, 0.01, 6))
        with torch.compiler.set_stance("force_eager"):
            theirs.optimizer_update_8bit_blockwise_pytorch(
                q, g, other["exp_avg"], other["exp_avg_sq"], B1, B2, 0.0, 0.0, EPS, 6, LR, Q1, Q2,
                other["absmax1"], other["absmax2"], 0.01, 1.0, False, optimizer_name="adam",
            )  # fmt: skip
        assert (p - q).abs().max() <= 1e-7
        for name in ("exp_avg", "exp_avg_sq"):  # their fused sums round once less: an ulp beside a border
            apart = (state[name].int() - other[name].int()).abs()
            assert apart.max() <= 1
            assert apart.sum() <= 2
        for name in ("absmax1", "absmax2"):
            assert ((state[name] - other[name]).abs() / other[name]).max() <= 5e-7


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_one_step_from_equal_state_is_close_to_bitsandbytes_cpu_operator(spread: float) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    p, state = grads(65_536, 99, 0.0), zero_state(65_536)
    for step in range(1, 6):
        kernel_step(p, grads(65_536, step, spread), state, Hyper(LR, B1, B2, EPS, 0.01, step))
    q, other, g = p.clone(), {k: v.clone() for k, v in state.items()}, grads(65_536, 6, spread)
    kernel_step(p, g, state, Hyper(LR, B1, B2, EPS, 0.01, 6))
    functional.optimizer_update_8bit_blockwise(
        "adam", g, q, other["exp_avg"], other["exp_avg_sq"], B1, B2, 0.0, 0.0, EPS, 6, LR, Q1, Q2,
        other["absmax1"], other["absmax2"], 0.01,
    )  # fmt: skip
    assert (p - q).abs().max() <= 2e-8
    assert (state["exp_avg"] != other["exp_avg"]).float().mean() <= 0.005
    assert (state["exp_avg_sq"] != other["exp_avg_sq"]).float().mean() <= 0.01


def after_hundred_steps(make: Callable[[Any], torch.optim.Optimizer]) -> torch.Tensor:
    params = make_params((65_636,))
    optimizer = make(params)
    for step in range(1, 101):
        set_grads(params, step)
        optimizer.step()
    return params[0].detach()


def test_hundred_32bit_steps_agree_with_torch_and_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes.optim")
    scalars = {"lr": LR, "weight_decay": 0.01}
    ours = after_hundred_steps(lambda p: PagedAdamW(p, state_bits=32, **scalars))
    fused = after_hundred_steps(lambda p: torch.optim.AdamW(p, fused=True, **scalars))
    loop = after_hundred_steps(lambda p: torch.optim.AdamW(p, foreach=False, **scalars))
    theirs = after_hundred_steps(lambda p: bnb.AdamW(p, optim_bits=32, **scalars))
    for other in (fused, loop, theirs):
        assert (ours - other).abs().max() <= 5e-8


def test_32bit_steps_pass_a_gradient_that_is_not_finite_on_as_torch_does() -> None:
    p, g = torch.ones(4), torch.tensor([math.nan, 1.0, math.inf, 0.0])
    state = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    kernel = kernel_step(p, g, state, Hyper(LR, B1, B2, EPS, 0.0, 1))
    assert torch.isnan(p).tolist() == [True, False, True, False]
    assert kernel.counts()[0] == 2
