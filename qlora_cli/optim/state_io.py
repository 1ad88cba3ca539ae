"""Optimizer state outside its pages: copied in and out, and as state dicts of three optimizers.

Page size, budget and backend are never written down, so what was saved under one layout loads into any
other. Tensors that leave are copies: one small view of a page, saved, would drag the whole page along, and
would change under an asynchronous writer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qlora_cli.optim import kernels
from qlora_cli.optim.pages import BLOCK, Page, PageTable

BNB_WRAPPER = "__bnb_optimizer_quant_state__"
MOMENTS = ("exp_avg", "exp_avg_sq")
AREAS = {8: (*MOMENTS, "absmax1", "absmax2"), 32: MOMENTS}


View = Callable[[int], Tensor]
"""Gives the buffer of a page."""


@dataclass(frozen=True, slots=True)
class Moments:
    """The state of one parameter, outside any page.

    Attributes:
        bits: 8 or 32.
        step: Updates made; 0 for none.
        tensors: Flat `exp_avg` and `exp_avg_sq` (numel,), uint8 or fp32, and for 8-bit `absmax1` and
            `absmax2` (num_blocks,) fp32.
    """

    bits: int
    step: int
    tensors: Mapping[str, Tensor]


def page_arrays(page: Page, buffer: Tensor) -> dict[str, Tensor]:
    """View a page's buffer as the arrays a kernel works on.

    Args:
        page: The page.
        buffer: Its bytes.

    Returns:
        `exp_avg`, `exp_avg_sq` (num_blocks, 256), and for 8-bit `absmax1`, `absmax2` (num_blocks,).
    """
    arrays: dict[str, Tensor] = {}
    for name, (start, stop) in page.areas().items():
        area = buffer[start:stop]
        if page.bits == 32 or name not in MOMENTS:
            area = area.view(torch.float32)
        arrays[name] = area.view(-1, BLOCK) if name in MOMENTS else area
    return arrays


def read_moments(table: PageTable, view: View, param: int, step: int) -> Moments:
    """Copy the state of one parameter out of its pages.

    Args:
        table: Where it lies.
        view: Buffers that are safe to read.
        param: Index of the parameter.
        step: Updates it has had.

    Returns:
        Its state, on the CPU, sharing no memory with a page.
    """
    bits, numel = table.bits[param], table.numels[param]
    dtype = torch.uint8 if bits == 8 else torch.float32
    tensors = {name: torch.empty(numel, dtype=dtype) for name in MOMENTS}
    if bits == 8:
        tensors |= {name: torch.empty(-(-numel // BLOCK)) for name in AREAS[8][2:]}
    for pair in _overlaps(table, view, param, tensors):
        pair[1].copy_(pair[0])
    return Moments(bits, step, tensors)


def write_moments(table: PageTable, view: View, param: int, moments: Moments) -> None:
    """Copy the state of one parameter into its pages; padding gets what means zero.

    Args:
        table: Where it lies.
        view: Buffers that may be written.
        param: Index of the parameter.
        moments: Its state in the format of the table.
    """
    assert moments.bits == table.bits[param], "converted before it is written"
    if moments.bits == 8 and table.by_param[param]:
        last = table.by_param[param][-1]
        page = table.pages[last.page]
        arrays = page_arrays(page, view(last.page))
        arrays["exp_avg"][last.block0 + last.num_blocks - 1].fill_(kernels.ZERO_CODE)
        arrays["exp_avg_sq"][last.block0 + last.num_blocks - 1].fill_(0)
    for pair in _overlaps(table, view, param, moments.tensors):
        pair[0].copy_(pair[1])


def zero_moments(numel: int, bits: int) -> Moments:
    """Make the state of a parameter that was never updated.

    Args:
        numel: Elements of the parameter.
        bits: Format.

    Returns:
        Zeros; code 0 with absmax 0 stands for zero too.
    """
    dtype = torch.uint8 if bits == 8 else torch.float32
    tensors = {name: torch.zeros(numel, dtype=dtype) for name in MOMENTS}
    if bits == 8:
        tensors |= {name: torch.zeros(-(-numel // BLOCK)) for name in AREAS[8][2:]}
    return Moments(bits, 0, tensors)


def _overlaps(
    table: PageTable, view: View, param: int, tensors: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of (range of a page, range of a flat tensor) that hold the same state."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for segment in table.by_param[param]:
        arrays = page_arrays(table.pages[segment.page], view(segment.page))
        for name, flat in tensors.items():
            per_block = BLOCK if name in MOMENTS else 1
            length = segment.num_elems if name in MOMENTS else segment.num_blocks
            first = segment.block0 * per_block
            start = segment.elem0 // BLOCK * per_block
            pairs.append((arrays[name].view(-1)[first : first + length], flat[start : start + length]))
    return pairs


def convert(moments: Moments, bits: int) -> Moments:
    """Change the format of a state; exact from 8 to 32 bits only.

    Args:
        moments: The state.
        bits: Format wanted.

    Returns:
        The state in that format.
    """
    if moments.bits == bits:
        return moments
    tensors = moments.tensors
    numel = tensors["exp_avg"].numel()
    padding = -numel % BLOCK
    made: dict[str, Tensor] = {}
    for name, absmax, signed in (("exp_avg", "absmax1", True), ("exp_avg_sq", "absmax2", False)):
        blocks = torch.nn.functional.pad(tensors[name], (0, padding)).view(-1, BLOCK)
        if bits == 32:
            made[name] = kernels.dequantise(blocks, tensors[absmax], signed).view(-1)[:numel].clone()
        else:
            codes, made[absmax] = kernels.quantise(blocks, signed)
            made[name] = codes.view(-1)[:numel].clone()
    return Moments(bits, moments.step, made)


def as_entry(moments: Moments, shape: torch.Size, dialect: str) -> dict[str, Any]:
    """Make the entry of one parameter in a state dict.

    Args:
        moments: Its state.
        shape: Shape of the parameter.
        dialect: `ours`, `bnb`, or `torch` (32-bit state only).

    Returns:
        torch AdamW's form for 32-bit state, bitsandbytes' wrapped form for 8-bit state, and for `bnb`
        its own names for 32-bit state too.
    """
    tensors = dict(moments.tensors)
    first, second = (tensors.pop(name).view(shape) for name in MOMENTS)
    if moments.bits == 32 and dialect != "bnb":
        return {"step": torch.tensor(float(moments.step)), "exp_avg": first, "exp_avg_sq": second}
    inner = {"state1": first, "state2": second, **tensors}
    if moments.bits == 8:
        inner |= {"qmap1": kernels.dynamic_map(True), "qmap2": kernels.dynamic_map(False)}
    return {"step": moments.step, BNB_WRAPPER: inner}


def parse_entry(entry: Mapping[str, Any], numel: int, where: str) -> tuple[Moments, int]:
    """Read the entry of one parameter from a state dict of ours, bitsandbytes or torch AdamW.

    Args:
        entry: The entry.
        numel: Elements of the parameter.
        where: What to call the parameter in messages.

    Returns:
        Its state (a view of the entry where possible), and the format it came in. They differ where its
        8-bit maps are not ours: then the state is dequantised.

    Raises:
        ValueError: If the entry is of another optimizer, or its sizes are not the parameter's.
    """
    flat = {**entry, **entry.get(BNB_WRAPPER, {})}
    if "max_exp_avg_sq" in flat:
        raise ValueError(f"{where}: the state is of amsgrad, which keeps a maximum that AdamW has no use for")
    first, second = (
        flat.get(old, flat.get(new)) for old, new in (("state1", "exp_avg"), ("state2", "exp_avg_sq"))
    )
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or "step" not in flat:
        raise ValueError(f"{where}: no AdamW state; the entry holds {', '.join(map(str, flat)) or 'nothing'}")
    step = int(flat["step"])
    bits = 8 if first.dtype == torch.uint8 else 32
    tensors: dict[str, Tensor] = {"exp_avg": first, "exp_avg_sq": second}
    if bits == 8:
        missing = [name for name in ("absmax1", "absmax2", "qmap1", "qmap2") if name not in flat]
        if missing:
            raise ValueError(f"{where}: 8-bit state without {', '.join(missing)}")
        tensors |= {"absmax1": flat["absmax1"], "absmax2": flat["absmax2"]}
    elif not first.is_floating_point():
        raise ValueError(f"{where}: moments are {first.dtype}, not floating point")
    tensors = {name: _flat_cpu(tensor, bits, name) for name, tensor in tensors.items()}
    check_sizes({name: tensor.shape for name, tensor in tensors.items()}, bits, numel, where)
    maps: list[Any] = [flat.get(f"qmap{order}") for order in (1, 2)]
    ours = [kernels.dynamic_map(signed) for signed in (True, False)]
    if bits == 8 and not all(torch.equal(m.cpu().float(), o) for m, o in zip(maps, ours, strict=True)):
        return Moments(32, step, _decode_foreign(tensors, maps)), 8
    return Moments(bits, step, tensors), bits


def _flat_cpu(tensor: Tensor, bits: int, name: str) -> Tensor:
    dtype = torch.uint8 if bits == 8 and name in MOMENTS else torch.float32
    return tensor.detach().reshape(-1).to(device="cpu", dtype=dtype)


def _decode_foreign(tensors: Mapping[str, Tensor], maps: Sequence[Any]) -> dict[str, Tensor]:
    """Dequantise with another optimizer's maps."""
    made: dict[str, Tensor] = {}
    for name, absmax, values in zip(MOMENTS, ("absmax1", "absmax2"), maps, strict=True):
        scale = tensors[absmax].repeat_interleave(BLOCK)[: tensors[name].numel()]
        made[name] = values.cpu().float()[tensors[name].long()] * scale
    return made


def check_sizes(shapes: Mapping[str, Sequence[int]], bits: int, numel: int, where: str) -> None:
    """Check that the tensors of one parameter have the parameter's size.

    Args:
        shapes: Shape of the tensor of each area.
        bits: Format.
        numel: Elements of the parameter.
        where: What to call the parameter.

    Raises:
        ValueError: Naming the first tensor of another size.
    """
    for name in AREAS[bits]:
        expected = numel if name in MOMENTS else -(-numel // BLOCK)
        found = math.prod(shapes[name])
        if found != expected:
            raise ValueError(f"{where}: {name} has {found} elements, expected {expected}")
