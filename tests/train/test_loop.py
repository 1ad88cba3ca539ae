"""The loop on a tiny Llama: what a step may and may not depend on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from qlora_cli.data.collate import Batch, collate
from qlora_cli.data.sources import Origin
from qlora_cli.data.templates import Tokenized
from qlora_cli.errors import RunError
from qlora_cli.model.loss import training_loss
from qlora_cli.optim.paged_adamw import PagedAdamW
from qlora_cli.train.loop import Hooks, LoopSettings, StopSignal, run_steps
from qlora_cli.train.metrics import StepMetrics
from qlora_cli.train.schedule import Schedule
from qlora_cli.train.steps import StepPlan


def examples(count: int) -> list[Tokenized]:
    """Sequences of very different lengths, with between 1 and all tokens supervised."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for row in range(count):
        length = 3 + 7 * row
        ids = torch.randint(4, 300, (length,), generator=draw).tolist()
        found.append(
            Tokenized(ids, [-100] * (1 + row) + ids[1 + row :], Origin("rows.jsonl", row + 1), "rows")
        )
    return found


class Run:
    """One training of the embedding-free part of a tiny Llama, with its records."""

    def __init__(
        self, model: Any, micro_batches: Sequence[Sequence[int]], window: int, steps: int = 2
    ) -> None:
        self.model = model
        self.data = examples(6)
        self.records: list[StepMetrics] = []
        self.saved: list[int] = []
        self.poison: int | None = None
        self.evaluate: Callable[[int], dict[str, Any]] | None = None
        self.stop = StopSignal()
        self.plan = StepPlan(lambda epoch: micro_batches, window, len(micro_batches), steps)

    def go(self, *, max_grad_norm: float = 1.0, rate: float = 1e-2, save_every: int = 100) -> Run:
        self.model.requires_grad_(False)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("proj" in name)
        optimizer = PagedAdamW([p for p in self.model.parameters() if p.requires_grad], state_bits=32)
        run_steps(
            self.model,
            optimizer,
            Accelerator(cpu=True),
            self.plan,
            Schedule("constant", self.plan.total_steps),
            LoopSettings(rate, max_grad_norm, None if self.evaluate is None else 1, save_every),
            Hooks(self.batch, self.loss, self.evaluate, self.saved.append, self.records.append),
            steps_done=0,
            stop=self.stop,
        )
        return self

    def batch(self, indices: Sequence[int]) -> Batch:
        return collate([self.data[i] for i in indices], pad_token_id=0)

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        rows = {origin.row for origin in batch.origins}
        return training_loss(model, batch) * (math.nan if self.poison in rows else 1.0)


@pytest.mark.parametrize(
    "split", [[[0], [1], [2], [3], [4], [5]], [[0, 1], [2, 3, 4, 5]], [[5, 4, 3], [2, 1, 0]]]
)
def test_loss_and_gradient_of_a_step_do_not_depend_on_the_split_into_micro_batches(
    tiny_llama: Callable[..., Any], split: list[list[int]]
) -> None:
    whole = Run(tiny_llama(), [[0, 1, 2, 3, 4, 5]], window=1).go()
    parts = Run(tiny_llama(), split, window=len(split)).go()
    for one, other in zip(whole.records, parts.records, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert (one.tokens, one.supervised_tokens) == (other.tokens, other.supervised_tokens)


def test_the_loss_of_a_step_is_the_models_own_loss_over_the_same_tokens(
    tiny_llama: Callable[..., Any],
) -> None:
    run = Run(tiny_llama(), [[3]], window=1, steps=1)
    model, batch = tiny_llama(), run.batch([3])
    expected = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
    assert run.go().records[0].loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_short_last_window_is_divided_by_what_it_holds(tiny_llama: Callable[..., Any]) -> None:
    short = Run(tiny_llama(), [[0], [1], [2]], window=4, steps=1).go()
    full = Run(tiny_llama(), [[0, 1, 2]], window=1, steps=1).go()
    assert short.records[0].loss == pytest.approx(full.records[0].loss, rel=1e-5)
    assert short.records[0].grad_norm == pytest.approx(full.records[0].grad_norm, rel=1e-4)


def test_clipping_bounds_the_step_and_the_reported_norm_is_the_one_before(
    tiny_llama: Callable[..., Any],
) -> None:
    free = Run(tiny_llama(), [[0, 1]], window=1, steps=1).go(max_grad_norm=0.0)
    clipped = Run(tiny_llama(), [[0, 1]], window=1, steps=1).go(max_grad_norm=1e-3)
    assert clipped.records[0].grad_norm == free.records[0].grad_norm > 1e-3


def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_rows(
    tiny_llama: Callable[..., Any],
) -> None:
    run = Run(tiny_llama(), [[0, 1], [2, 3]], window=1)
    run.poison = 4
    with pytest.raises(RunError, match=r"step 2.*rows\.jsonl:3.*rows\.jsonl:4"):
        run.go()
    one_step = Run(tiny_llama(), [[0, 1], [2, 3]], window=1, steps=1).go()
    for ours, theirs in zip(run.model.parameters(), one_step.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_stop_signal_ends_the_run_after_the_step_with_a_checkpoint(tiny_llama: Callable[..., Any]) -> None:
    run = Run(tiny_llama(), [[0], [1], [2]], window=1, steps=3)
    run.stop.name = "SIGINT"
    run.go()
    assert (run.saved, len(run.records)) == ([1], 1)


def test_checkpoints_come_at_the_interval_at_the_best_evaluation_and_at_the_end(
    tiny_llama: Callable[..., Any],
) -> None:
    run = Run(tiny_llama(), [[0]], window=1, steps=7)
    run.evaluate = lambda step: {"eval_loss": 1.0, "eval_is_best": step == 5}
    run.go(save_every=3)
    assert run.saved == [3, 5, 6, 7]
    assert all(record.eval for record in run.records)
