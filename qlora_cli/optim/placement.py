"""Which pages rest on the device, in what order a step visits them, what is given up under pressure.

Pure policy: numbers in, numbers out, no torch. The resident set is fixed. One step is a cyclic scan over
all pages, on which a least-recently-used set with room for R of N pages evicts exactly the page that is
needed next and never hits, while a fixed set hits R times every step. No choice made here can change a
trained number: pages are disjoint and each is updated once a step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from qlora_cli.optim.pages import DEFAULT_PAGE_BYTES, MIB, MIN_PAGE_BYTES

T = TypeVar("T")
BACKENDS = ("auto", "resident", "host")
PREFETCH = ("off", "step")


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """A value that was `auto`, with the reason for what it became.

    Attributes:
        value: What is used.
        reason: Why, in words a run can print.
    """

    value: T
    reason: str


@dataclass(frozen=True, slots=True)
class PagingConfig:
    """Where optimizer state lives and how it moves; the recipe's `optimizer.paging`.

    Attributes:
        backend: `resident` (with the parameters), `host` (in host memory, pages move), or `auto`.
        page_mib: Page size in MiB; None takes 16 and shrinks it for small states. Fractions are allowed.
        staging_pages: Device slots for pages in flight, 2 to 16.
        vram_budget_mib: Device MiB that state may hold between steps; `auto` keeps all of it there.
        prefetch: `step` fetches pages ahead within a step, `off` fetches each when its turn comes.
    """

    backend: str = "auto"
    page_mib: float | None = None
    staging_pages: int = 4
    vram_budget_mib: float | Literal["auto"] = "auto"
    prefetch: str = "step"

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ValueError: Naming the key, the value found and what is accepted.
        """
        if self.backend not in BACKENDS:
            raise ValueError(f"paging.backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.prefetch not in PREFETCH:
            raise ValueError(f"paging.prefetch must be one of {', '.join(PREFETCH)}, got {self.prefetch!r}")
        if self.page_mib is not None and not 0 < self.page_mib <= 256:
            raise ValueError(f"paging.page_mib must be above 0 and at most 256, got {self.page_mib}")
        if not 2 <= self.staging_pages <= 16:
            raise ValueError(f"paging.staging_pages must be 2 to 16, got {self.staging_pages}")
        budget = self.vram_budget_mib
        if budget != "auto" and not (isinstance(budget, (int, float)) and 0 <= budget < math.inf):
            raise ValueError(f"paging.vram_budget_mib must be auto or a number >= 0, got {budget!r}")
        if self.backend == "resident" and budget != "auto":
            raise ValueError(
                "paging.backend resident keeps all state on the device; vram_budget_mib must be auto"
            )


@dataclass(frozen=True, slots=True)
class Placement:
    """The resident set and the budget it was made for.

    Attributes:
        resident: Pages that stay on the device between steps.
        resident_bytes: Their bytes.
        budget: Device bytes allowed between steps, with the reason.
    """

    resident: frozenset[int]
    resident_bytes: int
    budget: Choice[int]


def choose_page_bytes(page_mib: float | None, state_bytes: int, staging_pages: int) -> Choice[int]:
    """Choose the page size.

    Args:
        page_mib: What the recipe says, or None.
        state_bytes: Bytes of all state.
        staging_pages: Device slots for pages in flight.

    Returns:
        The size in bytes. Without a wish: 16 MiB, or the largest power of two whose slots together take at
        most a quarter of the state, but not under 1 MiB.
    """
    if page_mib is not None:
        return Choice(int(page_mib * MIB), f"page_mib is {page_mib:g}")
    page = DEFAULT_PAGE_BYTES
    while page > MIN_PAGE_BYTES and staging_pages * page > state_bytes / 4:
        page //= 2
    if page == DEFAULT_PAGE_BYTES:
        return Choice(page, f"{staging_pages} slots of 16 MiB take at most a quarter of the state")
    size = f"{page // MIB} MiB instead of 16"
    return Choice(
        page, f"{size}, because {staging_pages} slots stand beside a state of {state_bytes / MIB:.1f} MiB"
    )


def choose_backend(config: PagingConfig, device: str) -> Choice[str]:
    """Choose where the state lives.

    Args:
        config: The paging part of the recipe.
        device: Kind of the parameters' device, such as `cpu` or `cuda`.

    Returns:
        `resident` or `host`.
    """
    if config.backend != "auto":
        return Choice(config.backend, f"backend is {config.backend}")
    if config.vram_budget_mib != "auto":
        return Choice(
            "host", f"a budget of {config.vram_budget_mib:g} MiB needs pages that can leave the device"
        )
    if device == "cuda":
        return Choice("resident", "no budget is set, so all state stays on the GPU")
    return Choice("host", f"no GPU: the device memory that pages move to and from is emulated on {device}")


def choose_budget(vram_budget_mib: float | Literal["auto"], state_bytes: int) -> Choice[int]:
    """Turn the budget of the recipe into bytes.

    Args:
        vram_budget_mib: `auto` or MiB.
        state_bytes: Bytes of all state.

    Returns:
        Device bytes that state may hold between steps.
    """
    if vram_budget_mib == "auto":
        return Choice(state_bytes, "vram_budget_mib is auto, so all state stays resident")
    return Choice(int(vram_budget_mib * MIB), f"vram_budget_mib is {vram_budget_mib:g}")


def resident_set(page_bytes: Sequence[int], budget_bytes: int) -> frozenset[int]:
    """Choose the pages that stay resident between optimizer steps.

    Args:
        page_bytes: Bytes of every page, by number.
        budget_bytes: Device bytes that state may hold between steps; 0 keeps none.

    Returns:
        The lowest page numbers whose bytes together fit the budget.

    Raises:
        ValueError: If `budget_bytes` is negative.
    """
    if budget_bytes < 0:
        raise ValueError(f"the budget must be >= 0 bytes, got {budget_bytes}")
    held = 0
    for number, size in enumerate(page_bytes):
        held += size
        if held > budget_bytes:
            return frozenset(range(number))
    return frozenset(range(len(page_bytes)))


def place(page_bytes: Sequence[int], budget: Choice[int]) -> Placement:
    """Make the placement for a budget.

    Args:
        page_bytes: Bytes of every page, by number.
        budget: Device bytes that state may hold between steps.

    Returns:
        A placement whose resident pages sum to at most the budget.
    """
    resident = resident_set(page_bytes, budget.value)
    return Placement(resident, sum(page_bytes[number] for number in resident), budget)


def order(live: Sequence[int], resident: Collection[int], staged: Collection[int] = ()) -> list[int]:
    """Order the pages of one step.

    Args:
        live: Pages that have something to update, ascending.
        resident: Pages that are on the device.
        staged: Pages whose fetch was started before the step.

    Returns:
        Staged pages first, which frees their slots at once; then residents, whose kernels run while the
        next copies fly; then the rest. Ascending within each.
    """
    rank = {page: 0 if page in staged else 1 if page in resident else 2 for page in live}
    return sorted(live, key=lambda page: (rank[page], page))


def evict_plan(need_bytes: int, page_bytes: Sequence[int], resident: Collection[int]) -> list[int]:
    """Choose the pages to give up when the device needs room.

    Args:
        need_bytes: Device bytes to free.
        page_bytes: Bytes of every page, by number.
        resident: Pages that are on the device.

    Returns:
        Highest page numbers first, just enough to free `need_bytes`, or all of them if that is too little.
        What stays is a prefix of the pages, as after `resident_set`.
    """
    given: list[int] = []
    freed = 0
    for page in sorted(resident, reverse=True):
        if freed >= need_bytes:
            break
        given.append(page)
        freed += page_bytes[page]
    return given
