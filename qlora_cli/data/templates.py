"""An example → token ids and labels: the chat template rendered, tokenized once, the answers supervised.

The text of the whole conversation is tokenized in one go, without adding special tokens, so the ids are
those a server gives the same text, and a template that writes its own beginning token never gets a second.
Character spans become labels by the tokenizer's offsets: a token is supervised if it holds at least one
character of an answer. This module knows no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qlora_cli.data.examples import Example
from qlora_cli.data.rendering import Renderer, RenderError
from qlora_cli.data.sources import Origin
from qlora_cli.data.spans import MaskNotFound, Span, lost_texts, prompt_text, turn_spans
from qlora_cli.errors import Fault, InputError

IGNORED = -100  # torch.nn.CrossEntropyLoss's ignore_index
LOSS_ON = ("assistant", "last_assistant", "all")


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One example as the model sees it.

    Attributes:
        input_ids: Token ids of the whole conversation.
        labels: Same length: the token id where it is supervised, else -100. The first is always -100,
            because nothing predicts it.
        origin: File and row.
        source: Name of the source.
    """

    input_ids: list[int]
    labels: list[int]
    origin: Origin
    source: str

    @property
    def num_supervised(self) -> int:
        """Tokens with a label."""
        return len(self.labels) - self.labels.count(IGNORED)


