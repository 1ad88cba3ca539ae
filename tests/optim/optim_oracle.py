"""The 8-bit AdamW rule written for reading: one parameter, one search over all borders; slow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 256


def dynamic_map(signed: bool) -> Tensor:
    values = [0.0, 1.0]
    for decade in range(7):
        cells = 2**decade if signed else 2 ** (decade + 1)
        edge = torch.linspace(0.1, 1, cells + 1, dtype=torch.float32)
        middle = 10.0 ** (decade - 6) * ((edge[:-1] + edge[1:]) / 2.0)
        values += middle.tolist() + ((-middle).tolist() if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


Q1, Q2 = dynamic_map(True), dynamic_map(False)


def encode(x: Tensor, q: Tensor) -> Tensor:
    """Nearest code, ties to the even code."""
    border = (q[:-1] + q[1:]) * 0.5
    code = torch.bucketize(x, border)
    tie = (code < 255) & (x == border[code.clamp(max=254)]) & (code % 2 == 1)
    return code + tie.long()


def requantise(s: Tensor, q: Tensor, keep_sign: bool, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    b = torch.nn.functional.pad(s, (0, -s.numel() % block)).view(-1, block)
    a = b.abs().amax(1)
    code = encode(b / torch.where(a > 0, a, torch.ones_like(a))[:, None], q)
    if keep_sign:
        code = torch.where((code == 127) & torch.signbit(b) & (a > 0)[:, None], 126, code)
    return code.view(-1)[: s.numel()].to(torch.uint8), a


def adamw8_(
    p: Tensor,
    g: Tensor,
    state: dict[str, Tensor],
    t: int,
    lr: float = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    wd: float = 0.0,
    block: int = BLOCK,
) -> None:
    """One step; `state` holds flat exp_avg, exp_avg_sq (codes), absmax1, absmax2."""
    of = torch.arange(p.numel()) // block
    gf, pf = g.float().view(-1), p.float().view(-1)
    ok = torch.isfinite(gf)
    gz = torch.where(ok, gf, 0.0)
    m = Q1[state["exp_avg"].long()] * state["absmax1"][of] * b1 + (1.0 - b1) * gz
    v = Q2[state["exp_avg_sq"].long()] * state["absmax2"][of] * b2 + (1.0 - b2) * gz * gz
    m, v = torch.where(ok, m, 0.0), torch.where(ok, v, 0.0)
    k1, k2 = 1.0 - b1**t, math.sqrt(1.0 - b2**t)
    new = pf * (1.0 - lr * wd) if wd else pf
    new = new - lr / k1 * (m / (exact_sqrt(v) / k2 + eps))
    p.copy_(torch.where(ok, new, pf).view_as(p))
    for s, q, codes, absmax, sign in (
        (m, Q1, "exp_avg", "absmax1", True),
        (v, Q2, "exp_avg_sq", "absmax2", False),
    ):
        state[codes], state[absmax] = requantise(s, q, sign, block)


def exact_sqrt(v: Tensor) -> Tensor:
    """Correctly rounded: the root in fp64 is never near enough to a midpoint of fp32 to round wrongly."""
    return v.double().sqrt().float()


def zero_state(numel: int, block: int = BLOCK) -> dict[str, Tensor]:
    blocks = -(-numel // block)
    return {
        "exp_avg": torch.zeros(numel, dtype=torch.uint8),
        "exp_avg_sq": torch.zeros(numel, dtype=torch.uint8),
        "absmax1": torch.zeros(blocks),
        "absmax2": torch.zeros(blocks),
    }
