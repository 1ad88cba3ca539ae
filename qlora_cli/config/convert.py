"""Nodes → typed values, by the schema: every fault of type, range and spelling, with its position.

A scalar is read by what its key accepts: `off` is a word where the schema has that word and a boolean where
it wants one; `1e-4` is a number where it wants a number, text where it wants text. Quoted values are text.
Keys left out stay out: pydantic fills defaults afterwards, and judges the values a second time. This module
must not know rules between keys, files or the console.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from qlora_cli.config.kinds import Bounds, Kind, fields_of, is_filled
from qlora_cli.config.names import foreign_value, not_yet_value, unknown_key
from qlora_cli.config.nodes import Entry, Items, Mapping, Mark, Node, Scalar
from qlora_cli.config.paths import absolute, is_unicode
from qlora_cli.errors import Fault

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
# YAML 1.1's booleans, the ones PyYAML and people's other files use.
TRUES = frozenset({"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
FALSES = frozenset({"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,4})?")
_MAX_DIGITS = 40  # beyond any range of the schema, below CPython's limit of 4300 digits
_MAX_SHOWN = 60  # characters of a value that a message repeats
_REFUSED = object()


@dataclass(slots=True)
class Draft:
    """Values of the keys that were given, and which keys are not to be relied on."""

    values: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    bad_keys: set[str] = field(default_factory=set)
    folders: dict[str, Path] = field(default_factory=dict)  # what the text of each key counts from


def convert(root: Mapping, recipe: type[BaseModel], working_folder: Path) -> Draft:
    """Type every value of a merged recipe.

    Args:
        root: All keys, includes and overrides merged.
        recipe: The model of the whole recipe.
        working_folder: What `output_dir` counts from, wherever it is written.

    Returns:
        Nested values ready for `model_validate`, with every fault found on the way.
    """
    converter = _Converter(working_folder)
    converter.draft.values = converter.section(root, recipe, "", root.mark)
    return converter.draft


class _Converter:
    """The walk; `key` is the dotted key of the node at hand."""

    def __init__(self, working_folder: Path) -> None:
        self.draft = Draft()
        self.working_folder = working_folder

    def fault(
        self,
        code: str,
        message: str,
        mark: Mark,
        key: str,
        accepted: str | None = None,
        hint: str | None = None,
    ) -> Any:
        """Note a fault; returns the marker that drops the value."""
        self.draft.faults.append(Fault(code, message, *mark.where, key, accepted, hint))
        self.draft.bad_keys.add(key)
        return _REFUSED

    def section(self, node: Mapping, model: type[BaseModel], key: str, mark: Mark) -> dict[str, Any]:
        """A mapping whose keys are the fields of `model`; `mark` is where the section's own key stands."""
        kinds = fields_of(model)
        values: dict[str, Any] = {}
        for name, entry in node.entries.items():
            inner = f"{key}.{name}" if key else name
            if name not in kinds:
                shown = _shown(entry.node) if isinstance(entry.node, Scalar) else None
                self.draft.faults.append(unknown_key(key, name, shown, list(kinds), entry.mark))
                continue
            value = self.value(entry, kinds[name], inner)
            if value is not _REFUSED:
                values[name] = value
        self._missing(node, model, key, mark)
        return values

    def _missing(self, node: Mapping, model: type[BaseModel], key: str, mark: Mark) -> None:
        """Required keys that nobody wrote, down to the first required key of a required section."""
        for name, info in model.model_fields.items():
            if name in node.entries or not info.is_required() or is_filled(info):
                continue
            kind, inner = fields_of(model)[name], f"{key}.{name}" if key else name
            if kind.section is not None:
                self._missing(Mapping(mark), kind.section, inner, mark)
            else:
                self.fault("missing-key", f"`{inner}` is missing", mark, inner, accepted=kind.describe())

    def value(self, entry: Entry, kind: Kind, key: str) -> Any:
        """Any node, by the kind of its key."""
        node = entry.node
        if isinstance(node, Mapping) and kind.section is not None:
            return self.section(node, kind.section, key, entry.mark)
        if isinstance(node, Items) and kind.item is not None:
            return self.items(node, kind, key)
        if isinstance(node, Scalar):
            is_empty = node.plain and node.text == "" and node.mark.line is not None
            if is_empty and kind.section is not None and not kind.null:  # its keys are commented out
                return self.section(Mapping(entry.mark), kind.section, key, entry.mark)
            return self.scalar(node, kind, key)
        return self.wrong(node, kind, key)

    def items(self, node: Items, kind: Kind, key: str) -> Any:
        """A list, item by item."""
        assert kind.item is not None
        if len(node.items) < kind.least_items or (kind.most_items and len(node.items) > kind.most_items):
            found = f"{len(node.items)} item{'s'[: len(node.items) != 1]}"
            return self.fault("wrong-type", f"`{key}` has {found}", node.mark, key, accepted=kind.describe())
        values = []
        for index, item in enumerate(node.items):
            value = self.value(Entry(item.mark, item), kind.item, f"{key}.{index}")
            if value is _REFUSED:
                self.draft.bad_keys.add(key)
            values.append(None if value is _REFUSED else value)
        return tuple(values)

    def scalar(self, node: Scalar, kind: Kind, key: str) -> Any:
        """A single value: words first, then null, booleans, numbers, text."""
        text = node.text
        if text in kind.words:
            return text
        if not_yet := not_yet_value(key, text):
            return self.fault("not-available-yet", not_yet, node.mark, key, accepted=kind.describe())
        if node.plain and text in NULLS:
            return None if kind.null else self.empty(node, kind, key)
        if node.plain and kind.flags and text in TRUES | FALSES and (text in TRUES) in kind.flags:
            return text in TRUES
        if node.plain and (kind.numbers or kind.integer or kind.number):
            number = self.number(node, kind, key)
            if number is not None:
                return number
        if foreign := foreign_value(key, text):
            return self.fault("unknown-value", f"`{key}` is `{_shown(node)}`", node.mark, key,
                              accepted=kind.describe(), hint=foreign)  # fmt: skip
        if kind.text or kind.path:
            return self.text(node, kind, key)
        return self.wrong(node, kind, key)

    def number(self, node: Scalar, kind: Kind, key: str) -> Any:
        """A number where the key takes one; None where the text is no number."""
        text = node.text.replace("_", "")
        bounds = kind.integer or kind.number or Bounds()
        if _INTEGER.fullmatch(node.text):
            value = int(text) if len(text) <= _MAX_DIGITS else math.inf
            if kind.numbers:
                return int(value) if value in kind.numbers else self.wrong(node, kind, key)
            if not bounds.holds(value) or value == math.inf:
                return self.out_of_range(node, kind, key)
            return int(value) if kind.integer else float(value)
        if not _NUMBER.fullmatch(node.text):
            return None
        if kind.number is None:
            whole = float(text) if len(text) <= _MAX_DIGITS else math.inf
            hint = f"write `{int(whole)}`" if math.isfinite(whole) and whole == int(whole) else None
            return self.wrong(node, kind, key, hint)
        number = float(text)
        return (
            number if math.isfinite(number) and bounds.holds(number) else self.out_of_range(node, kind, key)
        )

    def text(self, node: Scalar, kind: Kind, key: str) -> Any:
        """Text or a path; a path keeps the folder it counts from beside it."""
        if not node.text.strip():
            return self.empty(node, kind, key)
        self.draft.folders[key] = node.folder
        if not kind.path:
            return node.text if is_unicode(node.text) else self.wrong(node, kind, key, "it is not UTF-8")
        if "\0" in node.text:
            return self.wrong(node, kind, key)
        return absolute(node.text, self.working_folder if key == "output_dir" else node.folder)

    def empty(self, node: Scalar, kind: Kind, key: str) -> Any:
        """Nothing where something is needed."""
        what = f"`{node.text}`" if node.text.strip() else "empty"
        return self.fault("wrong-type", f"`{key}` is {what}", node.mark, key, kind.describe())

    def out_of_range(self, node: Scalar, kind: Kind, key: str) -> Any:
        """A number outside the key's range."""
        message = f"`{key}` is `{_shown(node)}`, out of range"
        return self.fault("out-of-range", message, node.mark, key, accepted=kind.describe())

    def wrong(self, node: Node, kind: Kind, key: str, hint: str | None = None) -> Any:
        """A value of another type or another word."""
        hint = hint or _shape_hint(node, kind, key.rpartition(".")[2])
        if not isinstance(node, Scalar):
            what = "a list" if isinstance(node, Items) else "a mapping"
            return self.fault("wrong-type", f"`{key}` is {what}", node.mark, key, kind.describe(), hint)
        shown = _shown(node) if node.plain else f'"{_shown(node)}"'
        if kind.words and not (kind.integer or kind.number or kind.flags):
            from difflib import get_close_matches

            near = get_close_matches(node.text.lower(), kind.words, 1)
            hint = hint or (f"did you mean `{near[0]}`?" if near else None)
            return self.fault("unknown-value", f"`{key}` is `{shown}`", node.mark, key,
                              accepted=kind.describe(), hint=hint)  # fmt: skip
        if not node.plain and hint is None and _reads_unquoted(node.text, kind):
            hint = f"remove the quotes: `{node.text}`"
        message = f"`{key}` is `{shown}`{_not_what(kind)}"
        return self.fault("wrong-type", message, node.mark, key, accepted=kind.describe(), hint=hint)


