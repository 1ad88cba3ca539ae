"""What became of every row: the content of `data_report.json`, and the warnings made from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from qlora_cli.data.sources import Origin
from qlora_cli.errors import Fault

SHOWN_ROWS = 20

_WARNINGS = {  # code → (message after the rows, hint)
    "overlong-dropped": ("more than {max_seq_len} tokens; dropped, as `overlong: drop` says", None),
    "overlong-truncated": ("more than {max_seq_len} tokens; cut, as `overlong: truncate` says", None),
    "truncated-to-nothing": (
        "cut to {max_seq_len} tokens no answer is left; dropped",
        "raise `data.max_seq_len`",
    ),
    "thinking-lost": (
        "the chat template leaves out thinking of earlier turns (`</think>`); trained as rendered",
        "to train the thinking too, make each such turn the last of a row of its own",
    ),
    "content-lost": (
        "the chat template leaves out or rewrites the content of a message; trained as rendered",
        "`qlora data preview` shows the text",
    ),
    "turn-without-end": (
        "the chat template writes nothing to close an answer in mid conversation, so no end is learned there",
        None,
    ),
    "eos-appended": (
        "the chat template writes nothing to close the last answer; the eos token is appended and supervised",
        None,
    ),
    "prompt-differs": (
        "the tokens before the answer are not those that generation starts from (first rows compared)",
        "use a chat template whose generation prompt is what it writes before an answer, to the last blank",
    ),
    "answer-merges-with-prompt": (
        "the first token of an answer also holds the end of the prompt, so generation begins otherwise",
        "begin the answer without blanks, or end the generation prompt with a special token",
    ),
}


@dataclass(slots=True)
class SourceReport:
    """The rows of one source.

    Attributes:
        name: Name of the source.
        path: Its file.
        format: `chat` or `instruction`, empty where no row could tell.
        reason: Why this format.
        num_read: Rows that were found.
        num_used: Examples made of them.
        num_tokens: Tokens of the used examples.
        num_supervised: Supervised ones of these tokens.
        longest: Tokens of the longest used example.
        rows: Row numbers by what was noted about them, a code of a warning each.
    """

    name: str
    path: str
    format: str = ""
    reason: str = ""
    num_read: int = 0
    num_used: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    longest: int = 0
    rows: dict[str, list[int]] = field(default_factory=dict)

    def note(self, code: str, row: int) -> None:
        """Record a row under a code."""
        self.rows.setdefault(code, []).append(row)

    @property
    def dropped(self) -> list[int]:
        """Rows that are not trained though they have no fault."""
        return sorted(self.rows.get("overlong-dropped", []) + self.rows.get("truncated-to-nothing", []))

    @property
    def truncated(self) -> list[int]:
        """Rows that are trained in part."""
        return self.rows.get("overlong-truncated", [])

    def as_json(self) -> dict[str, Any]:
        """The object of this source in `data_report.json`."""
        return {
            "name": self.name,
            "path": self.path,
            "format": self.format,
            "reason": self.reason,
            "rows": {
                "read": self.num_read,
                "used": self.num_used,
                "dropped": len(self.dropped),
                "truncated": len(self.truncated),
            },
            "tokens": self.num_tokens,
            "supervised_tokens": self.num_supervised,
            "longest": self.longest,
            "noted": {code: list(rows) for code, rows in sorted(self.rows.items())},
        }


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of the rows of a split.

    Attributes:
        sources: One report a source, in the order of the recipe.
        loss_on: `assistant`, `last_assistant` or `all`.
        max_seq_len: Tokens of the longest example that is allowed.
        overlong: `error`, `drop` or `truncate`.
        held_out: Rows that `validation.fraction` took out of these sources.
    """

    sources: tuple[SourceReport, ...]
    loss_on: str
    max_seq_len: int
    overlong: str
    held_out: tuple[Origin, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The content of `data_report.json`."""
        sources = [source.as_json() for source in self.sources]
        tokens, supervised = (sum(s[key] for s in sources) for key in ("tokens", "supervised_tokens"))
        return {
            "rows": {
                key: sum(source["rows"][key] for source in sources)
                for key in ("read", "used", "dropped", "truncated")
            },
            "tokens": tokens,
            "supervised_tokens": supervised,
            "supervised_share": round(supervised / tokens, 6) if tokens else 0.0,
            "loss_on": self.loss_on,
            "max_seq_len": self.max_seq_len,
            "overlong": self.overlong,
            "held_out": [str(origin) for origin in self.held_out],
            "sources": sources,
        }

    def warnings(self) -> list[Fault]:
        """One warning for each code and source, with its rows."""
        found = []
        for source in self.sources:
            for code, (message, hint) in _WARNINGS.items():
                rows = sorted(source.rows.get(code, []))
                if rows:
                    text = f"{name_rows(rows)}: {message.format(max_seq_len=self.max_seq_len)}"
                    found.append(Fault(code, text, file=source.path, hint=hint))
        return found


def name_rows(rows: Iterable[int]) -> str:
    """Name rows in a sentence, the first twenty of them.

    Args:
        rows: Row numbers in ascending order, at least one.
    """
    rows = list(rows)
    if len(rows) == 1:
        return f"row {rows[0]}"
    shown = ", ".join(map(str, rows[:SHOWN_ROWS]))
    more = len(rows) - SHOWN_ROWS
    return f"{len(rows)} rows ({shown}{f' and {more} more' if more > 0 else ''})"
