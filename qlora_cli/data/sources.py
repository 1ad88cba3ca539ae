"""A data file → its rows, each with its origin: the file and the line a person sees in an editor.

JSON lines are read by our own reader, not by `datasets`: its JSON loader infers types for a whole file, so
a text "007" beside a number becomes 7 and a text that looks like a date becomes one, and it stops at the
first broken line (docs/decisions/0002-jsonl-reader.md). Here a fault of one row never ends the reading:
every fault of a file is found in one go. This module knows neither chats nor tokenizers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from qlora_cli.errors import Fault

FORMATS = ("auto", "chat", "instruction")
SUFFIXES = (".jsonl", ".ndjson")

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Source:
    """One file of examples, as the recipe lists it.

    Attributes:
        path: A file of JSON lines.
        format: One of `FORMATS`; `auto` is settled by the first row that can be recognised.
        name: What reports and scores call this source; the file stem where none is given.
        exact_match: Each row has one right answer, so generated answers are compared with it.
    """

    path: Path
    format: str = "auto"
    name: str = ""
    exact_match: bool = False

    @property
    def label(self) -> str:
        """The name, or the file stem where the recipe gives none."""
        return self.name or self.path.stem


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Where an example comes from.

    Attributes:
        file: Path of the file, as the source has it.
        row: Line in that file, counted from 1; blank lines count, as in an editor.
    """

    file: str
    row: int

    def __str__(self) -> str:
        """`file:row`, the form of every message."""
        return f"{self.file}:{self.row}"

    def fault(self, code: str, message: str, accepted: str | None = None, hint: str | None = None) -> Fault:
        """Make a fault that stands at this row."""
        return Fault(code, message, file=self.file, line=self.row, accepted=accepted, hint=hint)


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object of a source.

    Attributes:
        origin: File and line.
        fields: The object, exactly as written: no key is added, dropped or cast.
    """

    origin: Origin
    fields: dict[str, Any]


class _RowError(ValueError):
    """A line that is JSON to Python's parser but not to us; carries code and hint of its fault."""

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


def read_rows(source: Source, faults: list[Fault]) -> Iterator[Row]:
    """Read the rows of a file of JSON lines in order, one object a line.

    Only a line feed ends a row, so U+2028 and U+0085 may stand in a string. A byte order mark, carriage
    returns before a line feed and blank lines are no part of any row.

    Args:
        source: The file to read.
        faults: Receives a fault for each row that cannot be read, and for a file without rows.

    Yields:
        Every row that is a JSON object.
    """
    file = str(source.path)
    if source.path.suffix.lower() not in SUFFIXES:
        faults.append(_unknown_type(source.path))
        return
    found = 0
    try:
        with source.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                data = line.removeprefix(_BOM) if number == 1 else line
                data = data.strip()  # ASCII blanks only: bytes know no U+2028
                if not data:
                    continue
                found += 1
                origin = Origin(file, number)
                fields = _parse_line(data, origin, faults)
                if fields is not None:
                    yield Row(origin, fields)
                elif number == 1 and data.startswith(_UTF16_BOMS):
                    return  # one fault says it; every other line would repeat it
    except OSError as error:
        faults.append(Fault("unreadable-file", f"cannot be read: {error.strerror or error}", file=file))
        return
    if not found:
        faults.append(
            Fault(
                "empty-file",
                "holds no rows",
                file=file,
                hint="the step that writes this file may have failed; fill it or take it out of the recipe",
            )
        )


def _unknown_type(path: Path) -> Fault:
    """The fault of a path that is not a file of JSON lines by its name."""
    what = (
        "is a folder"
        if path.is_dir()
        else f"ends in `{path.suffix}`"
        if path.suffix
        else "has no file ending"
    )
    return Fault(
        "unknown-file-type",
        f"{what}; only files of JSON lines are read",
        file=str(path),
        accepted=", ".join(SUFFIXES) + ": one JSON object a line, UTF-8",
    )


def _parse_line(data: bytes, origin: Origin, faults: list[Fault]) -> dict[str, Any] | None:
    """Parse one line, or record why it cannot be used."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = data.startswith(_UTF16_BOMS)
        what = (
            "starts like UTF-16" if utf16 else f"byte 0x{data[error.start]:02x} at position {error.start + 1}"
        )
        faults.append(origin.fault("not-utf8", f"is not UTF-8: {what}", hint="write the file again as UTF-8"))
        return None
    try:
        value = _DECODER.decode(text)
        if "\\ud" in text or "\\uD" in text:
            _refuse_lone_surrogates(value)
    except _RowError as error:
        faults.append(origin.fault(error.code, str(error), hint=error.hint))
    except json.JSONDecodeError as error:
        reason = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        message = f"is not JSON: {reason} at position {error.pos + 1}"
        faults.append(origin.fault("broken-row", message, accepted="one whole JSON object a line"))
    except RecursionError:
        faults.append(origin.fault("broken-row", "is nested too deeply to be read"))
    except ValueError:  # what is left: an integer beyond Python's limit of digits
        faults.append(origin.fault("broken-row", "holds a number of more than 4,300 digits"))
    else:
        if isinstance(value, dict):
            return value
        shown = text if len(text) <= 40 else text[:37] + "..."
        faults.append(
            origin.fault(
                "not-an-object", f"`{shown}` is not a JSON object", accepted="one JSON object a line"
            )
        )
    return None


def _pairs_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing a key that is given twice: JSON readers keep one of the two in silence."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise _RowError("duplicate-field", f"has the key `{twice}` twice in one object")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    """NaN and the infinities are Python's, not JSON's."""
    raise _RowError("broken-row", f"`{name}` is not JSON", hint="write null, a number or a string")


def _finite_float(text: str) -> float:
    """Refuse a number that would become infinite; a template would write it as `Infinity`."""
    value = float(text)
    if math.isinf(value):
        raise _RowError("broken-row", f"the number `{text}` is too large", hint="write it as a string")
    return value


def _refuse_lone_surrogates(value: Any) -> None:
    """Refuse half of a surrogate pair: it is no character, and no tokenizer can encode it."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        message = f"holds `{half}`, half of a surrogate pair, which is no character"
        raise _RowError(
            "lone-surrogate", message, hint="write the whole pair, or the character itself"
        ) from None


_DECODER = json.JSONDecoder(
    object_pairs_hook=_pairs_once, parse_constant=_refuse_constant, parse_float=_finite_float
)
