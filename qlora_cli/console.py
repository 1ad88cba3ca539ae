"""What the program writes: data to stdout, everything people read to stderr.

Colour only on a terminal and never under `NO_COLOR`; a progress bar only on a terminal, else a line every
30 s; characters that a stream cannot print are written as escapes, and so are control characters, because
messages repeat what stands in users' files. This module must not know recipes, runs or torch.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from qlora_cli.errors import Fault, InputError, QloraError

LINE_EVERY_S = 30.0  # between progress lines where there is no terminal
MAX_FAULTS_SHOWN = 40  # the JSON document has all of them
_COLORS = {"error": "31;1", "warning": "33;1", "hint": "36"}


@dataclass(slots=True)
class Progress:
    """Steps done of a total; made by `Console.progress`."""

    total: int
    label: str
    _write: Callable[[str], None]
    _clock: Callable[[], float]
    _bar: Any = None
    done: int = 0
    _facts: Mapping[str, object] = field(default_factory=dict)
    _began: float = 0.0
    _last: float = 0.0

    def __post_init__(self) -> None:
        """Start the clock."""
        self._began = self._last = self._clock()

    def advance(self, steps: int = 1, **facts: object) -> None:
        """Count steps and show facts about the last one.

        Args:
            steps: How many were done.
            facts: Short named values, such as `loss="1.23"`.
        """
        self.done += steps
        self._facts = facts or self._facts
        if self._bar is not None:
            self._bar.set_postfix_str(_named(self._facts), refresh=False)
            self._bar.update(steps)
        elif self._clock() - self._last >= LINE_EVERY_S:
            self._last = self._clock()
            self._write(self._line())

    def _line(self) -> str:
        """The state as one line: count, facts, time left."""
        spent = self._clock() - self._began
        left = spent / self.done * (self.total - self.done) if self.done else 0.0
        named = f", {_named(self._facts)}" if self._facts else ""
        return f"{self.label}: {self.done}/{self.total}{named}, {_duration(left)} left"


class Console:
    """The program's two streams."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        json: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the streams as they are now.

        Args:
            quiet: Drop progress, tables and remarks; warnings stay.
            json: stdout carries JSON only.
            out: Instead of `sys.stdout`.
            err: Instead of `sys.stderr`.
            clock: Seconds, for progress without a terminal.
        """
        self.quiet = quiet
        self.json = json
        self._out = out if out is not None else sys.stdout
        self._err = err if err is not None else sys.stderr
        self._clock = clock
        self._warned: set[str] = set()
        self._bar: Any = None

    def out(self, text: str) -> None:
        """Write a line of data to stdout, as it stands."""
        self._out.write(_printable(text, self._out) + "\n")
        self._out.flush()

    def out_json(self, document: object) -> None:
        """Write one JSON document on one line of stdout; NaN and infinity become null, JSON has neither."""
        is_unicode = "utf" in (self._out.encoding or "utf-8").lower()
        self._out.write(json.dumps(_finite(document), ensure_ascii=not is_unicode, allow_nan=False) + "\n")
        self._out.flush()

    def say(self, line: str) -> None:
        """Write a remark to stderr; `--quiet` drops it."""
        if not self.quiet:
            self._line(line)

    def warn(self, message: str, hint: str | None = None) -> None:
        """Write a warning to stderr, once each; `--quiet` keeps it.

        Args:
            message: What may be wrong; lower case, no period.
            hint: What can be done about it.
        """
        if message in self._warned:
            return
        self._warned.add(message)
        self._line(f"{self._paint('warning')}: {message}")
        if hint is not None:
            self._line(f"{self._paint('hint')}: {hint}")

    def error(self, error: QloraError) -> None:
        """Write an error: to stderr for people, with `--json` to stdout as a document too."""
        self._line(render_error(error, self._paint))
        if self.json:
            self.out_json(error_document(error))

    def table(self, rows: Iterable[Sequence[object]], headers: Sequence[str]) -> None:
        """Write a table to stderr, numbers to the right; `--quiet` drops it.

        Args:
            rows: Cells, as many in each row as there are headers.
            headers: Titles of the columns.
        """
        if not self.quiet:
            self._line(render_table(rows, headers))

    @contextmanager
    def progress(self, total: int, label: str) -> Iterator[Progress]:
        """Show how far a loop is: a bar on a terminal, else a line every 30 s; nothing under `--quiet`.

        Args:
            total: Steps there will be.
            label: What is counted, one word.
        """
        if self.quiet:
            yield Progress(total, label, lambda _: None, self._clock)
            return
        if not self._is_terminal():
            yield Progress(total, label, self._line, self._clock)
            return
        from tqdm import tqdm

        with tqdm(
            total=total, desc=label, file=self._err, ascii=not _can_print("█", self._err), dynamic_ncols=True
        ) as bar:
            self._bar = bar
            try:
                yield Progress(total, label, self._line, self._clock, bar)
            finally:
                self._bar = None

    def _line(self, text: str) -> None:
        """Write to stderr, above the bar where there is one."""
        text = _printable(text, self._err)
        if self._bar is not None:
            self._bar.write(text, file=self._err)
            return
        self._err.write(text + "\n")
        self._err.flush()

    def _is_terminal(self) -> bool:
        return self._err.isatty() and os.environ.get("TERM") != "dumb"

    def _paint(self, word: str) -> str:
        """A word that opens a message, coloured where that is wanted."""
        if os.environ.get("NO_COLOR") or not self._is_terminal():
            return word
        return f"\x1b[{_COLORS[word]}m{word}\x1b[0m"


def render_error(error: QloraError, paint: Callable[[str], str] = str) -> str:
    """An error as people read it: every fault, then how many there are.

    Args:
        error: What was raised.
        paint: Colours the words `error` and `hint`.
    """
    shown = error.faults[:MAX_FAULTS_SHOWN]
    lines = [_render_fault(fault, paint) for fault in shown]
    rest = len(error.faults) - len(shown)
    if rest:
        lines.append(f"... and {rest} more; `--json` lists all")
    if len(error.faults) > 1:
        lines.append(_count(error))
    return "\n".join(lines)


def error_document(error: QloraError) -> dict[str, Any]:
    """An error as programs read it; `code` is that of the first fault."""
    first = error.faults[0]
    message = first.message if len(error.faults) == 1 else _count(error)
    return {
        "error": {
            "code": first.code,
            "message": message,
            "faults": [fault.as_json() for fault in error.faults],
        }
    }


def render_table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """Columns as wide as their widest cell; a column of numbers stands to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(headers, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [len(column) > 1 and all(map(_is_number, column[1:])) for column in columns]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def _render_fault(fault: Fault, paint: Callable[[str], str]) -> str:
    where = f"{_one_line(fault.where)}: " if fault.where else ""
    lines = [f"{paint('error')}: {where}{_one_line(fault.message)}"]
    if fault.accepted is not None:
        lines.append(f"  accepted: {_one_line(fault.accepted)}")
    if fault.hint is not None:
        lines.append(f"{paint('hint')}: {_one_line(fault.hint)}")
    return "\n".join(lines)


def _count(error: QloraError) -> str:
    count = f"{len(error.faults)} error{'s'[: len(error.faults) != 1]}"
    return f"{count}; nothing was started" if isinstance(error, InputError) else count


def _one_line(text: str) -> str:
    """Control characters as escapes, so that what stands in a file cannot steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _printable(text: str, stream: TextIO) -> str:
    """Text that the stream can take; other characters as escapes."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _can_print(text: str, stream: TextIO) -> bool:
    return _printable(text, stream) == text


def _finite(value: object) -> object:
    """A document without NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _named(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%").replace(",", ""))
    except ValueError:
        return text in ("", "-")
    return True


def _duration(seconds: float) -> str:
    """Seconds as `h:mm:ss` or `m:ss`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
