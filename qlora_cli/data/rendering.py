"""Messages → text: the tokenizer's chat template, plus marks that show where a content ended up.

A mark is a run of private-use characters put at the border of a content before rendering and taken out of
the text after. The text without its marks must equal the text rendered without them, character by character:
then the marks show the places, and a template that reads the content (trims it, looks for `</think>`) cannot
lead them astray. This module knows neither tokens nor losses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Message = Mapping[str, Any]
Tools = list[dict[str, Any]] | None

_PRIVATE_USE = range(0xE000, 0xF8FD, 3)
_MARKER = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class RenderError(ValueError):
    """The template refuses a conversation, or fails on it."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Three characters that occur nowhere in a conversation, and the marks made of them."""

    opening: str
    ending: str
    closing: str

    def start(self, index: int) -> str:
        """The mark in front of the content of message `index`."""
        return f"{self.opening}{index}{self.closing}"

    def end(self, index: int) -> str:
        """The mark behind the content of message `index`."""
        return f"{self.ending}{index}{self.closing}"

    def wrap(self, content: str, index: int, with_start: bool = True) -> str:
        """Mark a content inside its leading and trailing blanks, which a template may trim."""
        core = content.strip()
        lead = content[: len(content) - len(content.lstrip())]
        start = self.start(index) if with_start else ""
        return lead + start + core + self.end(index) + content[len(lead) + len(core) :]

    def take_out(self, marked: str) -> tuple[str, dict[int, list[int]], dict[int, list[int]]]:
        """Split a marked text.

        Returns:
            The text without marks, then for each message the positions of its start and of its end marks.
        """
        pattern = re.compile(f"([{self.opening}{self.ending}])(\\d+){self.closing}")
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        pieces: list[str] = []
        length = last = 0
        for mark in pattern.finditer(marked):
            pieces.append(marked[last : mark.start()])
            length += mark.start() - last
            last = mark.end()
            places = starts if mark[1] == self.opening else ends
            places.setdefault(int(mark[2]), []).append(length)
        pieces.append(marked[last:])
        return "".join(pieces), starts, ends


def choose_marks(texts: Sequence[str]) -> Marks:
    """Find three private-use characters that none of the texts contains.

    Raises:
        RenderError: If the texts use all of them.
    """
    for code in _PRIVATE_USE:
        characters = [chr(code), chr(code + 1), chr(code + 2)]
        if not any(character in text for text in texts for character in characters):
            return Marks(*characters)
    raise RenderError("the conversation uses every private-use character")


class Renderer:
    """A tokenizer's chat template, as a function of messages."""

    def __init__(self, tokenizer: Any) -> None:
        """Keep the tokenizer.

        Args:
            tokenizer: A fast tokenizer with a chat template.
        """
        self.tokenizer = tokenizer
        self._marked: dict[bool, str | None] = {}

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        generation_prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Render a conversation.

        Args:
            messages: At least one message.
            tools: Tool descriptions, None for none.
            generation_prompt: Add what the template writes to make the assistant speak.
            template: Source of another template; None is the tokenizer's own.

        Returns:
            The text, special tokens included; tokenize it without adding any.

        Raises:
            RenderError: If the template raises; the message is the template's.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise RenderError(str(error) or type(error).__name__) from error
        return str(text)

    @cached_property
    def turn_end(self) -> re.Pattern[str]:
        """Matches blanks and one token that can close a turn, at the start of a text.

        Every added token counts, special or not, save those that begin a text or are blank.
        """
        tokens = set(self.tokenizer.get_added_vocab()) | {self.tokenizer.eos_token or ""}
        if self.tokenizer.bos_token != self.tokenizer.eos_token:
            tokens.discard(self.tokenizer.bos_token)
        usable = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
        if not usable:
            return re.compile("(?!)")  # matches nothing
        return re.compile(rf"\s*(?:{'|'.join(map(re.escape, usable))})")

    def ends_closed(self, text: str) -> bool:
        """Whether a text without trailing blanks ends in a token that can close a turn."""
        return any(self.turn_end.fullmatch(text, start) for start in range(max(0, len(text) - 64), len(text)))

    def marked_template(self, tools: Tools) -> str | None:
        """The template with its `{% generation %}` markers turned into marks it writes itself.

        An `if` block takes the marker's place, with the same whitespace control, so the text is the same.

        Returns:
            The changed source with U+E000 and U+E001 where markers open and close; None without markers.
        """
        key = tools is not None  # a tokenizer may have a template of its own for tools
        if key not in self._marked:
            source = str(self.tokenizer.get_chat_template(tools=tools))
            changed, count = _MARKER.subn(_as_mark, source)
            self._marked[key] = changed if count else None
        return self._marked[key]


def _as_mark(marker: re.Match[str]) -> str:
    """What takes the place of a generation marker."""
    mark = "\ue001" if marker[2] else "\ue000"
    return f"{{%{marker[1]} if true %}}{mark}{{% endif {marker[3]}%}}"
