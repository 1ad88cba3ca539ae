"""Every wait of the pager is needed, and together they are enough: 1,000 random orders of execution.

Each run does six steps over pages that partly rest on the host, in an order that changes, with reads,
loads, an exception and a close in between, and compares every page with what it must hold. Leaving one
rule's waits out must be noticed.
"""

from __future__ import annotations

import random

import pytest
import torch
from optim_streams import AdversarialStreams, PoisonedBackend
from torch import Tensor

from qlora_cli.optim import placement
from qlora_cli.optim.backend import Stream
from qlora_cli.optim.pager import Pager
from qlora_cli.optim.telemetry import PagingCounters

RULES = ("R1", "R2", "R3", "R4", "R5", "R7", "R8", "R12")
SHAPES = ((6, 1, 2), (5, 0, 3), (3, 0, 4), (7, 2, 4))  # pages, of them resident, slots


class Mismatch(AssertionError):
    """A page, or memory of the caller, does not hold what it must."""


class Torture:
    """One pager and a plain list of what each page must hold."""

    def __init__(self, seed: int, drop: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        num_pages, num_resident, slots = SHAPES[seed % len(SHAPES)]
        self.sizes = [16 + 4 * (page % 3) for page in range(num_pages)]
        self.streams = AdversarialStreams(seed, drop)
        resident = frozenset(range(num_resident))
        self.backend = PoisonedBackend(self.sizes, resident, torch.device("cpu"), self.streams)
        self.pager = Pager(
            self.backend,
            self.sizes,
            resident,
            staging_pages=slots,
            prefetch=self.random.choice(("step", "step", "off")),
            counters=PagingCounters(),
        )
        self.expected = [torch.zeros(size // 4, dtype=torch.int32) for size in self.sizes]
        monkeypatch.setattr(placement, "order", lambda live, _: self.random.sample(live, len(live)))

    def step(self, number: int, fail_in: int = 0) -> None:
        reader = self._use_device_memory()
        live = [page for page in range(len(self.sizes)) if self.random.random() < 0.9]
        self.streams.fail_in = fail_in
        launched: list[int] = []

        def advance(page: int, buffer: Tensor) -> None:
            buffer.view(torch.int32).mul_(3).add_(page + 10 * number)

        original = self.pager._launch
        self.pager._launch = lambda page, *rest: (original(page, *rest), launched.append(page))  # type: ignore[method-assign]
        try:
            self.pager.run(live, advance)
        except RuntimeError as error:
            assert str(error) == "injected"  # noqa: PT017
        self.pager._launch = original  # type: ignore[method-assign]
        self.streams.fail_in = 0
        for page in launched:
            self.expected[page].mul_(3).add_(page + 10 * number)
        if reader:
            raise Mismatch("memory of the caller was overwritten under its kernel")

    def _use_device_memory(self) -> list[bool]:
        """Free an activation that a kernel under way still reads."""
        activation = self.backend.lend(max(self.sizes))
        activation.fill_(1)
        wrong: list[bool] = []

        def read() -> None:
            if bool((activation != 1).any()):
                wrong.append(True)

        self.streams.submit(Stream.COMPUTE, read)
        self.backend.pool.append(activation)
        return wrong

    def check(self) -> None:
        for page in self.random.sample(range(len(self.sizes)), len(self.sizes)):
            if not torch.equal(self.pager.read_view(page).view(torch.int32), self.expected[page]):
                raise Mismatch(f"page {page}")

    def load(self) -> None:
        self.pager.fence()
        for page, wanted in enumerate(self.expected):
            wanted.fill_(page)
            self.pager.write_view(page).view(torch.int32).copy_(wanted)

    def close(self) -> None:
        self.pager.close()
        if self.backend.touched_after_free:
            raise Mismatch("memory was written after it was freed")


def run_one(seed: int, drop: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torture = Torture(seed, drop, monkeypatch)
    dice = torture.random
    for number in range(6):
        torture.step(number, fail_in=dice.choice((0, 0, 0, 2, 4)))
        what = dice.choice(("go on", "go on", "check", "load"))
        if what == "check":
            torture.check()
        elif what == "load":
            torture.load()
    if dice.random() < 0.5:
        torture.check()
    torture.close()


def test_a_thousand_random_orders_of_execution_give_the_right_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000):
        run_one(seed, frozenset(), monkeypatch)


@pytest.mark.parametrize("rule", RULES)
def test_leaving_one_rule_out_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000):
        try:
            run_one(seed, frozenset({rule}), monkeypatch)
        except Mismatch:
            return
    pytest.fail(f"no order of execution needs {rule}")
