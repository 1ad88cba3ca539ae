"""`--set`: what it accepts, what it takes out, how its faults look."""

from __future__ import annotations

from pathlib import Path

import pytest

from qlora_cli.config.load import load_recipe
from tests.config.conftest import MINIMAL, Faults, Load, Write


def test_later_ones_win_and_mappings_are_merged(load: Load) -> None:
    lora = load(MINIMAL + "lora: {dropout: 0.5}\n", "lora={rank: 4, alpha: 3}", "lora.rank=5").recipe.lora
    assert (lora.rank, lora.alpha, lora.dropout) == (5, 3, 0.5)


def test_a_list_of_files_is_set_as_a_whole(load: Load, write: Write) -> None:
    write("{}\n", "x.jsonl")
    sources = load(MINIMAL, "data.train=[{path: x.jsonl, name: mine}]").recipe.data.train
    assert [(s.path.name, s.name) for s in sources] == [("x.jsonl", "mine")]


def test_paths_count_from_the_current_folder(
    load: Load, write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(MINIMAL, "sub/recipe.yaml")
    write("{}\n", "sub/rows.jsonl")
    (folder / "sub" / "base").mkdir()
    recipe = load_recipe("sub/recipe.yaml", ["data.validation=[{path: rows.jsonl}]"]).recipe
    assert recipe.data.train[0].path == folder / "sub" / "rows.jsonl"
    assert recipe.data.validation[0].path == folder / "rows.jsonl"


@pytest.mark.parametrize("text", ["C:\\x y", "a: b", "#1", "x#y", "a, b", "*a", "@a", "d/é 😀", "-", "50%"])
def test_a_value_without_brackets_or_quotes_is_taken_as_it_stands(
    load: Load, folder: Path, text: str
) -> None:
    assert load(MINIMAL, f"output_dir={text}").recipe.output_dir == folder / text


def test_space_around_key_and_value_does_not_count(load: Load) -> None:
    assert load(MINIMAL, " lora.rank = 8 ").recipe.lora.rank == 8


@pytest.mark.parametrize(
    ("override", "words", "hint"),
    [("lora.rank", "no `=`", "--set lora.rank=8"), ("=3", "dotted key", "--set lora.rank=8"),
     ("a b=3", "dotted key", "--set"), ("data.train.0.path=x", "one item of a list", "data.train=[...]"),
     ("data.train[0].path=x", "one item of a list", "data.train=[...]"),
     ("include=[a.yaml]", "from files only", "includes both"), ("", "no `=`", "--set")],
)  # fmt: skip
def test_what_is_no_override_is_a_fault_of_set(faults: Faults, override: str, words: str, hint: str) -> None:
    (fault,) = faults(MINIMAL, override)
    assert (fault.code, fault.file, fault.line) == ("bad-override", "--set", None)
    assert words in fault.message
    assert hint in (fault.hint or "")


@pytest.mark.parametrize("text", ["[q_proj", "{a: 1", '"x', "'x", "[a]]", '"a" b', "[a] b", "[*x]", "[\x07]"])
def test_brackets_and_quotes_that_do_not_close_are_faults_that_name_the_key(
    faults: Faults, text: str
) -> None:
    (fault,) = faults(MINIMAL, f"lora.target_modules={text}")
    assert fault.file == "--set"
    assert fault.message.startswith("`lora.target_modules`: ")
    assert "--set" not in fault.message


def test_faults_of_all_overrides_come_at_once(faults: Faults) -> None:
    found = faults(MINIMAL, "lora.rnk=4", "x", "train.seed=-1", "trian.seed=1")
    assert [f.code for f in found] == ["bad-override", "unknown-key", "out-of-range", "unknown-key"]


def test_steps_on_the_command_line_win_over_epochs_in_the_file_and_say_so(load: Load) -> None:
    loaded = load(MINIMAL + "train: {epochs: 3}\n", "train.max_steps=2")
    assert (loaded.recipe.train.epochs, loaded.recipe.train.max_steps) == (None, 2)
    assert loaded.notes == (
        "`train.epochs` (recipe.yaml:4:17) is left out because `--set` gives `train.max_steps`",
    )


@pytest.mark.parametrize("sets", [["train.epochs=2"], ["train={epochs: 2}"]])
def test_epochs_on_the_command_line_win_over_steps_in_the_file(load: Load, sets: list[str]) -> None:
    loaded = load(MINIMAL + "train: {max_steps: 3}\n", *sets)
    assert (loaded.recipe.train.epochs, loaded.recipe.train.max_steps) == (2.0, None)
    assert len(loaded.notes) == 1


def test_both_on_the_command_line_are_a_conflict(faults: Faults) -> None:
    assert [f.code for f in faults(MINIMAL, "train.epochs=1", "train.max_steps=1")] == ["conflicting-keys"]


def test_null_on_the_command_line_takes_nothing_else_out(load: Load) -> None:
    loaded = load(MINIMAL + "train: {epochs: 3}\n", "train.max_steps=null")
    assert (loaded.recipe.train.epochs, loaded.notes) == (3.0, ())


def test_without_epochs_and_steps_there_is_one_epoch(load: Load) -> None:
    assert load(MINIMAL + "train: {epochs: 3}\n", "train.epochs=null").recipe.train.epochs == 1.0


def test_an_optimizer_on_the_command_line_wins_over_the_bits_of_a_resolved_recipe(load: Load) -> None:
    text = MINIMAL + "optimizer: {name: paged_adamw_8bit, state_bits: 8}\n"
    assert load(text, "optimizer.name=paged_adamw_32bit").recipe.optimizer.state_bits == 32
    optimizer = load(text, "optimizer.state_bits=32").recipe.optimizer
    assert (optimizer.name, optimizer.state_bits) == ("paged_adamw_32bit", 32)


def test_an_empty_value_is_no_section(faults: Faults) -> None:
    assert [f.message for f in faults(MINIMAL + "lora: {rank: 4}\n", "lora=")] == ["`lora` is empty"]
