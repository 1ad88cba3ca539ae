"""The schedule of a step: which page goes into which slot, after which event. Knows no torch, no arithmetic.

A page that rests on the host is copied in, updated and copied out, each on its own queue. The queues are
ordered by events only, and every wait names the rule it keeps, so that a test can leave one out and see
that it is noticed:

R1   a slot is overwritten only after its last copy out has drained, else the state of two pages mixes.
R2   a kernel starts after its page has arrived, else it updates stale state.
R3   a copy out starts after the kernel, else the old state is written back.
R4   a page is read again after it was written back, else the step before last returns.
R5   new device memory is written after all that was enqueued when it was allocated: the allocator hands out
     memory that kernels under way still read.
R7   the host reads a slab after the page's copy out, else a checkpoint is torn.
R8   memory is freed after everything that touches it.
R12  loading, and recovery from an exception, first wait for everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from qlora_cli.optim import placement
from qlora_cli.optim.backend import Stream
from qlora_cli.optim.telemetry import PagingCounters, SpanTimes

if TYPE_CHECKING:
    from torch import Tensor

    from qlora_cli.optim.backend import Backend

Update = Callable[[int, "Tensor"], None]
"""Updates the parameters of a page, given its number and a device buffer that holds its state."""


class PageState(Enum):
    """Where the current state of a page is, as far as work was enqueued."""

    HOST = "host"
    STAGED = "staged"  # its copy in is enqueued
    UPDATED = "updated"  # its kernel is enqueued, its copy out is not
    RESIDENT = "resident"


_NEXT = {
    PageState.HOST: (PageState.STAGED,),
    PageState.STAGED: (PageState.UPDATED, PageState.HOST),  # back to host: dropped after an exception
    PageState.UPDATED: (PageState.HOST,),
    PageState.RESIDENT: (),
}


@dataclass(slots=True, eq=False)
class Slot:
    """Device memory for one page in flight, with the last events on it."""

    memory: Tensor
    filled: Any = None
    drained: Any = None


class Pager:
    """Carries a placement out: fetches, hands over, writes back."""

    def __init__(
        self,
        backend: Backend,
        page_bytes: Sequence[int],
        resident: frozenset[int],
        *,
        staging_pages: int,
        prefetch: str,
        counters: PagingCounters,
    ) -> None:
        """Take over a backend whose slabs hold valid state.

        Args:
            backend: Where pages lie.
            page_bytes: Bytes of every page, by number.
            resident: Pages that stay on the device.
            staging_pages: Most slots in use at once.
            prefetch: `step` to fetch ahead within a step, `off` to fetch each page at its turn.
            counters: Where to count.
        """
        self.backend = backend
        self.resident = resident
        self.counters = counters
        self.peak_device_bytes = backend.device_bytes
        self._prefetch = prefetch
        self._staging_pages = staging_pages
        self._page_bytes = tuple(page_bytes)
        paged = [size for page, size in enumerate(page_bytes) if page not in resident]
        self._slot_bytes = max(paged, default=0)
        self._states = [
            PageState.RESIDENT if page in resident else PageState.HOST for page in range(len(page_bytes))
        ]
        self._clean: dict[int, Any] = {}
        self._free: deque[Slot] = deque()
        self._staged: dict[int, Slot] = {}
        self._spans: deque[tuple[str, Any, Any]] = deque()

    def run(self, live: Sequence[int], update: Update) -> None:
        """Update every live page once; returns when all work is enqueued.

        Args:
            live: Pages that have something to update, ascending; others are neither fetched nor written.
            update: Called once for each live page.

        Raises:
            Exception: Whatever `update` raises, after all copies have come to rest. Pages that were updated
                before stay updated; the page that failed keeps its state of before on the host.
        """
        todo = placement.order(live, self.resident)
        waiting = deque(page for page in todo if page not in self.resident)
        try:
            self._open_slots(len(waiting))
            self._fetch_ahead(waiting)
            for page in todo:
                if page in self.resident:
                    self._launch(page, self.backend.resident_buffer(page), update)
                    continue
                if page not in self._staged:
                    self._fetch(waiting.popleft())
                slot = self._staged[page]
                self.backend.streams.wait(Stream.COMPUTE, slot.filled, "R2")
                self._launch(page, slot.memory, update)
                self._write_back(page)
                self._fetch_ahead(waiting)
            self.backend.streams.join_caller()
        except BaseException:
            self._recover()
            raise
        self.reclaim()

    def reclaim(self) -> None:
        """Free the slots whose last copy has drained; call it whenever device memory matters."""
        for slot in [slot for slot in self._free if self.backend.streams.is_done(slot.drained, "R8")]:
            self._free.remove(slot)
            self.backend.give_back(slot.memory)

    def read_view(self, page: int) -> Tensor:
        """Buffer that holds the state of a page, safe for the host to read.

        Args:
            page: Number of the page.

        Returns:
            The resident buffer or the host slab; a view, never to be kept.
        """
        if page in self.resident:
            return self.backend.resident_buffer(page)
        if page in self._clean:
            self.backend.streams.synchronize(self._clean[page], "R7")
        return self.backend.host_buffer(page)

    def write_view(self, page: int) -> Tensor:
        """Buffer that the host may write a page into; call `fence` before the first one.

        Args:
            page: Number of the page.

        Returns:
            The resident buffer or the host slab.
        """
        return self.backend.resident_buffer(page) if page in self.resident else self.backend.host_buffer(page)

    def fence(self, rule: str = "R12") -> None:
        """Wait until no copy is under way.

        Args:
            rule: The ordering rule that asks for it.
        """
        streams = self.backend.streams
        for slot in (*self._staged.values(), *self._free):
            for event in (slot.filled, slot.drained):
                if event is not None:
                    streams.synchronize(event, rule)
        for event in self._clean.values():
            streams.synchronize(event, rule)

    def take_times(self) -> SpanTimes:
        """Sum the spans that have completed since the last call.

        Returns:
            Times by kind. No queue overlaps another yet, so the step waited for every copy.
        """
        times = SpanTimes()
        while self._spans:
            kind, start, stop = self._spans[0]
            spent = self.backend.streams.elapsed_ms(start, stop)
            if spent is None:
                break
            self._spans.popleft()
            setattr(times, kind, getattr(times, kind) + spent)
        times.exposed_ms = times.h2d_ms + times.d2h_ms
        return times

    def close(self) -> None:
        """Wait for everything, then free all memory."""
        self.fence("R8")
        for slot in (*self._staged.values(), *self._free):
            self.backend.give_back(slot.memory)
        self._free.clear()
        self._staged.clear()
        self._spans.clear()
        self.backend.close()

    def _move(self, page: int, state: PageState) -> None:
        before = self._states[page]
        assert state in _NEXT[before], f"page {page} cannot go from {before.value} to {state.value}"
        self._states[page] = state

    def _open_slots(self, num_pages: int) -> None:
        """Take as many slots as the step can use."""
        streams = self.backend.streams
        missing = min(num_pages, self._staging_pages) - len(self._free)
        for _ in range(missing):
            memory = self.backend.take_slot(self._slot_bytes)
            streams.wait(Stream.H2D, streams.record(Stream.COMPUTE), "R5")
            self._free.append(Slot(memory))
        self.peak_device_bytes = max(self.peak_device_bytes, self.backend.device_bytes)

    def _fetch_ahead(self, waiting: deque[int]) -> None:
        """Start copies for as many of the next pages as there are slots."""
        while self._prefetch == "step" and waiting and self._free:
            self._fetch(waiting.popleft())
            self.counters.prefetched_pages += 1

    def _fetch(self, page: int) -> None:
        """Start the copy of a page into a slot."""
        streams = self.backend.streams
        slot = self._free.popleft()
        if slot.drained is not None:
            streams.wait(Stream.H2D, slot.drained, "R1")
        if page in self._clean:
            streams.wait(Stream.H2D, self._clean[page], "R4")
        self._move(page, PageState.STAGED)
        self._staged[page] = slot
        start = streams.stamp(Stream.H2D)
        self.backend.copy_in(page, slot.memory)
        self._spans.append(("h2d_ms", start, streams.stamp(Stream.H2D)))
        slot.filled = streams.record(Stream.H2D)
        self.counters.h2d_bytes += self._page_bytes[page]
        self.counters.h2d_copies += 1
        self.counters.pages_fetched += 1

    def _launch(self, page: int, memory: Tensor, update: Update) -> None:
        streams = self.backend.streams
        buffer = memory[: self._page_bytes[page]]
        start = streams.stamp(Stream.COMPUTE)
        streams.submit(Stream.COMPUTE, lambda: update(page, buffer))
        self._spans.append(("kernel_ms", start, streams.stamp(Stream.COMPUTE)))
        self.counters.launches += 1

    def _write_back(self, page: int) -> None:
        """Start the copy of an updated page to the host; the slot is free for a copy in that waits for it."""
        streams = self.backend.streams
        slot = self._staged.pop(page)
        self._move(page, PageState.UPDATED)
        streams.wait(Stream.D2H, streams.record(Stream.COMPUTE), "R3")
        start = streams.stamp(Stream.D2H)
        self.backend.copy_out(page, slot.memory)
        self._spans.append(("d2h_ms", start, streams.stamp(Stream.D2H)))
        slot.drained = self._clean[page] = streams.record(Stream.D2H)
        self._move(page, PageState.HOST)
        self._free.append(slot)
        self.counters.d2h_bytes += self._page_bytes[page]
        self.counters.d2h_copies += 1
        self.counters.pages_written += 1

    def _recover(self) -> None:
        """After an exception: let everything come to rest and forget the pages in slots."""
        self.backend.streams.join_caller()
        self.fence("R12")
        for page, slot in self._staged.items():
            self._move(page, PageState.HOST)
            self.backend.give_back(slot.memory)
        self._staged.clear()
        for slot in self._free:
            self.backend.give_back(slot.memory)
        self._free.clear()