def _shape_hint(node: Node, kind: Kind, name: str) -> str | None:
    """How to write what was meant, where a value has the right content in the wrong brackets."""
    text = _shown(node) if isinstance(node, Scalar) else ""
    item = kind.item.section if kind.item is not None else None
    if name.isdigit() and kind.section is not None and text:
        return f"write `{{path: {text}}}`" if "path" in kind.section.model_fields else None
    if item is not None and "path" in item.model_fields:
        if text and kind.section is not None and _NUMBER.fullmatch(text):
            return f"write `{name}: {{fraction: {text}}}`"
        return f"write `{name}: [{{path: {text or 'FILE'}}}]`"
    if kind.section is not None and text and "name_or_path" in kind.section.model_fields:
        return f"write `{name}: {{name_or_path: {text}}}`"
    return None


def _not_what(kind: Kind) -> str:
    """What a value was expected to be, where one word says it."""
    if kind.number is not None:
        return ", not a number"
    if kind.integer is not None:
        return ", not a whole number"
    if kind.flags:
        return ", not true or false"
    if kind.section is not None and kind.item is None:
        return ", not a mapping"
    if kind.item is not None and kind.section is None:
        return ", not a list"
    return ""


def _reads_unquoted(text: str, kind: Kind) -> bool:
    """Whether the quotes are all that is wrong."""
    if kind.flags and text in TRUES | FALSES:
        return True
    return bool((kind.number and _NUMBER.fullmatch(text)) or (kind.integer and _INTEGER.fullmatch(text)))


def _shown(node: Scalar) -> str:
    """A value short enough for a message."""
    text = " ".join(node.text.split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
