"""Where a run stands: whether its folder may be written, and from which checkpoint it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_cli import run_folder
from qlora_cli.config.load import LoadedRecipe
from qlora_cli.console import Console
from qlora_cli.errors import Fault, InputError
from qlora_cli.train.checkpoint import Best, TrainerState, differing_keys


@dataclass(frozen=True)
class Start:
    """The checkpoint a run goes on from, or nothing.

    Attributes:
        checkpoint: Folder of the newest whole checkpoint, None for a new run.
        steps_done: Its step; 0 for a new run.
        best: Best evaluation up to there.
    """

    checkpoint: Path | None = None
    steps_done: int = 0
    best: Best | None = None


def free_output_dir(loaded: LoadedRecipe, run: Path) -> None:
    """Refuse a folder that cannot be written, or that holds something other than a run.

    Args:
        loaded: The recipe, for the position of `output_dir`.
        run: The run folder, which need not exist.

    Raises:
        InputError: With the reason; nothing is written.
    """
    existing = run
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise InputError(
            loaded.fault("output-not-a-folder", "output_dir", f"`{existing}` is a file, not a folder")
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(loaded.fault("output-not-writable", "output_dir", f"`{existing}` cannot be written"))
    foreign = run.is_dir() and any(run.iterdir()) and not (run / run_folder.RUN).is_file()
    if foreign:
        raise InputError(
            loaded.fault(
                "output-not-a-run",
                "output_dir",
                f"`{run}` is not empty and is not a run folder (no `{run_folder.RUN}`)",
                hint="give a new folder with `--set output_dir=FOLDER`",
            )
        )


def find_start(
    loaded: LoadedRecipe, run: Path, identity: Mapping[str, Any], resume: str, console: Console
) -> Start:
    """Find the checkpoint to go on from.

    Args:
        loaded: The recipe, for positions in messages.
        run: The run folder.
        identity: What must match the checkpoint's record.
        resume: `auto` or `never`.
        console: Told which checkpoints are passed over, and where the run goes on.

    Returns:
        The newest whole checkpoint, or an empty start when there is none.

    Raises:
        InputError: If `resume` is `never` and there is a run; if the folder holds a run with another
            identity; if no checkpoint is whole.
    """
    if not (run / run_folder.RUN).is_file():
        return Start()
    if resume == "never":
        raise InputError(
            loaded.fault(
                "output-is-a-run",
                "output_dir",
                f"`{run}` holds a run, and `--resume never` wants a new folder",
                hint="give one with `--set output_dir=FOLDER`, or leave `--resume` out to go on",
            )
        )
    _refuse_another_run(loaded, run, _recorded_identity(run), identity)
    found = run_folder.list_checkpoints(run)
    skipped: list[tuple[str, str]] = []
    for step, path in reversed(found):
        missing = run_folder.missing_files(path)
        if not missing:
            state = TrainerState.read(path)
            _refuse_another_run(loaded, run, state.identity, identity)
            for name, reason in skipped:
                console.warn(f"{name} is passed over: {reason} missing or damaged")
            console.say(f"going on from {path.name}")
            return Start(path, step, state.best)
        skipped.append((path.name, ", ".join(missing)))
    if skipped:
        raise InputError(
            [
                Fault(
                    "checkpoint-damaged",
                    f"checkpoint cannot be resumed: {reason} missing or damaged",
                    file=str(run / run_folder.CHECKPOINTS / name),
                    hint="start a new run from its weights: `lora.continue_from` and a new `output_dir`",
                )
                for name, reason in skipped
            ]
        )
    return Start()


def _recorded_identity(run: Path) -> Mapping[str, Any]:
    try:
        recorded: Mapping[str, Any] = json.loads((run / run_folder.RUN).read_text("utf-8"))["identity"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            Fault("run-damaged", f"cannot be read ({error})", file=str(run / run_folder.RUN))
        ) from None
    return recorded


def _refuse_another_run(
    loaded: LoadedRecipe, run: Path, saved: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    differing = differing_keys(saved, now)
    if not differing:
        return
    shown = ", ".join(
        f"`{key}` {was!r} -> {is_!r} ({loaded.fault('another-run', key, '').where})"
        for key, (was, is_) in differing.items()
    )
    raise InputError(
        Fault(
            "another-run",
            f"cannot resume, this would be another run: {shown}",
            file=str(run),
            accepted="more epochs or steps, other intervals, other `optimizer.paging`",
            hint="give it a new `output_dir`, or put the keys back",
        )
    )
