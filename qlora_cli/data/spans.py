"""A conversation → its text and where in it the assistant's turns lie, for any chat template.

A turn is what the model has to write: from the end of the generation prompt up to and including the token
that closes it. Nothing is assumed about a template. Where it has `{% generation %}` markers they say where
an answer lies; else the start is the text rendered up to the turn with a generation prompt, if the whole
text begins with it, and else a mark; the end is a mark plus what the template writes right after it. Each
of these is checked against the whole text, and a turn that no way finds is a fault: never everything, never
nothing. Why not the token mask of transformers: almost no published template has markers
(huggingface/transformers#34172).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qlora_cli.data.examples import Example
from qlora_cli.data.rendering import Marks, Renderer, RenderError, choose_marks

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class MaskNotFound(ValueError):
    """It cannot be said which part of a text the assistant wrote."""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `end` (not included) of a text: the turn of message `message`.

    `is_closed` is False where the template writes nothing to close the turn.
    """

    start: int
    end: int
    message: int
    is_closed: bool = True


@dataclass(slots=True)
class _Places:
    """A rendered conversation and the marks found in it.

    Attributes:
        text: The whole conversation.
        marks: The marks that were used; None where marks do not work.
        starts: Position of the content of a message, where a mark shows it.
        ends: Position behind the content of a message, where a mark shows it.
    """

    text: str
    marks: Marks | None = None
    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)


def turn_spans(renderer: Renderer, example: Example, wanted: Iterable[int]) -> tuple[str, list[Span]]:
    """Render a conversation and find the turns of some of its messages.

    Args:
        renderer: The chat template.
        example: The conversation.
        wanted: Indices of messages; for one that is not the assistant's, the span begins at its content.

    Returns:
        The text of the whole conversation and a span for each wanted message, in order.

    Raises:
        RenderError: If the template refuses the conversation.
        MaskNotFound: If a wanted turn cannot be found beyond doubt.
    """
    text = renderer.render(example.messages, example.tools)
    wanted = sorted(set(wanted))
    spans = _by_markers(renderer, example, text, wanted)
    if spans is None:
        places = _find_marks(renderer, example, text)
        spans = [_turn(renderer, example, places, index) for index in wanted]
        _refuse_strangers(places, spans)
    for before, after in zip([Span(0, 0, -1), *spans], spans, strict=False):
        if after.start < before.end or after.end <= after.start:
            raise MaskNotFound(f"the turns of messages {before.message + 1} and {after.message + 1} overlap")
    return text, spans


def prompt_text(renderer: Renderer, messages: Sequence[dict[str, Any]], tools: Any = None) -> str:
    """Render messages so that the assistant has the word.

    A template that knows no generation prompt gets the header that it writes in front of an answer.

    Args:
        renderer: The chat template.
        messages: The conversation so far; may be empty.
        tools: Tool descriptions, None for none.

    Raises:
        RenderError: If the template refuses the conversation.
    """
    text = ""
    if messages:
        text = renderer.render(messages, tools, generation_prompt=True)
        if text != renderer.render(messages, tools):
            return text
    marks = choose_marks([text])
    probe = {"role": "assistant", "content": marks.wrap("x", 0)}
    try:
        plain, starts, _ = marks.take_out(renderer.render([*messages, probe], tools))
    except RenderError:
        return text
    if len(starts.get(0, ())) == 1 and plain.startswith(text):
        return _header(plain, len(text), starts[0][0])
    return text


def lost_texts(example: Example, text: str) -> tuple[bool, bool]:
    """Tell what of a conversation is missing in its text.

    Returns:
        Whether thinking of the assistant is missing, and whether any other content is.
    """
    thinking = other = False
    for message in example.messages:
        thoughts, mark, content = message["content"].rpartition("</think>")
        other = other or content.strip() not in text
        thoughts = thoughts.replace("<think>", "", 1)
        given = [thoughts if mark else "", *(message.get(key) for key in REASONING_KEYS)]
        thinking = thinking or any(isinstance(part, str) and part.strip() not in text for part in given)
    return thinking, other


def _header(text: str, prompt_end: int, content: int) -> str:
    """The text in front of an answer, without blanks that the model has to write itself."""
    if not text[prompt_end:content].strip():
        return text[:prompt_end]
    return text[:content].rstrip(" ")  # `Assistant: answer`: the blank belongs to the answer's first token


def _refuse_strangers(places: _Places, spans: Sequence[Span]) -> None:
    """Refuse a turn that holds another message's content."""
    for span in spans:
        for index, start in places.starts.items():
            if index != span.message and span.start <= start < span.end:
                raise MaskNotFound(f"message {index + 1} lies inside the turn of message {span.message + 1}")


def _find_marks(renderer: Renderer, example: Example, text: str) -> _Places:
    """Render with marks around every content that has one, and keep those that are beyond doubt."""
    try:
        marks = choose_marks([text, *(message["content"] for message in example.messages)])
        for with_start in (True, False):
            found = _marked(renderer, example, marks, with_start)
            if found is not None and found.text == text:
                return found
    except RenderError:
        pass
    return _Places(text)


