"""The installed `qlora` as a process of its own, in a folder with a recipe and a few rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

QLORA = Path(sys.executable).parent / "qlora"

ROWS = [
    ("How many legs has a spider?", "Eight."),
    ("Name a colour.", "Blue is a colour."),
    ("Write a short line about rain.", "Rain falls on the roof."),
    ("What bird is this, tall and grey?", "A heron."),
    ("List two days.", "Monday and Tuesday."),
    ("Which is longer, the river or the road?", "The road is longer."),
]

RECIPE = """\
model:
  name_or_path: tiny_model
lora: {rank: 4, alpha: 8}
data:
  train: [{path: train.jsonl}]
  validation: [{path: validation.jsonl, exact_match: true}]
  max_seq_len: 128
optimizer:
  learning_rate: 1e-2
  paging: {vram_budget_mib: 0}
schedule: {name: constant}
train: {max_steps: 4, micro_batch_size: 2, gradient_accumulation_steps: 2, save_every_steps: 2}
"""

Qlora = Callable[..., subprocess.CompletedProcess[str]]


def write_rows(path: Path, rows: list[tuple[str, str]]) -> None:
    turns = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in rows
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in turns), "utf-8")


@pytest.fixture
def work(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A folder with `tiny_model/`, `recipe.yaml`, `train.jsonl` and `validation.jsonl`."""
    write_rows(tmp_path / "train.jsonl", ROWS)
    write_rows(tmp_path / "validation.jsonl", [("Name a bird.", "A heron."), ("Name a day.", "Monday.")])
    (tmp_path / "recipe.yaml").write_text(RECIPE, "utf-8")
    return tmp_path


@pytest.fixture
def qlora(work: Path) -> Qlora:
    """Run the installed command in the work folder and return its exit code, stdout and stderr."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(QLORA), *words], cwd=work, capture_output=True, text=True, timeout=300, encoding="utf-8"
        )

    return call
