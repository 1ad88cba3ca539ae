"""What a key accepts, read off the schema's annotations: it can judge a value and describe itself.

A `Kind` says which words, numbers, texts, lists or sections a key takes. The loader judges text by it and the
messages and `docs/recipe.md` describe it, so a range is written once, in `schema.py`. This module must not
know YAML.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range of numbers; None is open."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether `value` lies inside."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """The range in words, empty where it is open."""
        low = _say("", self.least) or _say("above ", self.above)
        high = _say("to ", self.most) or _say("below ", self.below)
        if self.least is not None and high:
            return f"from {low} {high}"
        if self.least is not None:
            return f"from {low} up"
        return f"{low} and {high}" if low and high else low or high


@dataclass(frozen=True, slots=True)
class Kind:
    """What a key accepts; several at once for a union."""

    words: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()  # of a Literal
    flags: tuple[bool, ...] = ()
    integer: Bounds | None = None
    number: Bounds | None = None
    text: bool = False
    path: bool = False
    null: bool = False
    section: type[BaseModel] | None = None
    item: Kind | None = None
    least_items: int = 0
    most_items: int | None = None

    def describe(self) -> str:
        """Everything accepted, in words."""
        parts = [*self.words, *(str(number) for number in self.numbers)]
        parts += ["true" if flag else "false" for flag in sorted(self.flags, reverse=True)]
        if self.integer is not None and self.number is None:
            parts.append(f"a whole number {self.integer}".strip())
        if self.number is not None:
            parts.append(f"a number {self.number}".strip())
        if self.path:
            parts.append("a path")
        if self.text:
            parts.append("text")
        if self.section is not None:
            parts.append(f"a mapping of {', '.join(self.section.model_fields)}")
        if self.item is not None:
            parts.append(f"a list of {self._count()}{self.item._plural()}")
        if self.null:
            parts.append("null")
        return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"

    def _count(self) -> str:
        if self.most_items is not None and self.most_items == self.least_items:
            return f"{self.most_items} "
        return ""

    def _plural(self) -> str:
        if self.section is not None:
            return f"mappings of {', '.join(self.section.model_fields)}"
        if self.number is not None:
            return f"numbers {self.number}".strip()
        return "texts"


def _say(word: str, bound: float | None) -> str:
    """A bound in words, empty where there is none."""
    return "" if bound is None else f"{word}{bound:g}" if abs(bound) < 1e6 else f"{word}{bound:.0f}"


@cache
def fields_of(section: type[BaseModel]) -> dict[str, Kind]:
    """The kind of every key of a section."""
    return {
        name: replace(
            _kind(field.annotation, tuple(field.metadata)), null=_takes_null(field, _kind(field.annotation))
        )
        for name, field in section.model_fields.items()
    }


def is_filled(field: FieldInfo) -> bool:
    """Whether the loader writes the key's value where it is left out."""
    return isinstance(field.json_schema_extra, dict) and "filled" in field.json_schema_extra


def filled_with(field: FieldInfo) -> str:
    """The rule by which the loader fills a key, for the reference."""
    extra = field.json_schema_extra
    return str(extra["filled"]) if isinstance(extra, dict) and "filled" in extra else ""


def _takes_null(field: FieldInfo, kind: Kind) -> bool:
    return kind.null or is_filled(field)


def _kind(annotation: Any, metadata: tuple[Any, ...] = ()) -> Kind:
    """The kind of an annotation with its constraints."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(args[0], (*metadata, *_constraints(args[1:])))
    if origin in (Union, types.UnionType):
        return _joined([_kind(arg, metadata) for arg in args])
    if origin is Literal:
        return Kind(
            words=tuple(a for a in args if isinstance(a, str)),
            numbers=tuple(a for a in args if isinstance(a, int) and not isinstance(a, bool)),
            flags=tuple(a for a in args if isinstance(a, bool)),
        )
    if origin is tuple:
        least = next((m.min_length for m in metadata if isinstance(m, annotated_types.MinLen)), 0)
        if args[-1] is Ellipsis:
            return Kind(item=_kind(args[0]), least_items=least)
        return Kind(item=_kind(args[0]), least_items=len(args), most_items=len(args))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Kind(section=annotation)
    simple = {
        bool: Kind(flags=(True, False)),
        int: Kind(integer=_bounds(metadata)),
        float: Kind(number=_bounds(metadata)),
        str: Kind(text=True),
        Path: Kind(path=True),
        type(None): Kind(null=True),
    }
    return simple[annotation]


def _joined(kinds: list[Kind]) -> Kind:
    """One kind that accepts what any of several accepts; each field is used by one of them at most."""
    joined = Kind()
    for kind in kinds:
        given = {name: getattr(kind, name) for name in Kind.__slots__ if getattr(kind, name)}
        joined = replace(joined, **given)
    return joined


def _constraints(metadata: tuple[Any, ...]) -> list[Any]:
    """Constraints inside `Annotated`, where pydantic keeps them in a FieldInfo."""
    found: list[Any] = []
    for entry in metadata:
        found += entry.metadata if isinstance(entry, FieldInfo) else [entry]
    return found


def _bounds(metadata: tuple[Any, ...]) -> Bounds:
    """The range that the constraints leave."""
    values: dict[str, float] = {}
    for entry in metadata:
        for kind, attribute, name in (
            (annotated_types.Ge, "ge", "least"),
            (annotated_types.Gt, "gt", "above"),
            (annotated_types.Le, "le", "most"),
            (annotated_types.Lt, "lt", "below"),
        ):
            if isinstance(entry, kind):
                values[name] = getattr(entry, attribute)
    return Bounds(**values)
