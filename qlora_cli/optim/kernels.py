"""AdamW on whole blocks of state, 32-bit and blockwise 8-bit, in plain tensor operations. Knows no page.

Every operation is one correctly rounded elementwise step (multiply, add, divide, square root), a maximum,
or a table look-up, so a number does not depend on where its block lies, how many blocks are handled
together, the number of threads, or the vector width of the machine. Fused forms (`addcmul`, `lerp`, `add`
with `alpha`) are avoided: their vector body and scalar tail may round differently.

With `k1 = 1 - beta1**t` and `k2 = sqrt(1 - beta2**t)` in double precision on the host, all else in fp32:

    exp_avg    = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    param      = param * (1 - lr * weight_decay) - lr / k1 * (exp_avg / (sqrt(exp_avg_sq) / k2 + eps))

and one rounding to the parameter's dtype. 8-bit state is dequantised before and quantised after; the
parameter sees the moments before they are quantised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
ZERO_CODE = 127  # of the signed map
CPU_CHUNK_BLOCKS = 512  # 0.5 MiB a scratch array: the working set of one chunk stays in the cache
GPU_CHUNK_BLOCKS = 32768  # 32 MiB a scratch array; fewer launches
KERNELS = ("auto", "eager")


@dataclass(frozen=True, slots=True)
class Hyper:
    """The scalars of one update.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the bias-corrected second moment.
        weight_decay: Decoupled decay.
        step: Updates of this parameter, this one included; from 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one parameter whose state starts at a block.

    Attributes:
        param: Flat parameter range, any of fp32, bf16, fp16; updated in place.
        grad: Its gradient, equally long.
        block0: First block of its state in the arrays given to the kernel.
        hyper: Its scalars.
    """

    param: Tensor
    grad: Tensor
    block0: int
    hyper: Hyper

    @property
    def num_blocks(self) -> int:
        """Blocks of state, the padded tail included."""
        return -(-self.param.numel() // BLOCK)


@dataclass(frozen=True, slots=True)
class Code:
    """A map of 256 values with a table that finds the nearest one exactly.

    The top 16 bits of a float pick a cell. No cell holds more than one border between two codes, so the
    code is `base + (x > border)`. The table is made from the exact rule (nearest, ties to the even code),
    and so carries it.

    Attributes:
        values: (256,) fp32, ascending.
        base: (65536,) uint8, the lower code of each cell.
        border: (65536,) fp32, the largest value of the lower code; inf where a cell has one code only.
    """

    values: Tensor
    base: Tensor
    border: Tensor


def dynamic_map(signed: bool) -> Tensor:
    """Make the 8-bit map that bitsandbytes calls dynamic, with 7 exponent bits.

    Args:
        signed: For the first moment, else for the second.

    Returns:
        (256,) fp32, ascending; equal to bitsandbytes' map bit for bit.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        cells = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, cells + 1, dtype=torch.float32)
        middles = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        values += middles.tolist()
        if signed:
            values += (-middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


@cache
def code_of(signed: bool, device: torch.device) -> Code:
    """Make a map and its search table.

    Args:
        signed: For the first moment, whose negative values never become 0 (they become code 126, as in
            bitsandbytes' CUDA kernel), else for the second.
        device: Where the tensors shall lie.

    Returns:
        The map; made once a device.
    """
    values = dynamic_map(signed)
    borders = (values[:-1] + values[1:]) * 0.5
    low_code = torch.arange(255)
    toward_odd = torch.nextafter(borders, torch.tensor(-math.inf))
    last_of_low = torch.where(low_code % 2 == 0, borders, toward_odd)  # a tie goes to the even code
    keys = torch.arange(65536, dtype=torch.int32)
    first = (keys << 16).view(torch.float32)
    last = ((keys << 16) | 0xFFFF).view(torch.float32)
    lowest, highest = torch.minimum(first, last), torch.maximum(first, last)
    base = torch.searchsorted(last_of_low, lowest)  # border[i - 1] < x <= border[i]
    top = torch.searchsorted(last_of_low, highest)
    border = torch.where(top > base, last_of_low[base.clamp(max=254)], math.inf)
    no_number = (keys & 0x7F80) == 0x7F80  # 0 / 0: a block of zeros
    assert bool(((top - base <= 1) | no_number).all()), "a cell holds more than one border"
    if signed:
        to_zero = (keys >= 0x8000) & (base + (top > base) == ZERO_CODE)
        border = torch.where(to_zero, math.inf, border)
        base = torch.where(to_zero, ZERO_CODE - 1, base)
    base = torch.where(no_number, ZERO_CODE if signed else 0, base)
    border = torch.where(no_number, math.inf, border)
    return Code(values.to(device), base.to(torch.uint8).to(device), border.to(device))


def dequantise(codes: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    """Turn codes into values.

    Args:
        codes: (num_blocks, 256) uint8.
        absmax: (num_blocks,) fp32.
        signed: Which map.

    Returns:
        (num_blocks, 256) fp32.
    """
    values = code_of(signed, codes.device).values
    return values.index_select(0, codes.reshape(-1).int()).view(-1, BLOCK) * absmax[:, None]


def quantise(moment: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Turn values into codes and one absmax a block.

    Args:
        moment: (num_blocks, 256) fp32, padding zero.
        signed: Which map.

    Returns:
        Codes (num_blocks, 256) uint8 and absmax (num_blocks,) fp32.
    """
    absmax = moment.abs().amax(1)
    return _encode((moment / absmax[:, None]).view(-1), code_of(signed, moment.device)).view(
        -1, BLOCK
    ), absmax


def _encode(scaled: Tensor, code: Code) -> Tensor:
    """(n,) fp32 in [-1, 1], NaN for a block of zeros, to (n,) uint8."""
    cell = torch.bitwise_right_shift(scaled.view(torch.int32), 16).bitwise_and_(0xFFFF)
    above = torch.gt(scaled, code.border.index_select(0, cell))
    return code.base.index_select(0, cell).add_(above.view(torch.uint8))


def chunks(pieces: Sequence[Piece], max_blocks: int) -> Iterator[list[Piece]]:
    """Cut pieces into runs of adjacent blocks with equal scalars.

    Args:
        pieces: By `block0`.
        max_blocks: Most blocks in a run.

    Yields:
        Runs; a long piece is cut at a multiple of 256 elements.
    """
    run: list[Piece] = []
    held = 0
    for whole in pieces:
        piece = whole
        while True:
            adjacent = bool(run) and run[-1].block0 + run[-1].num_blocks == piece.block0
            if run and (not adjacent or run[-1].hyper != piece.hyper or held == max_blocks):
                yield run
                run, held = [], 0
            room = max_blocks - held
            if piece.num_blocks <= room:
                run.append(piece)
                held += piece.num_blocks
                break
            cut = room * BLOCK
            run.append(replace(piece, param=piece.param[:cut], grad=piece.grad[:cut]))
            held += room
            piece = replace(piece, param=piece.param[cut:], grad=piece.grad[cut:], block0=piece.block0 + room)
    if run:
        yield run


class EagerKernel:
    """Updates runs of blocks with ordinary tensor operations; the reference for every other kernel."""

    name = "eager"

    def __init__(self, device: torch.device) -> None:
        """Prepare tables and scratch.

        Args:
            device: Where parameters and state are.
        """
        self.device = device
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # not finite, zero second moment
        self._read_back: tuple[Tensor, Any] | None = None
        self._known = (0, 0)
        self._max_blocks = GPU_CHUNK_BLOCKS if device.type == "cuda" else CPU_CHUNK_BLOCKS
        self._scratch: Tensor | None = None

    def update_(self, state: Mapping[str, Tensor], pieces: Sequence[Piece]) -> None:
        """Do one AdamW update of parameters and state in place.

        Args:
            state: `exp_avg` and `exp_avg_sq` (num_blocks, 256), fp32, or uint8 with `absmax1` and
                `absmax2` (num_blocks,) fp32.
            pieces: What to update, by `block0`; blocks of no piece are left alone.
        """
        for run in chunks(pieces, self._max_blocks):
            first = run[0].block0
            stop = run[-1].block0 + run[-1].num_blocks
            part = {name: area[first:stop] for name, area in state.items()}
            self._update_run_(part, run, stop - first)

    def counts(self) -> tuple[int, int]:
        """Count elements since the kernel was made, without waiting for a GPU.

        Returns:
            Elements whose gradient was not finite, and 8-bit elements whose second moment rounded to 0 while
            the first did not. On a GPU the counts are those of an earlier call.
        """
        if self.device.type == "cpu":
            self._known = (int(self._counts[0]), int(self._counts[1]))
        elif self._read_back is None or self._read_back[1].query():
            if self._read_back is not None:
                self._known = (int(self._read_back[0][0]), int(self._read_back[0][1]))
            event: Any = torch.Event(self.device)
            copy = self._counts.to("cpu", non_blocking=True)
            event.record()
            self._read_back = (copy, event)
        return self._known

    def _update_run_(self, state: Mapping[str, Tensor], run: Sequence[Piece], num_blocks: int) -> None:
        grad, param, moment1, moment2, spare = self._arrays(num_blocks)
        lengths: list[int] = []
        for piece in run:
            numel = piece.param.numel()
            lengths += (numel, piece.num_blocks * BLOCK - numel)
        grads, params = grad.split_with_sizes(lengths), param.split_with_sizes(lengths)
        padding = [index for index in range(1, len(lengths), 2) if lengths[index]]
        for index in padding:
            grads[index].zero_()
            params[index].zero_()
        torch._foreach_copy_(grads[::2], [piece.grad for piece in run])
        torch._foreach_copy_(params[::2], [piece.param for piece in run])
        hyper = run[0].hyper
        if "absmax1" in state:
            code1, code2 = code_of(True, self.device), code_of(False, self.device)
            _load(state["exp_avg"], state["absmax1"], code1, moment1)
            _load(state["exp_avg_sq"], state["absmax2"], code2, moment2)
            for index in padding:
                moment1.split_with_sizes(lengths)[index].zero_()
                moment2.split_with_sizes(lengths)[index].zero_()
            _advance(grad, moment1, moment2, spare, hyper)
            keep = self._drop_nonfinite(moment1, moment2)
            _move_param(param, moment1, moment2, spare, hyper, keep)
            _store(moment1, state["exp_avg"], state["absmax1"], code1, spare)
            _store(moment2, state["exp_avg_sq"], state["absmax2"], code2, spare)
            lost = state["exp_avg_sq"].eq(0).logical_and_(state["exp_avg"].ne(ZERO_CODE))
            self._counts[1] += torch.count_nonzero(lost)
        else:
            moment1, moment2 = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
            _advance(grad, moment1, moment2, spare, hyper)
            self._counts[0] += torch.count_nonzero(grad.sub_(grad))  # inf - inf and nan - nan are nan
            _move_param(param, moment1, moment2, spare, hyper, None)
        torch._foreach_copy_([piece.param for piece in run], params[::2])

    def _arrays(self, num_blocks: int) -> tuple[Tensor, ...]:
        """Five flat fp32 arrays of `num_blocks` blocks."""
        if self._scratch is None or self._scratch.shape[1] < num_blocks * BLOCK:
            self._scratch = torch.empty(5, num_blocks * BLOCK, device=self.device)
        return self._scratch[:, : num_blocks * BLOCK].unbind(0)

    def _drop_nonfinite(self, moment1: Tensor, moment2: Tensor) -> Tensor | None:
        """Zero both moments where the new second one is not finite; say where a parameter may move.

        The second moment is finite exactly where the gradient is and its square does not overflow.
        """
        if self.device.type == "cpu" and bool(torch.isfinite(moment2.amax())):
            return None
        keep = torch.isfinite(moment2)
        lost = ~keep
        self._counts[0] += torch.count_nonzero(lost)
        moment1.masked_fill_(lost, 0.0)
        moment2.masked_fill_(lost, 0.0)
        return keep


def _load(codes: Tensor, absmax: Tensor, code: Code, moment: Tensor) -> None:
    torch.index_select(code.values, 0, codes.view(-1).int(), out=moment)
    moment.view(-1, BLOCK).mul_(absmax[:, None])


def _store(moment: Tensor, codes: Tensor, absmax: Tensor, code: Code, spare: Tensor) -> None:
    blocks = moment.view(-1, BLOCK)
    torch.amax(torch.abs(blocks, out=spare.view(-1, BLOCK)), 1, out=absmax)
    torch.div(blocks, absmax[:, None], out=spare.view(-1, BLOCK))
    codes.view(-1).copy_(_encode(spare, code))


def _advance(grad: Tensor, moment1: Tensor, moment2: Tensor, spare: Tensor, hyper: Hyper) -> None:
    torch.mul(grad, 1.0 - hyper.beta1, out=spare)
    moment1.mul_(hyper.beta1).add_(spare)
    torch.mul(grad, 1.0 - hyper.beta2, out=spare).mul_(grad)
    moment2.mul_(hyper.beta2).add_(spare)


def _move_param(
    param: Tensor, moment1: Tensor, moment2: Tensor, spare: Tensor, hyper: Hyper, keep: Tensor | None
) -> None:
    before = None if keep is None else param.clone()
    k1 = 1.0 - hyper.beta1**hyper.step
    k2 = math.sqrt(1.0 - hyper.beta2**hyper.step)
    if hyper.weight_decay:
        param.mul_(1.0 - hyper.lr * hyper.weight_decay)
    torch.sqrt(moment2, out=spare)
    # by a tensor: CUDA would turn division by a host scalar into multiplication by its reciprocal
    spare.div_(torch.full((), k2, device=spare.device)).add_(hyper.eps)
    torch.div(moment1, spare, out=spare).mul_(hyper.lr / k1)
    param.sub_(spare)
    if keep is not None and before is not None:
        param.copy_(torch.where(keep, param, before))
