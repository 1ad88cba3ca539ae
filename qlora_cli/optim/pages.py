"""Which bytes of which optimizer state lie on which page: pure arithmetic, no torch.

State is cut into blocks of 256 consecutive elements of a flattened parameter. A page is one contiguous
slab of whole blocks, `[exp_avg | exp_avg_sq | absmax1 | absmax2]`, of one format. Parameters are laid end
to end in registration order and straddle pages freely; a cut falls on a block boundary only, because a
block of 8-bit state shares one `absmax` and a shifted block would change the numbers. Short tails are
padded to a whole block, so every byte of the state can be paged, however small the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 256  # elements that share one absmax; bitsandbytes' blockwise optimizers use the same
ALIGN_BLOCKS = 64  # 64 blocks of one fp32 absmax are 256 bytes
MIB = 2**20
DEFAULT_PAGE_BYTES = 16 * MIB  # a 16 MiB copy reaches 50 GB/s on a link that peaks at 55
MIN_PAGE_BYTES = MIB
MIN_8BIT_NUMEL = 4096  # bitsandbytes' min_8bit_size; below it the moments stay fp32

_AREA_BYTES = {  # bytes of each area per block, in slab order
    8: (("exp_avg", BLOCK), ("exp_avg_sq", BLOCK), ("absmax1", 4), ("absmax2", 4)),
    32: (("exp_avg", 4 * BLOCK), ("exp_avg_sq", 4 * BLOCK)),
}


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one parameter that lies on one page.

    Attributes:
        param: Index of the parameter in registration order.
        elem0: First element of the flattened parameter; a multiple of 256.
        num_elems: Elements without padding; a multiple of 256 except at the parameter's end.
        page: Number of the page.
        block0: First block on the page.
    """

    param: int
    elem0: int
    num_elems: int
    page: int
    block0: int

    @property
    def num_blocks(self) -> int:
        """Blocks the segment occupies, the padded tail included."""
        return -(-self.num_elems // BLOCK)


@dataclass(frozen=True, slots=True)
class Page:
    """One contiguous slab of whole blocks.

    Attributes:
        number: Position in the page table; `step` visits pages in this order.
        bits: Format of the moments, 8 or 32.
        num_blocks: Blocks in use; a page holds no unused bytes.
        segments: What lies on it, by `block0`.
    """

    number: int
    bits: int
    num_blocks: int
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        """Length of the slab."""
        return self.num_blocks * block_bytes(self.bits)

    def areas(self) -> dict[str, tuple[int, int]]:
        """Byte range `(start, stop)` of every area of the slab."""
        found: dict[str, tuple[int, int]] = {}
        start = 0
        for name, per_block in _AREA_BYTES[self.bits]:
            found[name] = (start, start + per_block * self.num_blocks)
            start += per_block * self.num_blocks
        return found


@dataclass(frozen=True, slots=True)
class PageTable:
    """Every page of an optimizer and where each parameter lies.

    Attributes:
        pages: All pages, by number.
        by_param: For every parameter its segments, by `elem0`.
        bits: For every parameter the format of its moments.
        numels: For every parameter its number of elements.
    """

    pages: tuple[Page, ...]
    by_param: tuple[tuple[Segment, ...], ...]
    bits: tuple[int, ...]
    numels: tuple[int, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(page.num_bytes for page in self.pages)

    def pages_of(self, params: Sequence[int]) -> list[int]:
        """Numbers of the pages that hold a segment of any of these parameters, ascending."""
        return sorted({segment.page for param in params for segment in self.by_param[param]})


def block_bytes(bits: int) -> int:
    """Count the bytes of state of one block.

    Args:
        bits: Format of the moments, 8 or 32.

    Returns:
        520 for 8-bit (two codes an element, two fp32 absmax a block), 2048 for 32-bit.
    """
    return sum(per_block for _, per_block in _AREA_BYTES[bits])


def formats(numels: Sequence[int], state_bits: int, min_8bit_size: int = MIN_8BIT_NUMEL) -> tuple[int, ...]:
    """Choose the format of every parameter's moments.

    Args:
        numels: Elements of each parameter.
        state_bits: Format asked for, 8 or 32.
        min_8bit_size: Parameters with fewer elements keep 32-bit moments.

    Returns:
        8 or 32 for each parameter.

    Raises:
        ValueError: If `state_bits` is neither 8 nor 32, or `min_8bit_size` is negative.
    """
    if state_bits not in _AREA_BYTES:
        raise ValueError(f"state_bits must be 8 or 32, got {state_bits}")
    if min_8bit_size < 0:
        raise ValueError(f"min_8bit_size must be >= 0, got {min_8bit_size}")
    return tuple(32 if state_bits == 32 or numel < min_8bit_size else 8 for numel in numels)


def state_bytes(numels: Sequence[int], bits: Sequence[int]) -> int:
    """Count the bytes of state of all parameters, padding included.

    Args:
        numels: Elements of each parameter.
        bits: Format of each parameter's moments.

    Returns:
        Bytes; what paging can move at most.
    """
    return sum(-(-numel // BLOCK) * block_bytes(b) for numel, b in zip(numels, bits, strict=True))


def blocks_per_page(page_bytes: int, bits: int) -> int:
    """Count the blocks of a full page.

    Args:
        page_bytes: Upper bound of the slab's length.
        bits: Format of the moments, 8 or 32.

    Returns:
        The largest multiple of 64 that fits, which keeps every area of a full page 256-byte aligned; for
        pages smaller than 64 blocks whatever fits.

    Raises:
        ValueError: If not even one block fits.
    """
    fit = page_bytes // block_bytes(bits)
    if fit < 1:
        raise ValueError(f"a page of {page_bytes} bytes holds no block of {block_bytes(bits)} bytes")
    return fit if fit < ALIGN_BLOCKS else fit - fit % ALIGN_BLOCKS


def page_table(numels: Sequence[int], bits: Sequence[int], page_bytes: int) -> PageTable:
    """Lay all parameters out on pages.

    Parameters keep registration order within their format; 8-bit pages come before 32-bit pages.

    Args:
        numels: Elements of each parameter; a parameter without elements gets no segment.
        bits: Format of each parameter's moments.
        page_bytes: Upper bound of a page's length.

    Returns:
        The table; its pages hold every block of every parameter exactly once.

    Raises:
        ValueError: If a page of `page_bytes` holds no block.
    """
    by_param: list[list[Segment]] = [[] for _ in numels]
    pages: list[Page] = []
    for form in sorted(set(bits)):
        room = blocks_per_page(page_bytes, form)
        laid: list[Segment] = []
        used = 0
        for param, numel in enumerate(numels):
            elem0 = 0
            while bits[param] == form and elem0 < numel:
                if used == room:
                    pages.append(Page(len(pages), form, used, tuple(laid)))
                    laid, used = [], 0
                taken = min(numel - elem0, (room - used) * BLOCK)
                segment = Segment(param, elem0, taken, len(pages), used)
                laid.append(segment)
                by_param[param].append(segment)
                elem0 += taken
                used += segment.num_blocks
        if laid:
            pages.append(Page(len(pages), form, used, tuple(laid)))
    return PageTable(tuple(pages), tuple(map(tuple, by_param)), tuple(bits), tuple(numels))
