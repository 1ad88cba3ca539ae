"""A `Recipe` → YAML with every value written out, so that reading it back gives the same recipe.

Texts that another reader of YAML could take for something else (`off`, `1e4`, `null`, dates) are quoted, and
numbers are written so that YAML 1.1 sees numbers. This module must not know files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from qlora_cli.config.schema import Recipe

# Texts that are text in every YAML: words, hub ids, paths. All others are quoted.
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.ASCII)
_WORDS_WITH_MEANING = re.compile(r"(y|n|yes|no|on|off|true|false|null|none|nan|inf)", re.IGNORECASE)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that indents lists under their key and writes no aliases."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Text, quoted where a reader could take it for something else."""
    safe = _PLAIN.fullmatch(text) and not _WORDS_WITH_MEANING.fullmatch(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if safe else '"')


def _list(dumper: _Dumper, items: list[Any]) -> yaml.SequenceNode:
    """A list on one line where it holds single values."""
    flat = all(not isinstance(item, dict) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flat)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, every value written.

    Returns:
        UTF-8 text that `load_recipe` reads back to an equal recipe.
    """
    return yaml.dump(
        _simple(recipe.model_dump()),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=2**31,
        default_flow_style=False,
    )


def _simple(value: Any) -> Any:
    """Only what YAML has: mappings, lists, texts, numbers, booleans, null."""
    if isinstance(value, dict):
        return {key: _simple(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_simple(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
