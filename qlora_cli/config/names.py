"""Unknown keys and values → what to write instead: our own keys one section off, other tools' names, typos.

The order matters: a key that comes later is said to come later, a key of another tool is translated, and only
then does spelling decide, because what `lora_r` means is not what is spelt like it. This module must not know
YAML nodes; it is given dotted keys and text.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING

from pydantic import BaseModel

from qlora_cli.config.foreign import (
    LATER_KEYS,
    LATER_VALUES,
    MEANT_BY_TRUE,
    NAMES,
    NOTES,
    RESIDENT_OPTIMIZERS,
    UNLIKE,
    VALUES,
)
from qlora_cli.config.kinds import Kind, fields_of
from qlora_cli.config.schema import Recipe
from qlora_cli.errors import Fault

if TYPE_CHECKING:
    from qlora_cli.config.nodes import Mark

_NEAR = 0.6  # difflib's default: one letter in three may differ
_NEAR_ELSEWHERE = 0.75  # another section needs a better reason
_MAX_PLACES = 2  # a key that stands in more places than this is no suggestion
_PLAIN = re.compile(r"[\w./~+-]{1,40}")


@cache
def all_keys() -> dict[str, Kind]:
    """Every dotted key of the recipe, sections too; keys of list items are written `data.train.*.path`."""
    keys: dict[str, Kind] = {}

    def walk(section: type[BaseModel], prefix: str) -> None:
        for name, kind in fields_of(section).items():
            keys[prefix + name] = kind
            if kind.section is not None:
                walk(kind.section, f"{prefix}{name}.")
            if kind.item is not None and kind.item.section is not None:
                walk(kind.item.section, f"{prefix}{name}.*.")

    walk(Recipe, "")
    return keys


def without_indices(key: str) -> str:
    """`data.train.0.path` → `data.train.*.path`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", key)


def unknown_key(section: str, name: str, value: str | None, known: list[str], mark: Mark) -> Fault:
    """The fault of a key that its section does not have.

    Args:
        section: Dotted key of the section, empty at the top.
        name: The key as it was written.
        value: Its value where that is a single one.
        known: Keys that the section has.
        mark: Where the key stands.

    Returns:
        A fault of code `unknown-key`, `foreign-key` or `not-available-yet`, with what to write as its hint.
    """
    key = f"{section}.{name}" if section else name
    on_command_line = mark.line is None
    known = known if section or on_command_line else ["include", *known]
    where = mark.where
    accepted = ", ".join(known)
    if without_indices(key) in LATER_KEYS:
        return Fault(
            "not-available-yet", f"`{key}` is not available yet", *where, key, accepted, "remove the key"
        )
    inside = f" in `{section}`" if section else ""
    message = f"unknown key `{name}`{inside}"
    foreign = _foreign(name, value, section, on_command_line)
    if foreign is not None:
        return Fault("foreign-key", message, *where, key, accepted, foreign)
    return Fault(
        "unknown-key", message, *where, key, accepted, _nearest(name, value, section, known, on_command_line)
    )


def not_yet_value(key: str, text: str) -> str | None:
    """The message for a value whose feature comes later, None for any other value."""
    if text not in LATER_VALUES.get(without_indices(key), ()):
        return None
    leaf = key.rpartition(".")[2]
    return f"{leaf} is not available yet: `{key}` is `{text}`"


def foreign_value(key: str, text: str) -> str | None:
    """The hint for a value as another tool spells it, None where none is known."""
    meant = VALUES.get(_value_key(key), {}).get(text.lower())
    if meant is None or meant == text:
        return None
    return f"write `{key.rpartition('.')[2]}: {meant}`{_resident(key, text)}"


def _value_key(key: str) -> str:
    """Where the values of a key are listed: every `format` is that of `data.format`."""
    return "data.format" if without_indices(key).endswith("*.format") else key


def _resident(key: str, text: str) -> str:
    """What an optimizer name that means "not paged" has to say besides."""
    if key == "optimizer.name" and text.lower() in RESIDENT_OPTIMIZERS:
        return ", and `paging: {backend: resident}` beside it to keep its state on the device"
    return ""


