"""Memory that pages lie in, and the copies between: `resident` and `host`.

A backend owns slabs and moves bytes; which page moves when is the pager's business, and what the bytes
mean is the kernels'. Everything that can run at another time than it is called goes through `Streams`:
`InlineStreams` runs it at once (CPU), `CudaStreams` enqueues it on the caller's current CUDA stream, and a
test may put in streams that run it in any order the events allow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Stream(Enum):
    """Queues of work; within one queue the order is kept, between queues only events order."""

    COMPUTE = "compute"  # the caller's: backward, clipping, kernels
    H2D = "h2d"
    D2H = "d2h"


class Streams(Protocol):
    """Work queues and the events between them."""

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        """Append work to a queue."""

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Append a copy of equally long byte tensors to a queue."""

    def record(self, stream: Stream) -> Any:
        """Append an event that completes when everything before it in the queue has run."""

    def wait(self, stream: Stream, event: Any, rule: str) -> None:
        """Make a queue wait for an event; `rule` names the ordering rule that asks for it."""

    def synchronize(self, event: Any, rule: str) -> None:
        """Make the host wait for an event."""

    def is_done(self, event: Any, rule: str) -> bool:
        """Tell whether an event has completed, without waiting."""

    def join_caller(self) -> None:
        """Order the caller's next work after everything on `COMPUTE`."""

    def stamp(self, stream: Stream) -> Any:
        """Append a time stamp to a queue."""

    def elapsed_ms(self, start: Any, stop: Any) -> float | None:
        """Milliseconds between two stamps, or None while they have not both run."""


class InlineStreams:
    """Runs everything when it is called: one thread, no overlap, every event complete."""

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        """Run the work."""
        work()

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def record(self, stream: Stream) -> bool:
        """Return an event that is complete."""
        return True

    def wait(self, stream: Stream, event: Any, rule: str) -> None:
        """Nothing is ever under way."""

    def synchronize(self, event: Any, rule: str) -> None:
        """Nothing is ever under way."""

    def is_done(self, event: Any, rule: str) -> bool:
        """Every event is complete."""
        return True

    def join_caller(self) -> None:
        """The caller's thread ran it."""

    def stamp(self, stream: Stream) -> float:
        """Read the clock, in seconds."""
        return time.perf_counter()

    def elapsed_ms(self, start: float, stop: float) -> float | None:
        """Milliseconds between two clock readings."""
        return (stop - start) * 1e3


class CudaStreams:
    """Puts everything on the current CUDA stream: ordered by the stream itself, so nothing overlaps yet."""

    def __init__(self, device: torch.device) -> None:
        """Remember the device.

        Args:
            device: The CUDA device of the parameters.
        """
        self.device = device

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        """Enqueue the work on the current stream."""
        work()

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Enqueue the copy on the current stream; it blocks the host only where memory is not pinned."""
        target.copy_(source, non_blocking=True)

    def record(self, stream: Stream) -> torch.Event:
        """Record an event on the current stream."""
        event = torch.Event(self.device)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, stream: Stream, event: torch.Event, rule: str) -> None:
        """Make the current stream wait; it matters where the caller changed streams between steps."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def synchronize(self, event: torch.Event, rule: str) -> None:
        """Block the host until the event completed."""
        event.synchronize()

    def is_done(self, event: torch.Event, rule: str) -> bool:
        """Query the event."""
        return bool(event.query())

    def join_caller(self) -> None:
        """The caller's stream is the compute stream."""

    def stamp(self, stream: Stream) -> torch.Event:
        """Record a timing event on the current stream."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def elapsed_ms(self, start: torch.Event, stop: torch.Event) -> float | None:
        """Milliseconds between two events, None while one is still to come."""
        return float(start.elapsed_time(stop)) if start.query() and stop.query() else None


class Backend(Protocol):
    """Where pages lie, and how they get to where a kernel can reach them."""

    name: str
    streams: Streams
    fallbacks: list[str]
    """One line for everything that could not be had as asked."""

    def resident_buffer(self, page: int) -> Tensor:
        """Device slab of a page that is resident."""

    def host_buffer(self, page: int) -> Tensor:
        """Host slab of a page that is not resident."""

    def take_slot(self, num_bytes: int) -> Tensor:
        """Allocate a device slot for pages in flight."""

    def give_back(self, memory: Tensor) -> None:
        """Free a slot or a slab; everything that touched it has completed."""

    def copy_in(self, page: int, slot: Tensor) -> None:
        """Enqueue host slab to slot."""

    def copy_out(self, page: int, slot: Tensor) -> None:
        """Enqueue slot to host slab."""

    @property
    def device_bytes(self) -> int:
        """Device bytes held for state now: resident slabs and slots."""

    def close(self) -> None:
        """Free everything; the caller has waited for every event."""


class ResidentBackend:
    """State lies on the parameters' device for good; nothing moves. The baseline of every test."""

    name = "resident"

    def __init__(self, page_bytes: Sequence[int], device: torch.device, streams: Streams) -> None:
        """Allocate every page, zeroed.

        Args:
            page_bytes: Bytes of every page, by number.
            device: The parameters' device.
            streams: Work queues of that device.
        """
        self.streams = streams
        self.fallbacks: list[str] = []
        self._slabs = [torch.zeros(size, dtype=torch.uint8, device=device) for size in page_bytes]
        self.device_bytes = sum(page_bytes)

    def resident_buffer(self, page: int) -> Tensor:
        """Device slab of a page."""
        return self._slabs[page]

    def host_buffer(self, page: int) -> Tensor:
        """No page lies on the host."""
        raise RuntimeError(f"page {page} is resident; backend resident has no host slabs")

    def take_slot(self, num_bytes: int) -> Tensor:
        """Nothing moves, so nothing needs a slot."""
        raise RuntimeError("backend resident moves no page")

    def give_back(self, memory: Tensor) -> None:
        """Nothing was lent."""
        raise RuntimeError("backend resident moves no page")

    def copy_in(self, page: int, slot: Tensor) -> None:
        """Nothing moves."""
        raise RuntimeError("backend resident moves no page")

    def copy_out(self, page: int, slot: Tensor) -> None:
        """Nothing moves."""
        raise RuntimeError("backend resident moves no page")

    def close(self) -> None:
        """Free the slabs."""
        self._slabs = []
        self.device_bytes = 0


