"""YAML text → a tree of nodes that know their position; what YAML cannot say for a recipe is a fault.

PyYAML reads the events; the tree is built here because its loaders keep the last of two equal keys, read
`1e-4` as text and `off` as a boolean, and forget positions. Scalars stay text: the schema says later what
they mean. Keys are always text, so `yes:`, `1:` and `null:` are the words they look like. This module must
not know the schema, the file system or the console.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from qlora_cli.config.syntax import CONTROL, control_fault, explain
from qlora_cli.errors import Fault

MAX_LEVELS = 32  # the schema needs 5; deeper nesting is an accident or an attack
MAX_VALUES = 20_000  # with aliases written out; keeps an alias bomb from being unfolded


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in an input: file as the user wrote it, line and column from 1 (None for `--set`)."""

    file: str
    line: int | None = None
    column: int | None = None

    @property
    def where(self) -> tuple[str, int | None, int | None]:
        """File, line and column, in the order a `Fault` takes them."""
        return self.file, self.line, self.column

    @property
    def place(self) -> str:
        """`line:column`, or the file's name where there are no lines."""
        return self.file if self.line is None else f"{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value, still text."""

    mark: Mark
    text: str
    plain: bool  # False where it is quoted or a block, so that it can only be text
    folder: Path  # what a relative path in it counts from
    size: int = 1
    levels: int = 0


@dataclass(frozen=True, slots=True)
class Items:
    """A list of nodes."""

    mark: Mark
    items: list[Node] = field(default_factory=list)
    size: int = 1
    levels: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a mapping: where the key stands, and its value."""

    mark: Mark
    node: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys in file order."""

    mark: Mark
    entries: dict[str, Entry] = field(default_factory=dict)
    size: int = 1
    levels: int = 1


Node: TypeAlias = "Scalar | Items | Mapping"


class _Refused(Exception):
    """Reading cannot go on after this fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not been read."""

    mark: Mark
    anchor: str | None
    is_mapping: bool
    children: list[Node] = field(default_factory=list)


def parse(text: str, file: str, folder: Path, has_lines: bool = True) -> tuple[Node | None, list[Fault]]:
    """Read one YAML document.

    Args:
        text: The document, without byte order mark.
        file: Name that faults carry.
        folder: What relative paths in the document count from.
        has_lines: False for `--set` values, whose marks carry no line.

    Returns:
        The root node, None where the document is empty or cannot be read; and every fault found. After a
        fault of syntax nothing more can be read; duplicate keys and tags are all listed.
    """
    starts = [0, *(m.end() for m in re.finditer(r"\r\n|\r|\n", text))]

    def mark_at(index: int) -> Mark:
        line = bisect_right(starts, index)
        return Mark(file, line, index - starts[line - 1] + 1) if has_lines else Mark(file)

    control = CONTROL.search(text)
    if control:
        return None, [control_fault(control.group(), mark_at(control.start()))]
    builder = _Builder(mark_at, folder)
    try:
        root = builder.build(yaml.parse(text, Loader=yaml.SafeLoader))
    except _Refused as refused:
        return None, [*builder.faults, refused.fault]
    except yaml.MarkedYAMLError as error:
        return None, [*builder.faults, explain(error, text, mark_at)]
    return root, builder.faults


