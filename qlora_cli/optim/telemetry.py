"""What paging did and what it cost: counters, the record of a step, the line for people. No torch.

Bytes and counts are exact. Times are spans measured where the work ran: by the clock on a CPU, where a copy
is entirely visible to the step, and by event pairs on a GPU, which are read when they have completed, so
that reading them never makes a step wait; there the times of a record may belong to the step before.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from qlora_cli.optim.pages import MIB


@dataclass(slots=True)
class PagingCounters:
    """Monotonic counts since the optimizer was made.

    Attributes:
        h2d_bytes: Bytes copied to the device.
        d2h_bytes: Bytes copied to the host.
        h2d_copies: Copies to the device.
        d2h_copies: Copies to the host.
        pages_fetched: Pages brought into a slot; proves that paging ran.
        pages_written: Pages written back from a slot.
        prefetched_pages: Pages whose fetch was started before their turn.
        launches: Pages handed to a kernel.
        evictions: Resident pages given up.
        nonfinite_elements: Elements with a gradient that is not finite.
        zero_v_elements: 8-bit elements whose second moment rounded to 0 while the first did not.
        fallbacks: Things that could not be had as asked, such as pinned memory.
    """

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    h2d_copies: int = 0
    d2h_copies: int = 0
    pages_fetched: int = 0
    pages_written: int = 0
    prefetched_pages: int = 0
    launches: int = 0
    evictions: int = 0
    nonfinite_elements: int = 0
    zero_v_elements: int = 0
    fallbacks: int = 0

    def since(self, earlier: PagingCounters) -> PagingCounters:
        """Count what was added since an earlier copy.

        Args:
            earlier: A copy taken before.

        Returns:
            The differences.
        """
        before = asdict(earlier)
        return PagingCounters(**{name: value - before[name] for name, value in asdict(self).items()})


@dataclass(slots=True)
class SpanTimes:
    """Milliseconds by kind of work, summed.

    Attributes:
        h2d_ms: Copies to the device.
        d2h_ms: Copies to the host.
        kernel_ms: Updates.
        exposed_ms: The part of the copies that the step had to wait for.
    """

    h2d_ms: float = 0.0
    d2h_ms: float = 0.0
    kernel_ms: float = 0.0
    exposed_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class StateSize:
    """How large the state is and where it lies.

    Attributes:
        backend: Name of the backend.
        kernel: Name of the kernel.
        emulated: True where the device memory is emulated in the same RAM, so a budget saves nothing.
        state_bytes: All pages.
        resident_bytes: Pages on the device between steps.
        pages: Number of pages.
        resident_pages: Pages on the device between steps.
        device_peak_bytes: Most device bytes that state and slots held at once.
    """

    backend: str
    kernel: str
    emulated: bool
    state_bytes: int
    resident_bytes: int
    pages: int
    resident_pages: int
    device_peak_bytes: int


def step_record(size: StateSize, moved: PagingCounters, times: SpanTimes, step_ms: float) -> dict[str, Any]:
    """Make the `paging` object of one step in `metrics.jsonl`.

    Args:
        size: Where the state lies.
        moved: Counts of this step.
        times: Times of this step.
        step_ms: The whole training step: forward, backward and update.

    Returns:
        The record. `overlap` is the share of copying time that no one waited for, None when nothing moved.
    """
    busy = times.h2d_ms + times.d2h_ms
    return {
        "backend": size.backend,
        "kernel": size.kernel,
        "emulated": size.emulated,
        "state_mib": size.state_bytes / MIB,
        "resident_mib": size.resident_bytes / MIB,
        "pages": size.pages,
        "resident_pages": size.resident_pages,
        "device_peak_mib": size.device_peak_bytes / MIB,
        "h2d_mib": moved.h2d_bytes / MIB,
        "d2h_mib": moved.d2h_bytes / MIB,
        "h2d_ms": times.h2d_ms,
        "d2h_ms": times.d2h_ms,
        "kernel_ms": times.kernel_ms,
        "exposed_ms": times.exposed_ms,
        "step_ms": step_ms,
        "cost_pct": 100.0 * times.exposed_ms / step_ms if step_ms > 0 else 0.0,
        "overlap": 1.0 - times.exposed_ms / busy if busy > 0 else None,
        "prefetched_pages": moved.prefetched_pages,
        "evictions": moved.evictions,
        "nonfinite": moved.nonfinite_elements,
        "zero_v": moved.zero_v_elements,
    }


@dataclass(slots=True)
class RunTotals:
    """What paging cost over a run, for the line at its end.

    Attributes:
        step_ms: Training time.
        exposed_ms: Of it, waiting for pages.
        moved_mib: Traffic both ways.
        evictions: Resident pages given up.
        last: The record of the last step.
    """

    step_ms: float = 0.0
    exposed_ms: float = 0.0
    moved_mib: float = 0.0
    evictions: int = 0
    last: dict[str, Any] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """Add one step.

        Args:
            record: What `step_record` made.
        """
        self.step_ms += record["step_ms"]
        self.exposed_ms += record["exposed_ms"]
        self.moved_mib += record["h2d_mib"] + record["d2h_mib"]
        self.evictions += record["evictions"]
        self.last = record

    def line(self) -> str:
        """Say in one line what paging cost, in words that are true for one step or a whole run."""
        if not self.last:
            return "paging idle (no step was made)"
        state, resident = self.last["state_mib"], self.last["resident_mib"]
        note = ", device memory emulated" if self.last["emulated"] else ""
        if self.moved_mib == 0:
            return f"paging idle (all {_mib(state)} resident{note})"
        cost = 100.0 * self.exposed_ms / self.step_ms if self.step_ms > 0 else 0.0
        host = _mib(state - resident)
        return f"paging cost {cost:.1f}% of step time · {host} on host{note} · {self.evictions} evictions"


def human_line(record: dict[str, Any]) -> str:
    """Say in one line what paging cost in one step.

    Args:
        record: What `step_record` made.

    Returns:
        Such as `paging cost 0.2% of step time · 81 MiB on host · 0 evictions`.
    """
    one = RunTotals()
    one.add(record)
    return one.line()


def _mib(value: float) -> str:
    return f"{value:.0f} MiB" if value >= 10 else f"{value:.1f} MiB"
