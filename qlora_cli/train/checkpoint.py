"""What a checkpoint holds besides the adapter: optimizer state, random state, position, and what must match.

Tensors are safetensors and the rest is JSON; nothing is pickled. The data position is the step number itself
(`train.steps`), so a checkpoint needs no loader state.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qlora_cli import run_folder

FORMAT = 1


@dataclass
class Best:
    """The lowest evaluation loss so far and the step it was measured after."""

    step: int
    eval_loss: float


@dataclass
class TrainerState:
    """Content of trainer_state.json.

    Attributes:
        step: Optimizer steps done.
        identity: What makes this run this run (dotted recipe keys and data fingerprints); must match on
        resume.
        best: Best evaluation so far, None before the first.
        versions: Package versions that wrote the checkpoint.
        format: Version of this layout.
    """

    step: int
    identity: dict[str, Any]
    best: Best | None = None
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write trainer_state.json and the random state of the moment into a checkpoint folder."""
        document = asdict(self) | {"python_rng": _python_rng()}
        run_folder.write_json(folder / run_folder.TRAINER_STATE, document)
        save_file(_torch_rng(), folder / run_folder.RNG)

    @staticmethod
    def read(folder: Path) -> TrainerState:
        """Read a checkpoint's trainer_state.json.

        Raises:
            ValueError: If the layout is of another version.
        """
        document = json.loads((folder / run_folder.TRAINER_STATE).read_text("utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"checkpoint format {document['format']}, this version reads {FORMAT}")
        best = document["best"]
        return TrainerState(
            step=document["step"],
            identity=document["identity"],
            best=Best(**best) if best else None,
            versions=document["versions"],
        )


def restore_rng(folder: Path) -> None:
    """Put every random generator back to where it was when the checkpoint in `folder` was written."""
    document = json.loads((folder / run_folder.TRAINER_STATE).read_text("utf-8"))
    version, state, gauss = document["python_rng"]
    random.setstate((version, tuple(state), gauss))
    states = load_file(folder / run_folder.RNG)
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in states:
                torch.cuda.set_rng_state(states[f"cuda.{index}"], index)


def _python_rng() -> list[Any]:
    version, state, gauss = random.getstate()
    return [version, list(state), gauss]


def _torch_rng() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    return states


def differing_keys(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Compare what makes a run with what a checkpoint recorded.

    Args:
        saved: `identity` of the checkpoint.
        now: The same of the run that wants to go on.

    Returns:
        Dotted key to (saved value, value now) for each that differs, sorted by key; a missing one counts as
        None.
    """
    keys = sorted(saved.keys() | now.keys())
    return {key: (saved.get(key), now.get(key)) for key in keys if saved.get(key) != now.get(key)}


def prune(run: Path, keep: int, best: Best | None) -> None:
    """Remove the oldest checkpoints of a run.

    Args:
        run: The run folder.
        keep: Newest checkpoints that stay, at least 1.
        best: Its checkpoint stays as well, whatever its age.
    """
    checkpoints = run_folder.list_checkpoints(run)
    for step, path in checkpoints[: max(len(checkpoints) - keep, 0)]:
        if best is None or step != best.step:
            shutil.rmtree(path)