class _Builder:
    """Turns parser events into nodes, without recursion."""

    def __init__(self, mark_at: Callable[[int], Mark], folder: Path) -> None:
        self.mark_at = mark_at
        self.folder = folder
        self.faults: list[Fault] = []
        self.anchors: dict[str, Node] = {}
        self.open: list[_Open] = []
        self.root: Node | None = None
        self.documents = 0

    def build(self, events: Iterator[Any]) -> Node | None:
        """Read all events; return the root node, None for an empty document."""
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                if self.documents > 1:
                    raise _Refused(
                        self._fault(
                            "multiple-documents",
                            event,
                            "a second document begins here",
                            hint="keep one document per file; remove the `---` line",
                        )
                    )
            elif isinstance(event, yaml.AliasEvent):
                self._add(self._alias(event), event)
            elif isinstance(event, yaml.NodeEvent):
                self._start(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._close(event)
        return self.root

    def _fault(self, code: str, event: Any, message: str, hint: str | None = None) -> Fault:
        mark = self.mark_at(event.start_mark.index)
        return Fault(code, message, *mark.where, hint=hint)

    def _start(self, event: Any) -> None:
        """Take in a scalar, or open a collection."""
        mark = self.mark_at(event.start_mark.index)
        if event.tag is not None:
            self.faults.append(
                self._fault(
                    "yaml-tag",
                    event,
                    f"`{_tag(event.tag)}` is a YAML tag",
                    hint="remove it; the key decides how its value is read",
                )
            )
        if isinstance(event, yaml.ScalarEvent):
            plain = event.style is None or event.style == ""
            node = Scalar(mark, event.value, plain, self.folder)
            if event.anchor is not None:
                self.anchors[event.anchor] = node
            self._add(node, event)
            return
        self.open.append(_Open(mark, event.anchor, isinstance(event, yaml.MappingStartEvent)))
        if len(self.open) > MAX_LEVELS:
            raise _Refused(self._fault("too-deep", event, f"nested deeper than {MAX_LEVELS} levels"))

    def _close(self, event: Any) -> None:
        """Finish the innermost collection."""
        done = self.open.pop()
        size = 1 + sum(child.size for child in done.children)
        levels = 1 + max((child.levels for child in done.children), default=0)
        node: Node
        if done.is_mapping:
            node = Mapping(done.mark, self._entries(done.children), size, levels)
        else:
            node = Items(done.mark, done.children, size, levels)
        if done.anchor is not None:
            self.anchors[done.anchor] = node
        self._add(node, event)

    def _add(self, node: Node, event: Any) -> None:
        """Put a finished node where it belongs."""
        if node.size > MAX_VALUES or len(self.open) + node.levels > MAX_LEVELS:
            raise _Refused(
                self._fault(
                    "too-large",
                    event,
                    f"aliases unfold to more than {MAX_VALUES} values or {MAX_LEVELS} levels",
                    hint="write the values out without `*` aliases",
                )
            )
        if self.open:
            self.open[-1].children.append(node)
        else:
            self.root = node

    def _alias(self, event: Any) -> Node:
        """The node an alias stands for."""
        if any(collection.anchor == event.anchor for collection in self.open):
            raise _Refused(
                self._fault("alias-cycle", event, f"`*{event.anchor}` stands inside what it repeats")
            )
        if event.anchor not in self.anchors:
            raise _Refused(
                self._fault(
                    "unknown-alias",
                    event,
                    f"`*{event.anchor}` repeats nothing: there is no `&{event.anchor}` above",
                    hint="quote the value if it begins with `*`",
                )
            )
        return self.anchors[event.anchor]

    def _entries(self, children: list[Node]) -> dict[str, Entry]:
        """Keys and values of a mapping; keys given twice and keys that are no words are faults."""
        entries: dict[str, Entry] = {}
        for key, value in zip(children[::2], children[1::2], strict=True):
            mark = key.mark
            where = mark.where
            if not isinstance(key, Scalar):
                self.faults.append(
                    Fault(
                        "bad-key",
                        "a list or mapping cannot be a key",
                        *where,
                        hint="keys are words, e.g. `rank: 16`",
                    )
                )
            elif key.plain and key.text == "<<":
                self.faults.append(
                    Fault(
                        "merge-key",
                        "merge keys (`<<`) are not read",
                        *where,
                        hint="put shared keys into a file and list it under `include`",
                    )
                )
            elif key.text in entries:
                first = entries[key.text].mark
                self.faults.append(
                    Fault(
                        "duplicate-key",
                        f"`{key.text}` is given twice, first at {first.place}",
                        *where,
                        key=key.text,
                        hint="keep one of the two",
                    )
                )
                entries[key.text] = Entry(first, value)
            else:
                entries[key.text] = Entry(mark, value)
        return entries


def _tag(tag: str) -> str:
    """A tag as it is usually written."""
    return tag.replace("tag:yaml.org,2002:", "!!")
