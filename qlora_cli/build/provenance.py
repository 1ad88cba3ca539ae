"""What a run folder says about where a run came from, and the adapter it ends with."""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qlora_cli import __version__, run_folder
from qlora_cli.device import DeviceFacts

PACKAGES = (
    "torch", "transformers", "peft", "bitsandbytes", "accelerate", "tokenizers", "safetensors",
)  # fmt: skip
TRAINING_ONLY = (run_folder.OPTIMIZER, run_folder.TRAINER_STATE, run_folder.RNG, run_folder.MANIFEST)


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of those whose arithmetic a run depends on."""
    return {"python": platform.python_version(), "qlora": __version__} | {p: version(p) for p in PACKAGES}


def run_document(
    *,
    command: Sequence[str],
    device: DeviceFacts,
    choices: Mapping[str, Any],
    identity: Mapping[str, Any],
    files: Mapping[str, str],
    model_folder: str,
    resumed_from: str | None,
) -> dict[str, Any]:
    """Content of run.json.

    Args:
        command: The command line.
        device: Facts of the device.
        choices: What every `auto` became and why.
        identity: What makes this run this run.
        files: Data file to SHA-256.
        model_folder: Base model; its files are listed with sizes where it is a folder.
        resumed_from: Checkpoint the run went on from, or None.

    Returns:
        A JSON object.
    """
    folder = Path(model_folder)
    weights = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return {
        "command": shlex.join(command),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "versions": versions(),
        "device": asdict(device),
        "machine": {"system": platform.platform(), "processor": platform.machine()},
        "git": _git_state(),
        "choices": dict(choices),
        "identity": dict(identity),
        "data_files": dict(files),
        "model_files": {path.name: path.stat().st_size for path in weights},
    }


def _git_state() -> dict[str, Any] | None:
    """Commit of the current folder and whether it has changes; None outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "is_dirty": bool(changes.strip())}


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout


def copy_adapter(run: Path, step: int) -> None:
    """Make `adapter/` out of a checkpoint: its PEFT files, tokenizer and record, not the optimizer.

    Args:
        run: The run folder.
        step: Step of the checkpoint.
    """
    checkpoint = run_folder.checkpoint_path(run, step)
    with run_folder.atomic_folder(run / run_folder.ADAPTER) as folder:
        for path in checkpoint.iterdir():
            if path.name not in TRAINING_ONLY:
                shutil.copy2(path, folder / path.name)
