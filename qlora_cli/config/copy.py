"""Copies of shipped recipes that run from anywhere: parts written into the text, paths made absolute.

The text is edited, not dumped, so that comments stay: they carry the trade-off of each key. This module must
not know the schema beyond which keys hold paths.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from qlora_cli import shipped
from qlora_cli.config import files
from qlora_cli.config.nodes import Items, Mapping, Node, Scalar
from qlora_cli.config.paths import absolute, model_place
from qlora_cli.errors import Fault, InputError

_PATH_KEYS = re.compile(r"data\.(train|validation)\.\d+\.path|data\.chat_template|lora\.continue_from")
_PLAIN = re.compile(r"[\w.+/~-]+", re.ASCII)
Edit: TypeAlias = "tuple[int, int, str]"  # start, end, what stands there instead


def shipped_recipe(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        InputError: If none has that name.
    """
    path = shipped.find_recipe(name)
    if path is not None:
        return path
    names = list(shipped.recipe_paths())
    near = get_close_matches(name.removesuffix(".yaml"), names, 1)
    hint = f"did you mean `{near[0]}`?" if near else None
    message = f"there is no shipped recipe `{name}`"
    raise InputError(Fault("recipe-missing", message, accepted=", ".join(names), hint=hint))


def copy_recipe(name: str, destination: Path | None) -> Path:
    """Write a shipped recipe with its parts and paths resolved.

    Args:
        name: A shipped recipe.
        destination: File or folder; None writes `NAME.yaml` in the current folder.

    Returns:
        The file that was written.

    Raises:
        InputError: If there is no such recipe, the file exists already or cannot be written.
    """
    source = shipped_recipe(name)
    target = destination if destination is not None else Path(source.name)
    if target.is_dir():
        target = target / source.name
    text = resolved_text(source)
    try:
        with open(target, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        message = "the file exists already and is left as it is"
        raise InputError(Fault("file-exists", message, str(target), hint="give another name")) from None
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InputError(Fault("not-writable", f"cannot write: {reason}", str(target))) from None
    return target


def resolved_text(source: Path) -> str:
    """The text of a recipe, with what its parts say written in and its paths absolute."""
    text = source.read_text(encoding="utf-8")
    own = yaml.compose(text, Loader=yaml.SafeLoader)
    merged = files.load(source, str(source)).root
    edits = [*_missing(own, merged, ""), *_paths(own, merged), *_include(own, text)]
    tail = ""
    for name, entry in merged.entries.items():
        if name not in _children(own):
            tail += f"{name}: {_flow(entry.node, name)}\n"
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return (text if text.endswith("\n") else f"{text}\n") + tail


def _children(node: Any) -> dict[str, tuple[Any, Any]]:
    """Key → key node and value node of a mapping."""
    return {key.value: (key, value) for key, value in node.value}


def _missing(own: Any, merged: Mapping, prefix: str) -> Iterator[Edit]:
    """Insertions of what only parts say, section by section; whole sections go to the end of the text."""
    children = _children(own)
    for name, entry in merged.entries.items():
        key = f"{prefix}{name}"
        if name in children:
            value = children[name][1]
            if isinstance(value, yaml.MappingNode) and isinstance(entry.node, Mapping):
                yield from _missing(value, entry.node, f"{key}.")
        elif prefix:
            line = f"{name}: {_flow(entry.node, key)}"
            if own.flow_style:
                at = own.start_mark.index + 1
                yield at, at, f"{line}, " if children else line
            else:
                first = own.value[0][0].start_mark
                yield first.index, first.index, f"{line}\n{' ' * first.column}"


def _paths(own: Any, merged: Mapping) -> Iterator[Edit]:
    """Replacements of relative paths by absolute ones."""
    for key, value in _scalars(own, ""):
        node: Node = merged
        for name in key.split("."):
            node = node.entries[name].node if isinstance(node, Mapping) else node
            node = node.items[int(name)] if isinstance(node, Items) and name.isdigit() else node
        if isinstance(node, Scalar) and node.text:
            new = _place(node, key)
            if new != node.text:
                yield value.start_mark.index, value.end_mark.index, _quoted(new)


def _scalars(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every single value with its dotted key, `include` left out."""
    if isinstance(node, yaml.MappingNode):
        for name, (_, value) in _children(node).items():
            if prefix or name != "include":
                yield from _scalars(value, f"{prefix}{name}.")
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _scalars(value, f"{prefix}{index}.")
    else:
        yield prefix[:-1], node


def _include(own: Any, text: str) -> Iterator[Edit]:
    """Removal of the lines of `include`."""
    if "include" in _children(own):
        key, value = _children(own)["include"]
        block = isinstance(value, yaml.SequenceNode) and not value.flow_style
        last = value.value[-1] if block else value
        end = text.find("\n", last.end_mark.index)
        yield key.start_mark.index, len(text) if end < 0 else end + 1, ""


def _flow(node: Node, key: str) -> str:
    """A node of a part on one line."""
    if isinstance(node, Mapping):
        inner = (f"{name}: {_flow(entry.node, f'{key}.{name}')}" for name, entry in node.entries.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(node, Items):
        return f"[{', '.join(_flow(item, f'{key}.{i}') for i, item in enumerate(node.items))}]"
    text = _place(node, key)
    return text if node.plain and text == node.text and _PLAIN.fullmatch(text) else _quoted(text)


def _place(node: Scalar, key: str) -> str:
    """A value as it has to be written in another folder."""
    if not node.text:
        return "null" if node.plain else ""
    if _PATH_KEYS.fullmatch(key) and not (node.plain and node.text in ("null", "~")):
        return str(absolute(node.text, node.folder))
    if key == "model.name_or_path":
        place = model_place(node.text, node.folder)
        return place if os.path.isdir(place) else node.text
    return node.text


def _quoted(text: str) -> str:
    """Text as YAML, in double quotes where it needs any."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
