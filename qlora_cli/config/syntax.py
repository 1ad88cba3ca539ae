"""YAML's errors in words that say what to change: PyYAML speaks of tokens, a recipe's author of lines.

Each entry of `_WORDS` matches a part of PyYAML's own message. Tabs are looked for first, because one tab
gives five different messages. This module must not know the schema or the file system.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import yaml

from qlora_cli.errors import Fault

if TYPE_CHECKING:
    from qlora_cli.config.nodes import Mark

# What YAML calls non-printable: PyYAML's Reader.NON_PRINTABLE, YAML 1.1 section 5.1.
CONTROL = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# part of PyYAML's message, what is said instead (`{opened}`: where the construct began), hint
_WORDS: tuple[tuple[str, str, str | None], ...] = (
    ("expected ',' or ']'", "the list opened at {opened} goes on without `,` or `]`", None),
    ("expected ',' or '}'", "the mapping opened at {opened} goes on without `,` or `}`", None),
    ("mapping values are not allowed", "a `:` cannot stand here",
     "check the indentation, or quote the value if it holds `: `"),
    ("mapping keys are not allowed", "a `?` cannot begin a key here", "quote the value"),
    ("sequence entries are not allowed", "a list item `-` cannot stand here",
     "check the indentation, or quote the value if it begins with `- `"),
    ("could not find expected ':'", "this is no `key: value`: the `:` is missing",
     "write `key: value` with a space after the `:`"),
    ("expected <block end>", "this line does not fit the indentation of the lines above",
     "keys of one section begin in the same column"),
    ("found unexpected end of stream", "the quote opened here is never closed", None),
    ("found unexpected document separator", "the quote opened at {opened} is not closed before `---`", None),
    ("found unknown escape character", "this backslash begins no escape that YAML knows",
     "use single quotes, in which a backslash is a backslash"),
    ("hexadecimal numbers", "this backslash escape lacks hexadecimal digits",
     "use single quotes, in which a backslash is a backslash"),
    ("expected the node content", "a value is missing here", None),
    ("expected '<document start>'", "this cannot follow what stands above",
     "a recipe is one mapping: check brackets and indentation above"),
    ("found undefined tag handle", "a value cannot begin with `!`", "quote it"),
    ("incompatible YAML document", "only YAML 1 is read", "remove the `%YAML` line"),
)  # fmt: skip
# what PyYAML was doing when nothing above matched
_CONTEXTS: tuple[tuple[str, str, str | None], ...] = (
    ("alias", "a value cannot begin with `*`", "quote it"),
    ("anchor", "a value cannot begin with `&`", "quote it"),
    ("tag", "a value cannot begin with `!`", "quote it"),
    ("block scalar", "`|` or `>` begins a block of text and takes nothing else on its line",
     "quote the value if it begins with `|` or `>`"),
    ("directive", "a line cannot begin with `%`", "quote it"),
)  # fmt: skip
_FROM_START = ("could not find expected ':'", "found unexpected end of stream")  # the end says nothing useful


def control_fault(character: str, mark: Mark) -> Fault:
    """The fault of a character that no text holds."""
    if "\udc80" <= character <= "\udcff":  # how Python keeps a byte of the command line that is not UTF-8
        message = f"byte 0x{ord(character) - 0xDC00:02x} is not UTF-8"
        return Fault("not-utf8", message, *mark.where)
    return Fault(
        "control-character",
        f"control character U+{ord(character):04X}",
        *mark.where,
        hint="remove it, or write it as an escape in double quotes",
    )


def explain(error: yaml.MarkedYAMLError, text: str, mark_at: Callable[[int], Mark]) -> Fault:
    """Say in our words why a document cannot be read.

    Args:
        error: What PyYAML raised.
        text: The document.
        mark_at: Position of a character index.

    Returns:
        A fault of code `tab-indentation` or `yaml-syntax`.
    """
    problem = error.problem or ""
    at = error.problem_mark or error.context_mark
    opened = error.context_mark or at
    index = at.index if at else 0
    tab = _tab_before(text, index)
    if tab is not None:
        mark = mark_at(tab)
        message = "a tab stands where YAML takes spaces only"
        return Fault("tab-indentation", message, *mark.where, hint="write spaces instead")
    if any(part in problem for part in _FROM_START) and opened:
        index = opened.index
    message, hint = _words(problem, error.context or "", text[index : index + 1])
    mark = mark_at(index)
    start = mark_at(opened.index if opened else 0)
    message = message.replace(
        " opened at {opened}", "" if start.line is None else f" opened at {start.place}"
    )
    return Fault("yaml-syntax", message, *mark.where, hint=hint)


def _words(problem: str, context: str, character: str) -> tuple[str, str | None]:
    """Message and hint for what PyYAML said."""
    if "cannot start any token" in problem:
        return f"a value cannot begin with `{character}`", "quote it"
    for part, message, hint in _WORDS:
        if part in problem:
            return message, hint
    for part, message, hint in _CONTEXTS:
        if part in context:
            return message, hint
    return "this is not YAML that can be read", None


def _tab_before(text: str, index: int) -> int | None:
    """The first tab in the indentation or at the place of the error, on its line or the one before."""
    if text[index : index + 1] == "\t":
        return index
    line_start = max(text.rfind("\n", 0, index), text.rfind("\r", 0, index)) + 1
    before = max(text.rfind("\n", 0, max(line_start - 1, 0)), text.rfind("\r", 0, max(line_start - 2, 0))) + 1
    for start in (before, line_start):
        indent = re.match(r"[ \t]*", text[start:])
        if indent and "\t" in indent.group():
            return start + indent.group().index("\t")
    return None
