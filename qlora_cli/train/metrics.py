"""One JSON object a step in metrics.jsonl, and the running figures that the progress line shows."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class StepMetrics:
    """What is known about one optimizer step.

    Attributes:
        step: Counted from 1.
        epoch: Epochs done after the step.
        loss: Mean over the step's supervised tokens, nats.
        grad_norm: Global L2 norm of the gradient before clipping.
        learning_rate: Rate the step used.
        tokens: Tokens the step processed, padding not counted.
        supervised_tokens: Tokens with a label.
        step_ms: Wall time of the whole step.
        peak_mib: Highest device memory allocated so far; on CPU the highest resident memory of the process.
        paging: The optimizer's record of the step.
        eval: Fields of an evaluation made after the step, e.g. `eval_loss`; empty without one.
    """

    step: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    supervised_tokens: int
    step_ms: float
    peak_mib: float
    paging: dict[str, Any]
    eval: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of wall time."""
        return self.tokens / self.step_ms * 1e3

    def as_json(self) -> dict[str, Any]:
        """The object of one line in metrics.jsonl."""
        return {
            "step": self.step,
            "epoch": round(self.epoch, 6),
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "step_ms": round(self.step_ms, 2),
            "peak_mib": round(self.peak_mib, 1),
            "paging": self.paging,
            **self.eval,
        }


class MetricsFile:
    """Appends to metrics.jsonl; a line is written at once, so a killed run keeps what it had."""

    def __init__(self, path: Path, keep_until_step: int) -> None:
        """Open the file, without the lines of steps that will be trained again.

        Args:
            path: The file; made when it is not there.
            keep_until_step: Last step whose line stays; 0 starts an empty file.
        """
        kept = [line for line in _lines(path) if line["step"] <= keep_until_step]
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in kept)
        self._path = path

    def append(self, metrics: StepMetrics) -> None:
        """Write the line of one step."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics.as_json(), allow_nan=False) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a metrics file; a last line cut by a kill is left out."""
    if not path.is_file():
        return []
    found = []
    for text in path.read_text("utf-8").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            found.append(line)
    return found


def host_peak_mib() -> float:
    """Highest resident memory of this process so far, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024  # bytes on macOS, KiB elsewhere
