"""Queues that run in any order the events allow, over memory that shows when it is used wrongly.

`AdversarialStreams` keeps three queues of work and runs them only when something waits for a result,
picking at random. A copy runs in two halves, so that a reader between them sees a torn page. `drop`
names the rules whose waits are left out. `PoisonedBackend` fills device memory that nobody owns with
0xFF: NaN as fp32, the code of the largest value as 8-bit state.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qlora_cli.optim.backend import HostBackend, Stream

POISON = 0xFF


class AdversarialStreams:
    def __init__(self, seed: int, drop: frozenset[str] = frozenset()) -> None:
        self._random = random.Random(seed)
        self._drop = drop
        self._queues: dict[Stream, deque[tuple[str, Any]]] = {stream: deque() for stream in Stream}
        self._done: set[int] = set()
        self._events = 0
        self.fail_in = 0  # the how-manieth launch from now raises; 0 for none

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        if stream is Stream.COMPUTE and self.fail_in > 0:
            self.fail_in -= 1
            if self.fail_in == 0:
                raise RuntimeError("injected")
        self._queues[stream].append(("work", work))
        self._run_some()

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        half = target.numel() // 2
        for part in (slice(0, half), slice(half, None)):
            self._queues[stream].append(("work", lambda part=part: target[part].copy_(source[part])))
        self._run_some()

    def record(self, stream: Stream) -> int:
        self._events += 1
        self._queues[stream].append(("record", self._events))
        return self._events

    def wait(self, stream: Stream, event: int, rule: str) -> None:
        if rule not in self._drop:
            self._queues[stream].append(("wait", event))

    def synchronize(self, event: int, rule: str) -> None:
        while rule not in self._drop and event not in self._done:
            self._step()

    def is_done(self, event: int, rule: str) -> bool:
        return rule in self._drop or event in self._done

    def join_caller(self) -> None:
        while self._queues[Stream.COMPUTE]:
            self._step()

    def stamp(self, stream: Stream) -> float:
        return 0.0

    def elapsed_ms(self, start: float, stop: float) -> float:
        return 0.0

    def finish(self) -> None:
        """Run all that is left, in any order; a queue that waits for nothing that can come is a deadlock."""
        while any(self._queues.values()):
            self._step()

    def _run_some(self) -> None:
        for _ in range(self._random.choice((0, 0, 1, 3))):
            if any(self._queues.values()):
                self._step()

    def _step(self) -> None:
        heads = [stream for stream, queue in self._queues.items() if queue]
        ready = [s for s in heads if self._queues[s][0][0] != "wait" or self._queues[s][0][1] in self._done]
        assert ready, "every queue waits for another"
        kind, what = self._queues[self._random.choice(ready)].popleft()
        if kind == "work":
            what()
        elif kind == "record":
            self._done.add(what)


class PoisonedBackend(HostBackend):
    """A host backend whose device allocator hands freed memory out again at once, as a caching one does."""

    streams: AdversarialStreams

    def __init__(self, *arguments: Any) -> None:
        self.pool: list[Tensor] = []
        self.touched_after_free = 0
        super().__init__(*arguments)

    def lend(self, num_bytes: int) -> Tensor:
        """Device memory for the caller's own use, such as an activation."""
        for index, memory in enumerate(self.pool):
            if memory.numel() >= num_bytes:
                return self.pool.pop(index)
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def take_slot(self, num_bytes: int) -> Tensor:
        self.device_bytes += num_bytes
        memory = self.lend(num_bytes)
        if memory.numel() > num_bytes:
            memory = memory[:num_bytes]
        return memory

    def copy_out(self, page: int, slot: Tensor) -> None:
        super().copy_out(page, slot)
        self.streams.submit(Stream.D2H, lambda: slot.fill_(POISON))

    def give_back(self, memory: Tensor) -> None:
        super().give_back(memory)
        memory.fill_(POISON)
        self.pool.append(memory)

    def close(self) -> None:
        """Free everything, then let what is still queued run and see whether it touched freed memory."""
        freed = [*self._host, *self.pool]
        super().close()
        for memory in freed:
            memory.fill_(POISON)
        self.streams.finish()
        self.touched_after_free += sum(bool((memory != POISON).any()) for memory in freed)
