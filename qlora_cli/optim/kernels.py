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

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
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
    """A map of 256 values, with tables that decode two codes and find the nearest code in one look-up each.

    The upper half of a float's bits picks a cell, which holds at most one border between two codes. The
    cell's entry is made so that, added to the bits, it carries into bit 16 exactly when the lower half is
    beyond the border; bits 16 to 23 of the sum are the code. Below zero, where the value falls as the bits
    grow, they are its complement. The tables are filled by the exact rule (nearest, ties to the even
    code), and so carry it.

    Attributes:
        values: (256,) fp32, ascending.
        pairs: (65536,) complex64, the values of two neighbouring codes.
        entries: (65536,) int32, by cell; the cells of negative numbers come first.
        signed: For the first moment.
    """

    values: Tensor
    pairs: Tensor
    entries: Tensor
    signed: bool


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
    below = torch.nextafter(borders, torch.tensor(-math.inf))
    last_of_code = torch.where(torch.arange(255) % 2 == 0, borders, below)  # a tie goes to the even code
    cell = torch.arange(-32768, 32768, dtype=torch.int32)
    high = cell << 16
    near, far = high.view(torch.float32), (high | 0xFFFF).view(torch.float32)  # from zero
    negative, no_number = cell < 0, (cell & 0x7F80) == 0x7F80  # 0 / 0: a block of zeros
    near_code, far_code = (torch.searchsorted(last_of_code, x) for x in (near, far))
    assert bool((((near_code - far_code).abs() <= 1) | no_number).all()), "a cell holds two borders"
    if signed:  # a negative moment never becomes 0
        far_code = torch.where(negative & (far_code == ZERO_CODE), ZERO_CODE - 1, far_code)
        near_code = torch.where(negative & (near_code == ZERO_CODE), ZERO_CODE - 1, near_code)
    split = (near_code != far_code) & ~no_number
    border = last_of_code[torch.minimum(near_code, far_code).clamp(max=254)].view(torch.int32) & 0xFFFF
    last_near = torch.where(split, border - negative.int(), 0xFFFF)  # below zero the border is a far one
    nothing = ZERO_CODE if signed else 0
    first_code = torch.where(no_number, nothing, near_code)
    first_code = torch.where(negative & signed, 255 - first_code, first_code)
    offset = torch.where(negative, 2**25, 0)  # keeps the entry in range, and leaves the code alone
    entries = (first_code << 16) + 0xFFFF - last_near - high.long() - offset
    codes = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.uint8).long()
    pairs = values[codes].view(torch.complex64)
    return Code(values.to(device), pairs.to(device), entries.int().to(device), signed)


def dequantise(codes: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    """Turn codes into values.

    Args:
        codes: (num_blocks, 256) uint8, contiguous.
        absmax: (num_blocks,) fp32.
        signed: Which map.

    Returns:
        (num_blocks, 256) fp32.
    """
    moment = torch.empty(codes.shape, device=codes.device)
    _load(codes, absmax, code_of(signed, codes.device), moment.view(-1))
    return moment


def quantise(moment: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Turn values into codes and one absmax a block.

    Args:
        moment: (num_blocks, 256) fp32, contiguous, finite, padding zero; >= 0 where not signed.
        signed: Which map.

    Returns:
        Codes (num_blocks, 256) uint8 and absmax (num_blocks,) fp32.
    """
    codes = torch.empty(moment.shape, dtype=torch.uint8, device=moment.device)
    absmax = moment.new_empty(moment.shape[0])
    _store(moment.view(-1), codes, absmax, code_of(signed, moment.device), moment.new_empty(moment.numel()))
    return codes, absmax


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
        with _one_cpu_thread():
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
            self._count_zero_v(state["exp_avg"], state["exp_avg_sq"])
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

    def _count_zero_v(self, codes1: Tensor, codes2: Tensor) -> None:
        if self.device.type == "cpu" and int(codes2.amin()):
            return
        self._counts[1] += torch.count_nonzero(codes2.eq(0).logical_and_(codes1.ne(ZERO_CODE)))

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


@contextlib.contextmanager
def _one_cpu_thread() -> Iterator[None]:
    """Keep short operations out of the thread pool.

    A step makes a thousand of them, each some 20 us. On a machine that is busy otherwise the pool's threads
    wait for one another at every one, and a step that takes 0.1 s of work takes 10 s.
    """
    used = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(used)


def _load(codes: Tensor, absmax: Tensor, code: Code, moment: Tensor) -> None:
    """Dequantise (num_blocks, 256) codes into a flat fp32 array."""
    both = codes.view(-1).view(torch.int16).int().add_(32768)
    torch.index_select(code.pairs, 0, both, out=moment.view(torch.complex64))
    moment.view(-1, BLOCK).mul_(absmax[:, None])


def _store(moment: Tensor, codes: Tensor, absmax: Tensor, code: Code, spare: Tensor) -> None:
    """Quantise a flat fp32 array into (num_blocks, 256) codes and their absmax."""
    blocks, scaled = moment.view(-1, BLOCK), spare.view(-1, BLOCK)
    torch.amax(torch.abs(blocks, out=scaled) if code.signed else blocks, 1, out=absmax)
    bits = torch.div(blocks, absmax[:, None], out=scaled).view(-1).view(torch.int32)
    cell = torch.bitwise_right_shift(bits, 16).add_(32768)
    found = code.entries.index_select(0, cell).add_(bits).bitwise_right_shift_(16)
    codes.view(-1).copy_(found.bitwise_xor_(bits.bitwise_right_shift_(31)) if code.signed else found)


def _advance(grad: Tensor, moment1: Tensor, moment2: Tensor, spare: Tensor, hyper: Hyper) -> None:
    torch.mul(grad, 1.0 - hyper.beta1, out=spare)
    moment1.mul_(hyper.beta1).add_(spare)
    torch.mul(grad, 1.0 - hyper.beta2, out=spare).mul_(grad)
    moment2.mul_(hyper.beta2).add_(spare)


def _sqrt(values: Tensor, out: Tensor) -> None:
    """Take correctly rounded roots; on a CPU torch's are MKL's, which miss the last bit in 0.6 % of cases."""
    if values.device.type == "cpu":
        np.sqrt(values.numpy(), out=out.numpy())
    else:
        torch.sqrt(values, out=out)


def _move_param(
    param: Tensor, moment1: Tensor, moment2: Tensor, spare: Tensor, hyper: Hyper, keep: Tensor | None
) -> None:
    before = None if keep is None else param.clone()
    k1 = 1.0 - hyper.beta1**hyper.step
    k2 = math.sqrt(1.0 - hyper.beta2**hyper.step)
    if hyper.weight_decay:
        param.mul_(1.0 - hyper.lr * hyper.weight_decay)
    _sqrt(moment2, spare)
    # by a tensor: CUDA would turn division by a host scalar into multiplication by its reciprocal
    spare.div_(torch.full((), k2, device=spare.device)).add_(hyper.eps)
    torch.div(moment1, spare, out=spare).mul_(hyper.lr / k1)
    param.sub_(spare)
    if keep is not None and before is not None:
        param.copy_(torch.where(keep, param, before))
