"""Wrong input: one clear message, the right exit code, no traceback, nothing written, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import QLORA, RECIPE, Qlora, write_rows


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def make_base_an_adapter(work: Path) -> None:
    (work / "tiny_model" / "config.json").rename(work / "tiny_model" / "adapter_config.json")


def put_files_in_the_output(work: Path) -> None:
    (work / "runs" / "recipe").mkdir(parents=True)
    (work / "runs" / "recipe" / "thesis.txt").write_text("mine")


FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing-data-file": (lambda w: (w / "train.jsonl").unlink(), ["recipe.yaml:5:", "train.jsonl"]),
    "empty-data-file": (lambda w: (w / "train.jsonl").write_text(""), ["train.jsonl"]),
    "unreadable-yaml": (lambda w: replace(w / "recipe.yaml", "lora: {", "lora: {{"), ["recipe.yaml:", "3:7"]),
    "unknown-key": (
        lambda w: replace(w / "recipe.yaml", "rank: 4", "rnak: 4"),
        ["recipe.yaml:3:", "rnak", "`rank`"],
    ),
    "wrong-type": (lambda w: replace(w / "recipe.yaml", "rank: 4", "rank: four"), ["recipe.yaml:3:", "four"]),
    "missing-column": (
        lambda w: (w / "train.jsonl").write_text('{"text": "x"}\n'),
        ["train.jsonl:1", "messages"],
    ),
    "row-without-messages": (
        lambda w: (w / "train.jsonl").write_text((w / "train.jsonl").read_text() + '{"messages": []}\n'),
        ["train.jsonl:7"],
    ),
    "no-such-base": (
        lambda w: replace(w / "recipe.yaml", "tiny_model", "./not_there"),
        ["not_there"],
    ),
    "adapter-as-base": (make_base_an_adapter, ["adapter"]),
    "output-of-others": (put_files_in_the_output, ["runs/recipe", "output_dir"]),
    "misspelt-target": (
        lambda w: replace(w / "recipe.yaml", "rank: 4", "rank: 4, target_modules: [q_proj, vproj]"),
        ["recipe.yaml:3:", "vproj", "v_proj"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_input_ends_with_exit_2_one_message_and_nothing_written(
    qlora: Qlora, work: Path, name: str
) -> None:
    spoil, fragments = FAULTS[name]
    spoil(work)
    before = sorted(work.rglob("*"))
    result = qlora("train", "--config", "recipe.yaml")
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for fragment in fragments:
        assert fragment in result.stderr
    assert sorted(work.rglob("*")) == before


def test_a_run_of_another_recipe_is_refused_with_the_differing_keys_and_stays_as_it_was(
    qlora: Qlora, work: Path
) -> None:
    assert qlora("train", "--config", "recipe.yaml", "--set", "train.max_steps=1").returncode == 0
    before = {p: p.read_bytes() for p in (work / "runs").rglob("*") if p.is_file()}
    result = qlora("train", "--config", "recipe.yaml", "--set", "lora.rank=8", "--set", "train.seed=7")
    assert result.returncode == 2
    assert "lora.rank" in result.stderr
    assert "train.seed" in result.stderr
    assert "None" not in result.stderr
    assert before == {p: p.read_bytes() for p in (work / "runs").rglob("*") if p.is_file()}


@pytest.mark.parametrize("command", ["eval", "merge", "generate"])
def test_a_run_that_does_not_exist_is_named(qlora: Qlora, command: str) -> None:
    words = ["prompt"] if command == "generate" else []
    result = qlora(command, "runs/nowhere", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert "runs/nowhere" in result.stderr


def test_with_json_an_error_is_a_document_on_stdout(qlora: Qlora) -> None:
    result = qlora("eval", "runs/nowhere", "--json")
    error = json.loads(result.stdout)["error"]
    assert (result.returncode, error["code"]) == (2, "run-not-found")


def test_a_full_disk_ends_with_exit_1_and_keeps_what_was_saved(qlora: Qlora, work: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, which only Linux has")
    assert qlora("train", "--config", "recipe.yaml", "--set", "train.max_steps=2").returncode == 0
    metrics = work / "runs" / "recipe" / "metrics.jsonl"
    metrics.unlink()
    metrics.symlink_to("/dev/full")
    result = qlora("train", "--config", "recipe.yaml")
    metrics.unlink()  # whoever reads it never comes to an end
    assert result.returncode == 1
    assert "no space left" in result.stderr
    assert "Traceback" not in result.stderr
    assert (work / "runs" / "recipe" / "checkpoints" / "step-000002" / "optimizer.safetensors").is_file()
    assert "OSError" in (work / "runs" / "recipe" / "crash.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_saves_exits_130_and_names_the_command_that_goes_on(
    qlora: Qlora, work: Path, number: signal.Signals
) -> None:
    words = ["train", "--config", "recipe.yaml", "--set", "train.max_steps=100000"]
    metrics = work / "runs" / "recipe" / "metrics.jsonl"
    process = subprocess.Popen([str(QLORA), *words], cwd=work, stderr=subprocess.PIPE, text=True)
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "qlora train --config" in stderr
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = f"step-{lines[-1]['step']:06d}"
    assert sorted(p.name for p in (work / "runs" / "recipe" / "checkpoints").iterdir())[-1] == last
    more = qlora(*words[:-1], f"train.max_steps={lines[-1]['step'] + 1}")
    assert more.returncode == 0, more.stderr
    assert f"going on from {last}" in more.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(
    qlora: Qlora, work: Path
) -> None:
    if os.geteuid() == 0:
        target = Path("/proc/qlora-run")  # root may write anywhere but here
    else:
        target = work / "locked"
        target.mkdir(mode=0o500)
    result = qlora("train", "--config", "recipe.yaml", "--set", f"output_dir={target}/run")
    assert result.returncode in (1, 2)
    assert str(target) in result.stderr
    assert "Traceback" not in result.stderr


def test_a_checkpoint_without_optimizer_state_is_no_resume(qlora: Qlora, work: Path) -> None:
    assert qlora("train", "--config", "recipe.yaml", "--set", "train.max_steps=2").returncode == 0
    for path in (work / "runs").rglob("optimizer.safetensors"):
        path.unlink()
    result = qlora("train", "--config", "recipe.yaml")
    assert result.returncode == 2
    assert "optimizer.safetensors" in result.stderr
    assert "continue_from" in result.stderr


def test_a_damaged_newest_checkpoint_is_passed_over_and_said(qlora: Qlora, work: Path) -> None:
    assert qlora("train", "--config", "recipe.yaml").returncode == 0
    newest = work / "runs" / "recipe" / "checkpoints" / "step-000004"
    os.truncate(newest / "adapter_model.safetensors", 100)
    result = qlora("train", "--config", "recipe.yaml", "--set", "train.max_steps=5")
    assert result.returncode == 0, result.stderr
    assert "step-000004 is passed over" in result.stderr
    assert "going on from step-000002" in result.stderr


def test_recipe_and_rows_of_these_tests_are_themselves_right(qlora: Qlora, work: Path) -> None:
    write_rows(work / "train.jsonl", [("One?", "Two.")])
    (work / "recipe.yaml").write_text(RECIPE, "utf-8")
    shutil.rmtree(work / "runs", ignore_errors=True)
    assert qlora("train", "--config", "recipe.yaml", "--set", "train.max_steps=1").returncode == 0