@cache
def _names() -> dict[str, tuple[str, str]]:
    """Their name → (our key, the tool)."""
    return {name: (key, tool) for key, names in NAMES.items() for name, tool in names.items()}


def _foreign(name: str, value: str | None, section: str, on_command_line: bool) -> str | None:
    """The hint for a name of another tool, None where it is none."""
    if name in NOTES and name not in _own_places():
        tool, note = NOTES[name]
        return f"`{name}` is {_whose(tool)} key: {note}"
    if name not in _names():
        return None
    key, tool = _names()[name]
    return f"`{name}` is {_whose(tool)} name for `{key}`{_write(name, key, value, section, on_command_line)}"


def _whose(tool: str) -> str:
    return f"{tool}'" if tool.endswith("s") else f"{tool}'s"


def _write(name: str, key: str, value: str | None, section: str, on_command_line: bool) -> str:
    """`; write ...` with the value where it can stand there, else what the key accepts."""
    kind = all_keys()[key]
    text = VALUES.get(key, {}).get(value.lower(), value) if value is not None else None
    if name in MEANT_BY_TRUE and value is not None and value.lower() in ("true", "yes", "on"):
        text = MEANT_BY_TRUE[name]

    def written(value: str) -> str:
        if on_command_line:
            return f"; write `--set '{key}={value}'`" if "{" in value else f"; write `--set {key}={value}`"
        return f"; write `{nested(key.removeprefix(f'{section}.') if section else key, value)}`"

    if key == "data.train":
        return written("[{path: FILE}]")
    if key == "data.validation":
        return f"{written('{fraction: 0.02}')} or a list of files like `train`"
    if key in UNLIKE or text is None or not _PLAIN.fullmatch(text) or not _fits(kind, text):
        return f"; accepted: {kind.describe()}"
    return f"{written(text)}{_resident(key, value or '')}"


def _fits(kind: Kind, text: str) -> bool:
    """Whether a plain value is one that the key takes; ranges are left to the loader."""
    if text in kind.words or text in map(str, kind.numbers) or kind.text or kind.path:
        return True
    if kind.flags:
        return text.lower() in ("true", "false")
    number = re.fullmatch(r"[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?", text)
    return bool(number and (kind.number or (kind.integer and text.isdigit())))


def nested(key: str, value: str) -> str:
    """`a.b.c` and a value → `a: {b: {c: value}}`."""
    *sections, leaf = key.split(".")
    inner = f"{leaf}: {value}"
    for section in reversed(sections):
        inner = f"{section}: {{{inner}}}"
    return inner


@cache
def _own_places() -> dict[str, list[str]]:
    """Last part of each of our keys → the dotted keys that end in it."""
    places: dict[str, list[str]] = {}
    for key in all_keys():
        places.setdefault(key.rpartition(".")[2], []).append(key)
    return places


def _nearest(
    name: str, value: str | None, section: str, known: list[str], on_command_line: bool
) -> str | None:
    """The hint for a misspelt or misplaced key of ours, None where nothing is near."""
    if name in all_keys() and "." in name and "*" not in name:
        text = value if value is not None and _PLAIN.fullmatch(value) else "..."
        return f"keys are nested: write `{nested(name, text)}`"
    elsewhere = _own_places().get(name, [])
    if 0 < len(elsewhere) <= _MAX_PLACES:
        return f"did you mean {_or(elsewhere)}?"
    near = get_close_matches(name.lower(), known, 1, _NEAR)
    if near:
        return f"did you mean `{near[0]}`?"
    others = get_close_matches(name.lower(), [n for n in _own_places() if len(n) > 3], 1, _NEAR_ELSEWHERE)
    if others and len(_own_places()[others[0]]) <= _MAX_PLACES:
        return f"did you mean {_or(_own_places()[others[0]])}?"
    theirs = get_close_matches(name.lower(), [*_names()], 1, 0.85)
    return _foreign(theirs[0], value, section, on_command_line) if theirs else None


def _or(keys: list[str]) -> str:
    return " or ".join(f"`{key}`" for key in keys)
