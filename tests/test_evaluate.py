from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from qlora_cli.data.collate import Batch, collate
from qlora_cli.data.sources import Origin
from qlora_cli.data.templates import Tokenized
from qlora_cli.evaluate import (
    EvalSource,
    LossSum,
    Question,
    evaluate_adapter,
    is_exact,
    loss_over,
    without_adapter,
)
from qlora_cli.generate import generate
from qlora_cli.model.load import QuantizationSpec, load_base
from qlora_cli.model.lora import LoraSpec, attach

LENGTHS = (5, 31, 8, 19, 12)
SUMMED = 2**-18  # relative; the same fp32 terms added in another order and in matmuls of other shapes


def examples() -> list[Tokenized]:
    """Five examples of very different length; of each the last third is supervised."""
    draw = torch.Generator().manual_seed(2)
    made = []
    for row, length in enumerate(LENGTHS, 1):
        ids = torch.randint(4, 320, (length,), generator=draw).tolist()
        start = length - max(length // 3, 1)
        made.append(Tokenized(ids, [-100] * start + ids[start:], Origin("val.jsonl", row), "val"))
    return made


def batches(size: int) -> list[Batch]:
    made = examples()
    return [collate(made[start : start + size], 0) for start in range(0, len(made), size)]


@pytest.fixture
def adapted(tiny_model_dir: Path) -> Any:
    """A quantised base with an adapter that changes its answers."""
    base = load_base(str(tiny_model_dir), None, QuantizationSpec("nf4", True, "fp32"), "sdpa", "cpu", False)
    model = attach(base, LoraSpec(rank=4, alpha=8, dropout=0.2), seed=0)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    return model


def reference(model: Any) -> tuple[float, int]:
    """Sum and number over single rows, without padding or batches."""
    total, number = 0.0, 0
    model.eval()
    with torch.no_grad():
        for example in examples():
            logits = model(torch.tensor([example.input_ids])).logits[0, :-1]
            labels = torch.tensor(example.labels)[1:]
            total += float(functional.cross_entropy(logits, labels, reduction="sum"))
            number += int((labels != -100).sum())
    return total, number


class TestLoss:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
    def test_it_is_the_same_at_any_batch_size_and_padding(self, adapted: Any, size: int) -> None:
        found = loss_over(adapted, batches(size))
        total, number = reference(adapted)
        assert (found.tokens, found.examples) == (number, 5)
        assert found.loss_sum == pytest.approx(total, rel=SUMMED)
        assert found.loss == pytest.approx(total / number, rel=SUMMED)
        assert found.perplexity == pytest.approx(math.exp(total / number), rel=SUMMED * 10)

    def test_it_weights_tokens_and_not_batches(self, adapted: Any) -> None:
        parts = [loss_over(adapted, [batch]) for batch in batches(4)]
        together = loss_over(adapted, batches(4))
        assert sum(parts, LossSum()).loss == pytest.approx(together.loss, rel=SUMMED)
        assert (
            abs(sum(part.loss for part in parts) / 2 - together.loss) > 1e-3
        )  # the mean of means is another

    def test_it_reads_batches_one_at_a_time(self, adapted: Any) -> None:
        def stream() -> Iterable[Batch]:
            yield from batches(2)

        assert loss_over(adapted, stream()) == loss_over(adapted, batches(2))

    def test_nothing_to_measure_is_not_a_number_and_a_huge_loss_is_infinite_perplexity(self) -> None:
        assert math.isnan(LossSum().loss)
        assert LossSum(1e9, 1, 1).perplexity == math.inf

    def test_the_model_comes_back_as_it_was(self, adapted: Any) -> None:
        adapted.train()
        adapted.get_base_model().model.layers[0].eval()
        modes = [module.training for module in adapted.modules()]
        wanted = [p.requires_grad for p in adapted.parameters()]
        state = torch.get_rng_state()
        with without_adapter(adapted):
            loss_over(adapted, batches(2))
        assert [module.training for module in adapted.modules()] == modes
        assert [p.requires_grad for p in adapted.parameters()] == wanted
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled()

    def test_the_model_comes_back_after_an_error_too(self, adapted: Any) -> None:
        adapted.train()

        def broken() -> Iterable[Batch]:
            raise RuntimeError("no more")
            yield

        with pytest.raises(RuntimeError, match="no more"), without_adapter(adapted):
            loss_over(adapted, broken())
        assert adapted.training
        assert torch.is_grad_enabled()
        assert any(p.requires_grad for p in adapted.parameters())


class TestEvaluation:
    def evaluation(self, model: Any, tokenizer: Any, sources: list[EvalSource], **changes: Any) -> Any:
        return evaluate_adapter(
            model, tokenizer, sources, **({"max_new_tokens": 8, "batch_size": 3} | changes)
        )

    def questions(self, answers: list[str]) -> list[Question]:
        return [
            Question(f"question {number}", [5, 20 + number, 9], answer)
            for number, answer in enumerate(answers)
        ]

    def test_base_and_adapter_stand_side_by_side(
        self, adapted: Any, tiny_model_dir: Path, tiny_tokenizer: Any
    ) -> None:
        plain = load_base(
            str(tiny_model_dir), None, QuantizationSpec("nf4", True, "fp32"), "sdpa", "cpu", False
        )
        document = self.evaluation(adapted, tiny_tokenizer, [EvalSource("val", batches(2))]).as_json()
        assert document["loss"] == loss_over(adapted, batches(2)).loss
        assert document["base"]["loss"] == loss_over(plain, batches(2)).loss
        assert document["base"]["loss"] != document["loss"]
        assert document["base"]["perplexity"] == pytest.approx(math.exp(document["base"]["loss"]))
        assert (document["tokens"], document["examples"]) == (sum(length // 3 for length in LENGTHS), 5)
        assert document["samples"] == []
        assert "exact_match" not in document
        assert document["sources"]["val"]["loss"] == document["loss"]
        json.dumps(document, allow_nan=False)

    def test_sources_are_scored_apart_and_together(self, adapted: Any, tiny_tokenizer: Any) -> None:
        prompts = [q.prompt_ids for q in self.questions([""] * 4)]
        right = generate(adapted, tiny_tokenizer, prompts, 8, 4)
        with without_adapter(adapted):
            base = generate(adapted, tiny_tokenizer, prompts, 8, 4)
        assert not set(right) & set(base)
        expected = [f" {right[0]}\n", right[1], base[2], "something else"]
        sources = [
            EvalSource("seen", batches(3)[:1], self.questions(expected), exact_match=True),
            EvalSource("unseen", batches(3)[1:], self.questions([right[0]]), exact_match=True),
            EvalSource("free", [], self.questions(["x"])),
        ]
        found = self.evaluation(adapted, tiny_tokenizer, sources, num_samples=2)
        document = found.as_json()
        assert document["sources"]["seen"]["exact_match"] == 2 / 4
        assert document["sources"]["seen"]["base"]["exact_match"] == 1 / 4
        assert document["sources"]["unseen"]["exact_match"] == 1
        assert "exact_match" not in document["sources"]["free"]
        assert document["exact_match"] == 3 / 5
        assert document["base"]["exact_match"] == 1 / 5
        both = loss_over(adapted, batches(3))
        assert document["loss"] == pytest.approx(both.loss, rel=SUMMED)
        assert document["sources"]["free"]["loss"] is None
        assert [sample["prompt"] for sample in document["samples"]] == ["question 0", "question 1"]
        assert document["samples"][0] == {
            "source": "seen", "prompt": "question 0", "expected": expected[0], "base": base[0], "adapter":
                right[0],
        }  # fmt: skip
        assert len(found.answers) == 5

    def test_without_a_scored_source_the_first_questions_are_samples(
        self, adapted: Any, tiny_tokenizer: Any
    ) -> None:
        source = EvalSource("free", batches(5), self.questions(["a", "b", "c", "d"]))
        found = self.evaluation(adapted, tiny_tokenizer, [source], num_samples=2)
        assert [sample.expected for sample in found.samples] == ["a", "b"]
        assert found.answers == ()
        assert "exact_match" not in found.as_json()

    def test_a_model_without_an_adapter_equals_its_base(self, tiny_llama: Any, tiny_tokenizer: Any) -> None:
        document = self.evaluation(tiny_llama(), tiny_tokenizer, [EvalSource("val", batches(2))]).as_json()
        assert document["loss"] == document["base"]["loss"]

    def test_training_goes_on_as_if_nothing_had_been_evaluated(
        self, tiny_model_dir: Path, tiny_tokenizer: Any
    ) -> None:
        def train(evaluating: bool) -> list[torch.Tensor]:
            spec = QuantizationSpec("nf4", True, "fp32")
            base = load_base(str(tiny_model_dir), None, spec, "sdpa", "cpu", False)
            model = attach(base, LoraSpec(rank=4, alpha=8, dropout=0.3), seed=0)
            parameters = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(parameters, lr=1e-2)
            torch.manual_seed(3)
            for batch in batches(2):
                if evaluating:
                    source = EvalSource("val", batches(2), self.questions(["a", "b"]), exact_match=True)
                    self.evaluation(model, tiny_tokenizer, [source])
                model(batch.input_ids, labels=batch.labels, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return [*parameters, torch.get_rng_state()]

        evaluated, plain = train(True), train(False)
        assert all(torch.equal(a, b) for a, b in zip(evaluated, plain, strict=True))


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"),
    [
        ('{"a": 1}', '{"a": 1}', True),
        ('\n {"a": 1} ', '{"a": 1}', True),
        ('{"a":1}', '{"a": 1}', False),
        ("Heron", "heron", False),
        ("a  b", "a b", False),
        ("heron.", "heron", False),
    ],
)
def test_only_whitespace_around_an_answer_is_overlooked(answer: str, expected: str, is_right: bool) -> None:
    assert is_exact(answer, expected) == is_right
