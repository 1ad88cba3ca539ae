"""All state of one optimizer: its pages, where they lie, and how often each parameter was updated.

Owns the layout. State can be read parameter by parameter, replaced as a whole, and grown, each time into
whatever layout the configuration asks for. What the numbers mean is none of its business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from qlora_cli.optim import pages, placement, state_io
from qlora_cli.optim.backend import Backend, HostBackend, ResidentBackend, make_streams
from qlora_cli.optim.pager import Pager
from qlora_cli.optim.telemetry import PagingCounters, RunTotals, StateSize, step_record

if TYPE_CHECKING:
    import torch

    from qlora_cli.optim.placement import Choice, PagingConfig
    from qlora_cli.optim.state_io import Moments

MakeBackend = Callable[[str, Sequence[int], frozenset[int]], Backend]


class PagedState:
    """The moments of all parameters on pages.

    Attributes:
        table: Which state lies on which page.
        pager: Moves the pages of `table`.
        steps: Updates of each parameter.
        choices: What was `auto` and what it became: `backend`, `page_bytes`, `budget_bytes`.
        counters: What paging did.
        totals: What it cost over all recorded steps.
    """

    table: pages.PageTable
    pager: Pager

    def __init__(
        self, config: PagingConfig, device: torch.device, make_backend: MakeBackend | None = None
    ) -> None:
        """Start without parameters.

        Args:
            config: Where state lives and how it moves.
            device: The parameters' device.
            make_backend: Allocates state, given the backend's name, the bytes of each page and the resident
                pages; None for the real ones.
        """
        self.choices: dict[str, Choice[Any]] = {}
        self.counters = PagingCounters()
        self.totals = RunTotals()
        self.steps: list[int] = []
        self._config = config
        self._device = device
        self._make_backend = make_backend or self._real_backend
        self._reported = PagingCounters()

    def build(self, numels: Sequence[int], bits: Sequence[int]) -> None:
        """Lay out, place and allocate zeroed state.

        Args:
            numels: Elements of each parameter.
            bits: Format of each parameter's moments.
        """
        config, total = self._config, pages.state_bytes(numels, bits)
        page_bytes = placement.choose_page_bytes(config.page_mib, total, config.staging_pages)
        backend = placement.choose_backend(config, self._device.type)
        budget = placement.choose_budget(config.vram_budget_mib, total)
        self.choices |= {"backend": backend, "page_bytes": page_bytes, "budget_bytes": budget}
        self.table = pages.page_table(numels, bits, page_bytes.value)
        sizes = [page.num_bytes for page in self.table.pages]
        resident = placement.resident_set(sizes, budget.value)
        memory = self._make_backend(backend.value, sizes, resident)
        self.counters.fallbacks += len(memory.fallbacks)
        self.steps += [0] * (len(numels) - len(self.steps))
        self.pager = Pager(
            memory,
            sizes,
            resident,
            staging_pages=config.staging_pages,
            prefetch=config.prefetch,
            counters=self.counters,
        )

    def grow(self, numels: Sequence[int], bits: Sequence[int]) -> None:
        """Add parameters, keeping all state.

        Args:
            numels: Elements of each new parameter.
            bits: Format of each new parameter's moments.
        """
        kept = [self.read(param) for param in range(len(self.steps))]
        self.pager.close()
        self.build((*self.table.numels, *numels), (*self.table.bits, *bits))
        for param, moments in enumerate(kept):
            state_io.write_moments(self.table, self.pager.write_view, param, moments)

    def read(self, param: int) -> Moments:
        """Copy the state of one parameter out.

        Args:
            param: Index of the parameter.

        Returns:
            Its state; shares no memory with a page.
        """
        return state_io.read_moments(self.table, self.pager.read_view, param, self.steps[param])

    def replace(self, bits: Sequence[int], read: Callable[[int], Moments | None]) -> None:
        """Replace all state.

        Args:
            bits: Format of each parameter's moments from now on.
            read: Gives the state of a parameter in any format, or None for zeros.
        """
        self.pager.fence()
        if tuple(bits) != self.table.bits:
            self.pager.close()
            self.build(self.table.numels, bits)
        for param, form in enumerate(bits):
            moments = read(param) or state_io.zero_moments(self.table.numels[param], form)
            self.steps[param] = moments.step
            converted = state_io.convert(moments, form)
            state_io.write_moments(self.table, self.pager.write_view, param, converted)

    def record(self, kernel: str, lost: tuple[int, int], step_ms: float) -> dict[str, Any]:
        """Report what paging did since the last call.

        Args:
            kernel: Name of the kernel.
            lost: Elements with a gradient that is not finite, and with a lost second moment, so far.
            step_ms: Milliseconds of the whole training step.

        Returns:
            The `paging` object of `metrics.jsonl`.
        """
        self.pager.reclaim()
        self.counters.nonfinite_elements, self.counters.zero_v_elements = lost
        moved = self.counters.since(self._reported)
        record = step_record(self._size(kernel), moved, self.pager.take_times(), step_ms)
        self._reported = copy(self.counters)
        self.totals.add(record)
        return record

    def _size(self, kernel: str) -> StateSize:
        sizes = [page.num_bytes for page in self.table.pages]
        name = self.choices["backend"].value
        return StateSize(
            backend=name,
            kernel=kernel,
            emulated=name == "host" and self._device.type != "cuda",
            state_bytes=sum(sizes),
            resident_bytes=sum(sizes[page] for page in self.pager.resident),
            pages=len(sizes),
            resident_pages=len(self.pager.resident),
            device_peak_bytes=self.pager.peak_device_bytes,
        )

    def _real_backend(self, name: str, sizes: Sequence[int], resident: frozenset[int]) -> Backend:
        streams = make_streams(self._device)
        if name == "resident":
            return ResidentBackend(sizes, self._device, streams)
        return HostBackend(sizes, resident, self._device, streams)


def formats_after_load(
    found: Mapping[int, int], numels: Sequence[int], state_bits: int, min_8bit_size: int
) -> tuple[list[int], int]:
    """Choose formats for state that comes from elsewhere.

    Args:
        found: Format in which the state of a parameter comes, where it comes.
        numels: Elements of each parameter.
        state_bits: Format asked for.
        min_8bit_size: Parameters with fewer elements keep 32-bit moments.

    Returns:
        A format for each parameter, and how many parameters are converted. Where some of the state is 8-bit
        and 8 is asked for, each keeps the format it comes in, whatever `min_8bit_size` says.
    """
    bits = list(pages.formats(numels, state_bits, min_8bit_size))
    if state_bits == 8 and 8 in found.values():
        bits = [found.get(param, form) for param, form in enumerate(bits)]
    return bits, sum(bits[param] != form for param, form in found.items())
