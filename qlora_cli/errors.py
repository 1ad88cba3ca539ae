"""What can go wrong, as values: a `Fault` is one thing wrong, an exception carries all that were found.

Three exceptions map to the exit codes in `qlora_cli.cli`: `InputError` 2 (nothing was started, nothing
written), `RunError` 1 (the run failed), `Interrupted` 130 (stopped, checkpoint saved). This module knows
neither the terminal nor any other module of the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong in an input or a run.

    Attributes:
        code: Stable, kebab-case, what tests and documentation refer to, e.g. `unknown-key`.
        message: What happened with the value found; lower case, no period.
        file: Path as the user wrote it, or None when no file is concerned.
        line: Line in `file`, or row of a data file, counted from 1.
        column: Column in `line`, counted from 1.
        key: Dotted recipe key, e.g. `lora.rank`.
        accepted: Every accepted value, or the type and range.
        hint: The command or the line to write next.
    """

    code: str
    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    key: str | None = None
    accepted: str | None = None
    hint: str | None = None

    @property
    def where(self) -> str:
        """`file:line:column` as far as known, else the empty string."""
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)

    def as_json(self) -> dict[str, str | int | None]:
        """The object that stands in the `faults` list of an error document."""
        return {
            "code": self.code,
            "message": self.message,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "key": self.key,
            "accepted": self.accepted,
            "hint": self.hint,
        }


class QloraError(Exception):
    """Base of the package's own errors; carries every fault that was found, in input order."""

    exit_code = EXIT_FAILED

    def __init__(self, faults: Fault | Sequence[Fault]) -> None:
        """Keep the faults.

        Args:
            faults: One fault or several; at least one.
        """
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        assert self.faults, "an error names at least one fault"
        super().__init__("; ".join(f"{f.where}: {f.message}" if f.where else f.message for f in self.faults))


class InputError(QloraError):
    """The input is wrong: nothing was started, nothing written."""

    exit_code = EXIT_INPUT


class RunError(QloraError):
    """The run failed; what was saved before stays."""

    exit_code = EXIT_FAILED


class Interrupted(QloraError):
    """Stopped by Ctrl-C or SIGTERM; a checkpoint was saved where training had begun."""

    exit_code = EXIT_INTERRUPTED