class HostBackend:
    """State rests in host memory, a fixed part of it on the device; pages really move between the two.

    On a CPU the "device" is a second set of allocations in the same RAM. Slabs for 100 % of the state are
    allocated once, so giving up device memory later needs no allocation.
    """

    name = "host"

    def __init__(
        self,
        page_bytes: Sequence[int],
        resident: frozenset[int],
        device: torch.device,
        streams: Streams,
    ) -> None:
        """Allocate host slabs for all pages and device slabs for the resident ones, zeroed.

        Args:
            page_bytes: Bytes of every page, by number.
            resident: Pages that lie on the device.
            device: The parameters' device.
            streams: Work queues of that device.
        """
        self.streams = streams
        self.fallbacks: list[str] = []
        self.device = device
        self.device_bytes = 0
        self._host: list[Tensor] = [self._host_slab(size) for size in page_bytes]
        self._resident = {page: self._device_slab(page_bytes[page]).zero_() for page in sorted(resident)}

    def _pin(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _host_slab(self, num_bytes: int) -> Tensor:
        """A zeroed slab, pinned where a GPU reads it and pinning works."""
        if self.device.type == "cuda" and not self.fallbacks:
            try:
                return self._pin(num_bytes)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                self.fallbacks.append(f"host memory cannot be pinned ({reason}); pageable memory is used")
                logger.warning(self.fallbacks[-1])
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def _device_slab(self, num_bytes: int) -> Tensor:
        self.device_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def resident_buffer(self, page: int) -> Tensor:
        """Device slab of a page that is resident."""
        return self._resident[page]

    def host_buffer(self, page: int) -> Tensor:
        """Host slab of a page; it holds the state only while the page is not resident."""
        return self._host[page]

    def take_slot(self, num_bytes: int) -> Tensor:
        """Allocate a device slot."""
        return self._device_slab(num_bytes)

    def give_back(self, memory: Tensor) -> None:
        """Return a slot to the device's allocator."""
        self.device_bytes -= memory.numel()

    def copy_in(self, page: int, slot: Tensor) -> None:
        """Enqueue host slab to slot."""
        slab = self._host[page]
        self.streams.copy(Stream.H2D, slot[: slab.numel()], slab)

    def copy_out(self, page: int, slot: Tensor) -> None:
        """Enqueue slot to host slab."""
        slab = self._host[page]
        self.streams.copy(Stream.D2H, slab, slot[: slab.numel()])

    def close(self) -> None:
        """Free all slabs."""
        self._host = []
        self._resident = {}
        self.device_bytes = 0


def make_streams(device: torch.device) -> Streams:
    """Make the work queues of a device.

    Args:
        device: The parameters' device.

    Returns:
        Queues on the current CUDA stream, or queues that run everything at once.
    """
    return CudaStreams(device) if device.type == "cuda" else InlineStreams()
