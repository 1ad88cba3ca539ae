"""A folder with a model folder and a data file, in which recipes are written and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qlora_cli.config.load import LoadedRecipe, load_recipe
from qlora_cli.errors import Fault, InputError

MINIMAL = "model: {name_or_path: ./base}\ndata:\n  train: [{path: rows.jsonl}]\n"

Write = Callable[..., Path]
Faults = Callable[..., list[Fault]]
Load = Callable[..., LoadedRecipe]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: `base/` is a model folder, `rows.jsonl` a data file."""
    (tmp_path / "base").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Write:
    """Write a file below the folder: text, or bytes as they are."""

    def write_(text: str | bytes, name: str = "recipe.yaml") -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        return path

    return write_


@pytest.fixture
def load(write: Write) -> Load:
    """Load a recipe given as text, with `--set` options."""

    def load_(text: str | bytes, *sets: str) -> LoadedRecipe:
        write(text)
        return load_recipe("recipe.yaml", sets)

    return load_


@pytest.fixture
def faults(write: Write) -> Faults:
    """All faults of a recipe given as text (None: the file that is there), with `--set` options."""

    def faults_(text: str | bytes | None, *sets: str) -> list[Fault]:
        if text is not None:
            write(text)
        with pytest.raises(InputError) as caught:
            load_recipe("recipe.yaml", sets)
        return list(caught.value.faults)

    return faults_
