"""`--set key=value` → one mapping to lay over the recipe, with `--set` as its file.

A value that begins with a bracket or a quote is YAML; any other is taken as it stands, so that paths and
expressions need no quoting beyond the shell's. Where a recipe has one of two keys that exclude each other and
`--set` gives the other, the command line wins and the note says so. This module must not know the schema.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qlora_cli.config.files import merge
from qlora_cli.config.nodes import Entry, Mapping, Mark, Node, Scalar, parse
from qlora_cli.errors import Fault

FILE = "--set"
MARK = Mark(FILE)
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_INDEXED = re.compile(r"(.+?)(\.\d+|\[\d+\])(\..*)?")
# Setting the first from the command line takes the second out of the file.
_EXCLUDING = (
    ("train.max_steps", "train.epochs"),
    ("train.epochs", "train.max_steps"),
    ("optimizer.name", "optimizer.state_bits"),
    ("optimizer.state_bits", "optimizer.name"),
)


def read(overrides: Sequence[str], folder: Path) -> tuple[Mapping, list[Fault]]:
    """Read all `--set` options, in order.

    Args:
        overrides: `key=value` texts.
        folder: What relative paths count from.

    Returns:
        A mapping of what they set, later ones over earlier ones, and every fault.
    """
    root, faults = Mapping(MARK), []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        fault = _key_fault(override, key, equals)
        if fault is not None:
            faults.append(fault)
            continue
        node, found = _value(text.strip(), folder)
        faults += [Fault(f.code, f"`{key}`: {f.message}", FILE, key=key, hint=f.hint) for f in found]
        if node is not None:
            root = merge(root, _nest(key, node))
    return root, faults


def apply(root: Mapping, over: Mapping) -> tuple[Mapping, list[str]]:
    """Lay `--set` over the recipe.

    Returns:
        The merged mapping, and a note for each key of the recipe that was taken out because `--set` gives one
        that excludes it.
    """
    notes = []
    for given, excluded in _EXCLUDING:
        mine, theirs = _get(over, given), _get(root, excluded)
        if mine is None or theirs is None or _get(over, excluded) is not None or _is_null(mine):
            continue
        root = _without(root, excluded)
        if not _is_null(theirs):
            at = f"{theirs.mark.file}:{theirs.mark.place}"
            notes.append(f"`{excluded}` ({at}) is left out because `--set` gives `{given}`")
    return merge(root, over, keeps_marks=True), notes


def _key_fault(override: str, key: str, equals: str) -> Fault | None:
    """What is wrong with the left side, None where nothing is."""
    if not equals:
        return Fault("bad-override", f"`{override}` has no `=`", FILE, hint="write `--set lora.rank=8`")
    indexed = _INDEXED.fullmatch(key)
    if indexed:
        hint = f"lists are set as a whole: `--set '{indexed[1]}=[...]'`"
        return Fault("bad-override", f"`{key}` names one item of a list", FILE, key=key, hint=hint)
    if not _KEY.fullmatch(key):
        return Fault("bad-override", f"`{key}` is not a dotted key", FILE, hint="write `--set lora.rank=8`")
    if key == "include":
        return Fault("bad-override", "`include` is read from files only", FILE, key=key,
                     hint="write a recipe that includes both, or set the keys themselves")  # fmt: skip
    return None


def _value(text: str, folder: Path) -> tuple[Node | None, list[Fault]]:
    """The right side as a node."""
    if text[:1] not in ("[", "{", '"', "'"):
        return Scalar(MARK, text, True, folder), []
    return parse(text, FILE, folder, has_lines=False)


def _nest(key: str, node: Node) -> Mapping:
    """A dotted key and its value as nested mappings."""
    for name in reversed(key.split(".")):
        node = Mapping(MARK, {name: Entry(MARK, node)})
    assert isinstance(node, Mapping)
    return node


def _get(root: Mapping, key: str) -> Node | None:
    """The node of a dotted key, None where it is not given."""
    node: Node = root
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node.entries:
            return None
        node = node.entries[name].node
    return node


def _without(root: Mapping, key: str) -> Mapping:
    """A copy of the mapping without one dotted key."""
    name, _, rest = key.partition(".")
    entries = dict(root.entries)
    entry = entries.pop(name)
    if rest and isinstance(entry.node, Mapping):
        entries[name] = Entry(entry.mark, _without(entry.node, rest))
    return Mapping(root.mark, entries)


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.plain and node.text in ("", "~", "null", "Null", "NULL")