def _marked(renderer: Renderer, example: Example, marks: Marks, with_start: bool) -> _Places | None:
    """One rendering with marks; None where the template fails on it."""
    messages = [
        message | {"content": marks.wrap(message["content"], index, with_start)}
        if message["content"].strip()
        else message
        for index, message in enumerate(example.messages)
    ]
    try:
        marked = renderer.render(messages, example.tools)
    except RenderError:
        return None
    plain, starts, ends = marks.take_out(marked)
    return _Places(
        plain,
        marks,
        {index: at[0] for index, at in starts.items() if len(at) == 1},
        {index: at[0] for index, at in ends.items() if len(at) == 1},
    )


def _turn(renderer: Renderer, example: Example, places: _Places, index: int) -> Span:
    """Find the turn of one message."""
    message = example.messages[index]
    if message["role"] == "assistant":
        start = _start(renderer, example, places, index)
    else:
        start = places.starts.get(index, -1)
    if start < 0:
        raise MaskNotFound(f"where message {index + 1} begins in the text cannot be found")
    # behind a text with tool calls comes no turn end but the calls, so its mark says nothing
    content_end = -1 if message.get("tool_calls") else places.ends.get(index, -1)
    if content_end < start:
        return _bounded_turn(renderer, example, places.text, index, start)
    end, is_closed = _close(renderer, example, places.text, index, content_end)
    return Span(start, end, index, is_closed)


def _start(renderer: Renderer, example: Example, places: _Places, index: int) -> int:
    """Where the model begins to write message `index`; -1 where that cannot be found."""
    content = places.starts.get(index, -1)
    if index == 0:
        return content
    before = example.messages[:index]
    try:
        prompt = renderer.render(before, example.tools, generation_prompt=True)
        if not places.text.startswith(prompt):
            return _start_behind(renderer, example, places, index)
        # What the template writes between prompt and content is for the model to write, unless it is
        # a header that stands there only because the template knows no generation prompt.
        is_apart = content > len(prompt) and places.text[len(prompt) : content].strip()
        if is_apart and prompt == renderer.render(before, example.tools):
            return len(_header(places.text, len(prompt), content))
    except RenderError:
        return content
    return len(prompt)


def _start_behind(renderer: Renderer, example: Example, places: _Places, index: int) -> int:
    """Where message `index` begins in a text whose earlier part is not that of the prompt.

    What the prompt has behind its last content is looked for behind the same content in the text.
    """
    content = places.starts.get(index, -1)
    before_end = places.ends.get(index - 1, -1)
    if places.marks is None or before_end < 0:
        return content
    *before, last = example.messages[:index]
    last = last | {"content": places.marks.wrap(last["content"], index - 1, with_start=False)}
    marked = renderer.render([*before, last], example.tools, generation_prompt=True)
    prompt, _, ends = places.marks.take_out(marked)
    tail = prompt[ends[index - 1][-1] :] if index - 1 in ends else ""
    if tail and places.text.startswith(tail, before_end):
        return before_end + len(tail)
    return content


def _close(renderer: Renderer, example: Example, text: str, index: int, content_end: int) -> tuple[int, bool]:
    """Where a turn ends whose content ends at `content_end`, and whether something closes it."""
    token = renderer.turn_end.match(text, content_end)
    if token:
        return token.end(), True
    tail = text[content_end : _tail_end(renderer, example, text, index, content_end)]
    if tail.strip():
        return content_end + len(tail.rstrip()), True
    return content_end + len(tail), False  # blanks are all that tells the end


def _tail_end(renderer: Renderer, example: Example, text: str, index: int, content_end: int) -> int:
    """Where the text of message `index` ends, blanks and all."""
    if index == len(example.messages) - 1:
        return len(text)
    until = renderer.render(example.messages[: index + 1], example.tools)
    if text.startswith(until):
        return len(until)
    common = len(os.path.commonprefix([text, until]))
    if common >= content_end and not text[content_end:common].strip():
        return common  # what follows in `until` ends conversations, not turns
    raise MaskNotFound(f"where message {index + 1} ends in the text cannot be found")


def _bounded_turn(renderer: Renderer, example: Example, text: str, index: int, start: int) -> Span:
    """The turn of a message whose end no mark shows: all that was rendered for it."""
    turn = text[start : _tail_end(renderer, example, text, index, start)].rstrip()
    if not turn:
        raise MaskNotFound(f"where message {index + 1} ends in the text cannot be found")
    content = example.messages[index]["content"].rstrip()
    is_closed = renderer.ends_closed(turn) or not (content and turn.endswith(content))
    return Span(start, start + len(turn), index, is_closed)


def _by_markers(renderer: Renderer, example: Example, text: str, wanted: Sequence[int]) -> list[Span] | None:
    """Spans by the template's own generation markers; None where they are missing or do not fit."""
    source = renderer.marked_template(example.tools)
    answers = example.answers
    if source is None or any(index not in answers for index in wanted):
        return None
    if "\ue000" in text or "\ue001" in text:
        return None
    try:
        marked = renderer.render(example.messages, example.tools, template=source)
    except RenderError:
        return None
    pieces = marked.replace("\ue001", "\ue000").split("\ue000")
    if "".join(pieces) != text or len(pieces) != 2 * len(answers) + 1:
        return None
    spans: list[Span] = []
    position = 0
    for number, piece in enumerate(pieces):
        index = answers[number // 2] if number % 2 else -1
        if index in wanted:
            end, is_closed = position + len(piece.rstrip()), True
            if not renderer.ends_closed(piece.rstrip()):
                end, is_closed = _close(renderer, example, text, index, position + len(piece))
            spans.append(Span(position, end, index, is_closed))
        position += len(piece)
    return spans
