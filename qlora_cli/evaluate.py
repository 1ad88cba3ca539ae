"""Base and adapter side by side on validation data: token-weighted loss, exact answers, a few samples.

Loss is the sum over supervised tokens divided by their number, so batch size, padding and a short last batch
do not move it. Both sides run in one process on the same weights, the base with the adapter switched off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qlora_cli.data.collate import Batch
from qlora_cli.generate import generate
from qlora_cli.model.aside import aside
from qlora_cli.model.lora import PeftModel
from qlora_cli.model.loss import training_loss


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss that can be added up.

    Attributes:
        loss_sum: Sum of the cross entropies of supervised tokens, nats.
        tokens: Number of those tokens.
        examples: Number of examples they come from.
    """

    loss_sum: float = 0.0
    tokens: int = 0
    examples: int = 0

    def __add__(self, other: LossSum) -> LossSum:
        """Both together."""
        return LossSum(
            self.loss_sum + other.loss_sum, self.tokens + other.tokens, self.examples + other.examples
        )

    @property
    def loss(self) -> float:
        """Mean over supervised tokens, nats; not a number where there are none."""
        return self.loss_sum / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with the answer that is right.

    Attributes:
        prompt: The text that is shown for it.
        prompt_ids: Token ids up to where the answer begins.
        expected: The right answer.
    """

    prompt: str
    prompt_ids: Sequence[int]
    expected: str


@dataclass(frozen=True, slots=True)
class EvalSource:
    """One source of validation data.

    Attributes:
        name: Shown for it.
        batches: Its examples; read once for each side.
        questions: The same examples as questions; may be empty.
        exact_match: Whether each question has one right answer, so that all are asked.
    """

    name: str
    batches: Iterable[Batch]
    questions: Sequence[Question] = ()
    exact_match: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """A question and what both sides answered."""

    source: str
    prompt: str
    expected: str
    base: str
    adapter: str

    @property
    def is_right(self) -> bool:
        """Whether the adapter's answer is the expected one."""
        return is_exact(self.adapter, self.expected)

    @property
    def base_is_right(self) -> bool:
        """Whether the base's answer is the expected one."""
        return is_exact(self.base, self.expected)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """One source, or all of them, for base and adapter.

    Attributes:
        adapter: Loss with the adapter.
        base: Loss without.
        answered: Questions that were scored by exact match.
        right: Those that the adapter answered right.
        base_right: Those that the base answered right.
    """

    adapter: LossSum = field(default_factory=LossSum)
    base: LossSum = field(default_factory=LossSum)
    answered: int = 0
    right: int = 0
    base_right: int = 0

    def __add__(self, other: SideBySide) -> SideBySide:
        """Both together."""
        return SideBySide(
            self.adapter + other.adapter,
            self.base + other.base,
            self.answered + other.answered,
            self.right + other.right,
            self.base_right + other.base_right,
        )

    def as_json(self) -> dict[str, Any]:
        """The figures of one source as they stand in the document; `exact_match` only where it was asked."""
        return _figures(self.adapter, self.answered, self.right) | {
            "tokens": self.adapter.tokens,
            "examples": self.adapter.examples,
            "base": _figures(self.base, self.answered, self.base_right),
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate_adapter` found.

    Attributes:
        sources: Figures by the name of the source, in order.
        samples: The first questions with both answers, those of scored sources before others.
        answers: Every question of the scored sources with both answers.
    """

    sources: dict[str, SideBySide]
    samples: tuple[Sample, ...]
    answers: tuple[Sample, ...]

    @property
    def total(self) -> SideBySide:
        """All sources together, weighted by tokens and by questions."""
        return sum(self.sources.values(), SideBySide())

    def as_json(self) -> dict[str, Any]:
        """The document of `qlora eval --json`."""
        samples = [
            {
                "source": s.source,
                "prompt": s.prompt,
                "expected": s.expected,
                "base": s.base,
                "adapter": s.adapter,
            }
            for s in self.samples
        ]
        sources = {name: found.as_json() for name, found in self.sources.items()}
        return self.total.as_json() | {"samples": samples, "sources": sources}


def loss_over(model: torch.nn.Module, batches: Iterable[Batch]) -> LossSum:
    """Loss of a model over batches, in eval mode; the model comes back as it was.

    Args:
        model: A causal language model, with or without adapter.
        batches: Of any sizes.

    Returns:
        The sum, the supervised tokens and the examples.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = examples = 0
    with aside(model):
        for batch in batches:
            total += training_loss(model, batch.to(device))
            tokens += int((batch.labels[:, 1:] != -100).sum())
            examples += len(batch.labels)
    return LossSum(float(total), tokens, examples)


def evaluate_adapter(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[EvalSource],
    *,
    max_new_tokens: int,
    batch_size: int,
    num_samples: int = 3,
) -> Evaluation:
    """Measure a base with and without its adapter.

    Args:
        model: With an adapter; without one both sides are the same.
        tokenizer: Renders no prompt, but says where an answer ends.
        sources: What to measure on.
        max_new_tokens: Longest answer.
        batch_size: Prompts answered at a time.
        num_samples: Questions that are shown with both answers, also where no source is scored.

    Returns:
        Figures for each source and together, and the samples.
    """
    losses = {}
    for source in sources:
        adapter = loss_over(model, source.batches)
        with without_adapter(model):
            losses[source.name] = SideBySide(adapter, loss_over(model, source.batches))
    asked = [(s.name, question) for s in sources if s.exact_match for question in s.questions]
    others = [(s.name, question) for s in sources if not s.exact_match for question in s.questions]
    shown = [*asked, *others[: max(num_samples - len(asked), 0)]]
    prompts = [question.prompt_ids for _, question in shown]
    with_it = generate(model, tokenizer, prompts, max_new_tokens, batch_size)
    with without_adapter(model):
        base = generate(model, tokenizer, prompts, max_new_tokens, batch_size)
    samples = tuple(
        Sample(name, question.prompt, question.expected, base_answer, answer)
        for (name, question), base_answer, answer in zip(shown, base, with_it, strict=True)
    )
    scored = samples[: len(asked)]
    for sample in scored:
        losses[sample.source] += SideBySide(
            answered=1, right=int(sample.is_right), base_right=int(sample.base_is_right)
        )
    return Evaluation(losses, samples[:num_samples], scored)


def is_exact(answer: str, expected: str) -> bool:
    """Whether an answer is the expected one, whitespace around either not counted.

    Args:
        answer: What was generated.
        expected: What is right.
    """
    return answer.strip() == expected.strip()


@contextmanager
def without_adapter(model: torch.nn.Module) -> Iterator[None]:
    """Switch the adapter off while the block runs; a model without one is left alone.

    Args:
        model: With or without an adapter.
    """
    if not isinstance(model, PeftModel):
        yield
        return
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter in trainable:  # peft decides anew what is trained when it switches the adapter on
            parameter.requires_grad_(True)


def _figures(loss: LossSum, answered: int, right: int) -> dict[str, Any]:
    """Figures of one side; what is not finite is null, which JSON has no number for."""
    figures = {"loss": loss.loss, "perplexity": loss.perplexity}
    if answered:
        figures["exact_match"] = right / answered
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}