@dataclass(frozen=True, slots=True)
class Noted:
    """A tokenized example and what should be said about it.

    Attributes:
        example: The tokens.
        notes: Codes of warnings, see `docs/data.md`.
    """

    example: Tokenized
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A text with the spans that are supervised, before it is tokenized."""

    example: Example
    text: str
    spans: list[Span]
    notes: tuple[str, ...]
    is_open: bool  # the eos token is to be appended


def check_tokenizer(tokenizer: Any) -> list[Fault]:
    """Find what makes a tokenizer unusable for chats.

    Args:
        tokenizer: The model's tokenizer.

    Returns:
        A fault where it is not a fast one, or has no chat template.
    """
    faults = []
    name = getattr(tokenizer, "name_or_path", "") or "the model"
    if not getattr(tokenizer, "is_fast", False):
        message = f"the tokenizer of `{name}` is not a fast one, so answers cannot be found among its tokens"
        faults.append(Fault("slow-tokenizer", message, hint="use a model folder with a `tokenizer.json`"))
    if not tokenizer.chat_template:
        message = f"the tokenizer of `{name}` has no chat template"
        hint = "name a template: `data: {chat_template: chatml.jinja}`"
        faults.append(Fault("no-chat-template", message, key="data.chat_template", hint=hint))
    return faults


def tokenize(example: Example, tokenizer: Any, loss_on: str) -> Tokenized:
    """Tokenize one conversation.

    Args:
        example: The conversation.
        tokenizer: A fast tokenizer with a chat template.
        loss_on: `assistant` (every answer), `last_assistant` (the last one), `all` (every token).

    Returns:
        Ids and labels.

    Raises:
        InputError: If the template refuses the conversation, the answers cannot be found, or nothing is
            supervised.
    """
    faults: list[Fault] = []
    noted = tokenize_all([example], Renderer(tokenizer), loss_on, faults)
    if faults:
        raise InputError(faults)
    return noted[0].example


def tokenize_all(
    examples: Sequence[Example], renderer: Renderer, loss_on: str, faults: list[Fault]
) -> list[Noted]:
    """Tokenize many conversations in one call of the tokenizer, which uses every core.

    Args:
        examples: The conversations.
        renderer: The chat template and its tokenizer.
        loss_on: `assistant`, `last_assistant` or `all`.
        faults: Receives a fault for each conversation that cannot be trained.

    Returns:
        The conversations without a fault, in order.
    """
    rendered = [text for example in examples if (text := _render(example, renderer, loss_on, faults))]
    if not rendered:
        return []
    encoded = _encode(renderer.tokenizer, [each.text for each in rendered])
    results = []
    for each, input_ids, offsets in zip(rendered, *encoded, strict=True):
        labels, merges = _label(input_ids, offsets, each.spans)
        if each.is_open:
            eos = renderer.tokenizer.eos_token_id
            input_ids, labels = [*input_ids, eos], [*labels, eos]
        labels[:1] = [IGNORED]
        tokens = Tokenized(input_ids, labels, each.example.origin, each.example.source)
        if not tokens.num_supervised:
            faults.append(_nothing(each.example, loss_on))
            continue
        results.append(Noted(tokens, each.notes + (("answer-merges-with-prompt",) if merges else ())))
    return results


def prompt_ids(example: Example, tokenizer: Any) -> list[int]:
    """Token ids to generate the last answer from: all messages before it, and the generation prompt.

    Args:
        example: A conversation with an answer.
        tokenizer: A fast tokenizer with a chat template.

    Returns:
        The ids that stand in front of that answer in training.

    Raises:
        InputError: If the template refuses the conversation.
    """
    return chat_ids(example.messages[: example.answers[-1]], tokenizer, example.tools)


def chat_ids(messages: Sequence[dict[str, Any]], tokenizer: Any, tools: Any = None) -> list[int]:
    """Token ids of a conversation in which the assistant has the word.

    Args:
        messages: The conversation so far.
        tokenizer: A fast tokenizer with a chat template.
        tools: Tool descriptions, None for none.

    Raises:
        InputError: If the template refuses the conversation.
    """
    try:
        text = prompt_text(Renderer(tokenizer), messages, tools)
    except RenderError as error:
        raise InputError(
            Fault("template-refuses", f"the chat template refuses the prompt: {error}")
        ) from error
    return _encode(tokenizer, [text])[0][0]


def starts_as_generated(example: Example, tokens: Tokenized, renderer: Renderer) -> bool:
    """Tell whether generation would start from the tokens that stand before the last answer in training.

    It would not where the generation prompt says more than the rendered turns do, or where a tokenizer
    splits the end of the prompt otherwise when an answer follows.

    Args:
        example: The conversation.
        tokens: The same, tokenized; may be cut.
        renderer: The chat template and its tokenizer.
    """
    prompt = prompt_ids(example, renderer.tokenizer)
    return tokens.input_ids[: len(prompt)] == prompt[: len(tokens.input_ids)]


def stop_token_ids(tokenizer: Any) -> list[int]:
    """Tokens at which generation stops: the eos token and every token the template closes an answer with.

    Args:
        tokenizer: A fast tokenizer with a chat template.

    Returns:
        Token ids in ascending order; empty where there are none.
    """
    found = {tokenizer.eos_token_id} - {None}
    renderer = Renderer(tokenizer)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    example = Example(talk, (True,) * 4, None, Origin("probe", 1), "probe")
    try:
        text, spans = turn_spans(renderer, example, example.answers)
    except (RenderError, MaskNotFound):
        return sorted(found)
    added = set(renderer.tokenizer.get_added_vocab().values())
    for span in spans:
        found |= set(_encode(tokenizer, [text[: span.end]])[0][0][-1:]) & added
    return sorted(found)


def _render(example: Example, renderer: Renderer, loss_on: str, faults: list[Fault]) -> _Rendered | None:
    """Render one conversation and find what is supervised, or record why that is not possible."""
    answers = [index for index in example.answers if example.trained[index]]
    if loss_on == "last_assistant":
        answers = [index for index in answers if index == example.answers[-1]]
    silent = [index for index, is_trained in enumerate(example.trained) if not is_trained]
    if not answers and loss_on != "all":
        faults.append(_nothing(example, loss_on))
        return None
    wanted = [*answers, *silent] if loss_on == "all" else answers
    try:
        text, spans = turn_spans(renderer, example, wanted)
    except RenderError as error:
        faults.append(
            example.origin.fault("template-refuses", f"the chat template refuses this row: {error}")
        )
        return None
    except MaskNotFound as error:
        message = f"the answers cannot be found in the rendered text: {error}"
        hint = "a template with `{% generation %}` markers shows them: `data: {chat_template: FILE}`"
        faults.append(example.origin.fault("mask-not-found", message, hint=hint))
        return None
    supervised = [span for span in spans if span.message in answers]
    notes = _notes(example, text, supervised)
    is_open = any(not span.is_closed and span.message == len(example.messages) - 1 for span in supervised)
    if is_open and renderer.tokenizer.eos_token_id is None:
        message = "the chat template writes nothing to end an answer and the tokenizer has no eos token"
        faults.append(example.origin.fault("no-turn-end", message))
        return None
    if is_open:  # blanks between the answer and the appended token are for the model to write
        notes.append("eos-appended")
    if loss_on == "all":
        supervised = _around([span for span in spans if span.message in silent], len(text))
    return _Rendered(example, text, supervised, tuple(notes), is_open)


def _notes(example: Example, text: str, supervised: Sequence[Span]) -> list[str]:
    """Codes of what should be said about a rendered conversation."""
    thinking, other = lost_texts(example, text)
    last = len(example.messages) - 1
    is_unclosed = any(not span.is_closed and span.message != last for span in supervised)
    named = {"thinking-lost": thinking, "content-lost": other, "turn-without-end": is_unclosed}
    return [code for code, holds in named.items() if holds]


def _nothing(example: Example, loss_on: str) -> Fault:
    """The fault of a conversation without a supervised token."""
    text = f"nothing is supervised with `loss_on: {loss_on}`, so this row teaches nothing"
    return example.origin.fault("nothing-supervised", text)


def _around(silent: Sequence[Span], length: int) -> list[Span]:
    """What lies between the silent spans."""
    borders = [0, *(place for span in silent for place in (span.start, span.end)), length]
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return [Span(start, end, -1) for start, end in pairs if start < end]


def _encode(tokenizer: Any, texts: list[str]) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Tokenize rendered texts as they stand."""
    encoded = tokenizer(
        texts,
        add_special_tokens=False,  # the template has written them
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        truncation=False,
        verbose=False,  # lengths are judged by `prepare`, with rows
    )
    return encoded["input_ids"], encoded["offset_mapping"]


def _label(
    input_ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[Span]
) -> tuple[list[int], bool]:
    """Give a label to every token that holds a character of a span.

    Some tokenizers leave blanks out of the offsets, and the bytes of one character share its offsets:
    so a token reaches from where the one before ended, or from its own start if that is earlier.

    Returns:
        The labels, and whether a span begins inside a token.
    """
    labels = [IGNORED] * len(input_ids)
    merges = False
    current = previous_end = 0
    for position, (start, end) in enumerate(offsets):
        start = min(start, previous_end)
        previous_end = max(previous_end, end)
        while current < len(spans) and spans[current].end <= start:
            current += 1
        if current == len(spans):
            break
        span = spans[current]
        if end > span.start or start == end == span.start:
            labels[position] = input_ids[position]
            merges = merges or start < span.start
    return labels, merges
