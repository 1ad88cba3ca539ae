"""Folders that are there whole or not at all, and what a RUN argument names."""

from __future__ import annotations

from pathlib import Path

import pytest

from qlora_cli import run_folder
from qlora_cli.errors import InputError


def write(folder: Path, text: str = "weights") -> None:
    with run_folder.atomic_folder(folder) as partial:
        (partial / run_folder.ADAPTER_CONFIG).write_text("{}")
        (partial / run_folder.ADAPTER_WEIGHTS).write_text(text)


def test_a_failure_while_writing_leaves_the_folder_that_was_there(tmp_path: Path) -> None:
    write(tmp_path / "adapter", "old")
    with pytest.raises(TypeError), run_folder.atomic_folder(tmp_path / "adapter") as partial:
        (partial / run_folder.ADAPTER_WEIGHTS).write_text(None)  # type: ignore[arg-type]
    assert (tmp_path / "adapter" / run_folder.ADAPTER_WEIGHTS).read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_a_leftover_of_a_killed_write_is_replaced(tmp_path: Path) -> None:
    leftover = tmp_path / ".adapter.partial"
    leftover.mkdir()
    (leftover / "stray").write_text("cut")
    write(tmp_path / "adapter")
    assert run_folder.is_whole(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "stray").exists()


def test_a_cut_file_a_missing_file_and_a_changed_byte_are_each_found(tmp_path: Path) -> None:
    write(tmp_path / "a")
    weights = tmp_path / "a" / run_folder.ADAPTER_WEIGHTS
    assert run_folder.missing_files(tmp_path / "a") == []
    for damage in (
        lambda: weights.write_text("weight"),
        lambda: weights.write_text("weighty"),
        weights.unlink,
    ):
        damage()
        assert run_folder.missing_files(tmp_path / "a") == [run_folder.ADAPTER_WEIGHTS]


def test_a_folder_without_manifest_is_not_whole(tmp_path: Path) -> None:
    assert not run_folder.is_whole(tmp_path)


def test_checkpoints_are_listed_by_step_and_other_folders_are_not(tmp_path: Path) -> None:
    for name in ("step-000010", "step-000002", "step-x", "other"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [step for step, _ in run_folder.list_checkpoints(tmp_path)] == [2, 10]


def test_a_run_argument_may_be_the_run_its_adapter_or_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / run_folder.RUN).write_text("{}")
    write(tmp_path / "adapter")
    write(run_folder.checkpoint_path(tmp_path, 3))
    for argument, adapter in (
        (tmp_path, tmp_path / "adapter"),
        (tmp_path / "adapter", tmp_path / "adapter"),
        (tmp_path / "checkpoints" / "step-000003", tmp_path / "checkpoints" / "step-000003"),
    ):
        assert run_folder.find_run(argument) == run_folder.RunTarget(adapter=adapter, run=tmp_path)


def test_a_run_without_final_adapter_means_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    for step in (3, 6):
        write(run_folder.checkpoint_path(tmp_path, step))
    (run_folder.checkpoint_path(tmp_path, 6) / run_folder.ADAPTER_WEIGHTS).write_text("cut")
    assert run_folder.find_run(tmp_path).adapter == run_folder.checkpoint_path(tmp_path, 3)


def test_a_bare_adapter_folder_belongs_to_no_run(tmp_path: Path) -> None:
    write(tmp_path / "peft")
    assert run_folder.find_run(tmp_path / "peft") == run_folder.RunTarget(tmp_path / "peft", None)


@pytest.mark.parametrize("name", ["nothing-there", "."])
def test_a_run_argument_that_holds_no_adapter_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"adapter|exist"):
        run_folder.find_run(tmp_path / name)
