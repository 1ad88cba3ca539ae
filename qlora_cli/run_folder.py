"""The names of everything in a run folder, atomic writes, and what a `RUN` argument means.

All file names stand here and nowhere else. A folder that others may read (a checkpoint, an adapter) is
written beside its final name, flushed to disk with a manifest of sizes and hashes, and renamed: it is there
whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_cli.errors import Fault, InputError

RECIPE = "recipe.yaml"
RUN = "run.json"
METRICS = "metrics.jsonl"
DATA_REPORT = "data_report.json"
EVAL = "eval.json"
CRASH_LOG = "crash.log"
CHECKPOINTS = "checkpoints"
ADAPTER = "adapter"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
RECORD = "qlora.json"  # which base an adapter was trained on, and how it was quantised
OPTIMIZER = "optimizer.safetensors"
TRAINER_STATE = "trainer_state.json"
RNG = "rng.safetensors"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class RunTarget:
    """What a `RUN` argument names.

    Attributes:
        adapter: Folder with the adapter's PEFT files.
        run: The run folder around it, or None for a bare adapter folder.
    """

    adapter: Path
    run: Path | None

    @property
    def recipe(self) -> Path | None:
        """The run's resolved recipe, or None where there is none."""
        path = self.run / RECIPE if self.run is not None else None
        return path if path is not None and path.is_file() else None


def find_run(argument: str | Path) -> RunTarget:
    """Say which adapter a `RUN` argument means.

    Args:
        argument: A run folder, one of its checkpoints or its `adapter/`, or any PEFT adapter folder.

    Returns:
        The adapter folder and, where it lies in one, the run folder.

    Raises:
        InputError: If the folder does not exist, or holds no adapter.
    """
    path = Path(argument).expanduser()
    if not path.exists():
        raise InputError(Fault("run-not-found", f"`{argument}` does not exist", accepted=_ACCEPTED_RUN))
    path = path.resolve()
    if (path / ADAPTER_CONFIG).is_file():
        run = next((parent for parent in path.parents[:2] if (parent / RUN).is_file()), None)
        return RunTarget(adapter=path, run=run)
    if (path / ADAPTER / ADAPTER_CONFIG).is_file():
        return RunTarget(adapter=path / ADAPTER, run=path)
    whole = [folder for _, folder in list_checkpoints(path) if is_whole(folder)]
    if whole:
        return RunTarget(adapter=whole[-1], run=path)
    if (path / "config.json").is_file():
        raise InputError(
            Fault(
                "no-adapter",
                f"`{argument}` is a whole model, not an adapter",
                accepted=_ACCEPTED_RUN,
                hint="`qlora generate` answers with a whole model",
            )
        )
    raise InputError(
        Fault(
            "no-adapter",
            f"`{argument}` holds no adapter (no `{ADAPTER_CONFIG}`, no `{ADAPTER}/`, no whole checkpoint)",
            accepted=_ACCEPTED_RUN,
            hint="train one with `qlora train --config RECIPE`",
        )
    )


_ACCEPTED_RUN = "a run folder, one of its checkpoints, or an adapter folder in PEFT format"


def checkpoint_path(run: Path, step: int) -> Path:
    """Folder of the checkpoint that was taken after `step`."""
    return run / CHECKPOINTS / f"step-{step:06d}"


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """All checkpoint folders of a run with their steps, oldest first, whole or not."""
    found = []
    for path in (run / CHECKPOINTS).glob("step-*"):
        number = path.name.removeprefix("step-")
        if path.is_dir() and number.isdigit():
            found.append((int(number), path))
    return sorted(found)


def is_whole(folder: Path) -> bool:
    """Whether every file that the folder's manifest lists is there with its size and hash."""
    return not missing_files(folder)


def missing_files(folder: Path) -> list[str]:
    """Files that differ from the folder's manifest, by name; the manifest itself where it is not readable."""
    try:
        listed: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return [MANIFEST]
    return [name for name, entry in sorted(listed.items()) if not _matches(folder / name, entry)]


def _matches(path: Path, entry: dict[str, Any]) -> bool:
    try:
        return bool(path.stat().st_size == entry["bytes"] and sha256(path) == entry["sha256"])
    except (OSError, KeyError, TypeError):
        return False


def sha256(path: Path) -> str:
    """Hash of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Write a folder that appears whole or not at all.

    The caller fills the folder that is yielded; on leaving, a manifest is added, everything is flushed to
    disk and the folder takes its name, in place of an older one. On an exception nothing is left behind.

    Args:
        path: Final name.

    Yields:
        An empty folder beside `path` to write into.
    """
    partial = path.with_name(f".{path.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        files = sorted(p for p in partial.rglob("*") if p.is_file())
        entries = {
            str(p.relative_to(partial)): {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in files
        }
        (partial / MANIFEST).write_text(json.dumps({"files": entries}, indent=2) + "\n", "utf-8")
        for file in [*files, partial / MANIFEST, partial]:
            flush(file)
        old = path.with_name(f".{path.name}.old")
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        partial.rename(path)
        flush(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file that is never seen half-written."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file that is never seen half-written."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, "utf-8")
    flush(partial)
    partial.replace(path)


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
