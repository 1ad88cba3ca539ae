"""`include`: what wins, what paths count from, cycles and diamonds."""

from __future__ import annotations

from pathlib import Path

import pytest

from qlora_cli.config.load import load_recipe
from tests.config.conftest import MINIMAL, Faults, Load, Write


def test_later_parts_win_over_earlier_ones_and_the_recipe_over_its_parts(load: Load, write: Write) -> None:
    write("lora: {rank: 1, alpha: 1, dropout: 0.1}\ntrain: {seed: 1}\n", "a.yaml")
    write("lora: {alpha: 2, dropout: 0.2}\ntrain: {seed: 2}\n", "b.yaml")
    recipe = load("include: [a.yaml, b.yaml]\n" + MINIMAL + "lora: {dropout: 0.3}\n").recipe
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.dropout, recipe.train.seed) == (1, 2, 0.3, 2)


def test_lists_and_kinds_are_replaced_and_mappings_merged(load: Load, write: Write) -> None:
    write("lora: {target_modules: [a, b]}\ndata: {max_seq_len: 64, validation: {fraction: 0.1}}\n", "a.yaml")
    text = MINIMAL + "  validation: [{path: rows.jsonl}]\nlora: {target_modules: [c]}\n"
    recipe = load("include: a.yaml\n" + text).recipe
    assert recipe.lora.target_modules == ("c",)
    assert recipe.data.max_seq_len == 64
    assert isinstance(recipe.data.validation, tuple)


def test_one_name_a_list_and_nothing_are_all_accepted(load: Load, write: Write) -> None:
    write("lora: {rank: 4}\n", "a.yaml")
    ranks = [
        load(f"include: {value}\n{MINIMAL}").recipe.lora.rank for value in ("a.yaml", "[a.yaml]", "[]", "")
    ]
    assert ranks == [4, 4, 16, 16]


def test_paths_count_from_the_file_that_names_them(load: Load, write: Write, folder: Path) -> None:
    write("{}\n", "parts/data/more.jsonl")
    write("x", "parts/t.jinja")
    write("data:\n  train: [{path: data/more.jsonl}]\n  chat_template: t.jinja\n", "parts/deep.yaml")
    write("include: deep.yaml\noutput_dir: out\n", "parts/a.yaml")
    recipe = load("include: parts/a.yaml\nmodel: {name_or_path: base}\n").recipe
    assert recipe.data.train[0].path == folder / "parts" / "data" / "more.jsonl"
    assert recipe.data.chat_template == folder / "parts" / "t.jinja"
    assert recipe.model.name_or_path == str(folder / "base")
    assert recipe.output_dir == folder / "out"  # counts from the current folder wherever it is written


def test_a_part_included_on_two_ways_is_no_cycle(load: Load, write: Write) -> None:
    write("lora: {rank: 4}\n", "parts/plain.yaml")
    write("include: [plain.yaml, ../parts/plain.yaml]\n", "parts/more.yaml")
    assert load("include: [parts/plain.yaml, parts/more.yaml]\n" + MINIMAL).recipe.lora.rank == 4


def test_faults_of_a_part_included_on_two_ways_are_listed_once(faults: Faults, write: Write) -> None:
    write("lora: {rnk: 4}\nlora: {}\n", "p.yaml")
    write("include: p.yaml\n", "q.yaml")
    found = faults("include: [p.yaml, q.yaml]\n" + MINIMAL)
    assert [(f.code, f.where) for f in found] == [("duplicate-key", "p.yaml:2:1")]


def test_an_include_cycle_names_every_file_on_it_in_order(faults: Faults, write: Write) -> None:
    write("include: c.yaml\n", "parts/b.yaml")
    write("include: [../recipe.yaml]\n", "parts/c.yaml")
    (fault,) = faults("include: parts/b.yaml\n" + MINIMAL)
    assert fault.code == "include-cycle"
    assert fault.message == "include cycle: recipe.yaml -> parts/b.yaml -> parts/c.yaml -> recipe.yaml"
    assert fault.where == "parts/c.yaml:1:11"


def test_a_cycle_that_does_not_reach_the_recipe_names_only_its_own_files(
    faults: Faults, write: Write
) -> None:
    write("include: c.yaml\n", "b.yaml")
    write("include: b.yaml\n", "c.yaml")
    (fault,) = faults("include: b.yaml\n" + MINIMAL)
    assert fault.message == "include cycle: b.yaml -> c.yaml -> b.yaml"


def test_a_cycle_through_a_link_is_a_cycle(faults: Faults, folder: Path) -> None:
    (folder / "other.yaml").symlink_to("recipe.yaml")
    (fault,) = faults("include: other.yaml\n" + MINIMAL)
    assert fault.code == "include-cycle"


def test_a_chain_of_many_parts_ends_with_a_fault_not_a_crash(faults: Faults, write: Write) -> None:
    for i in range(60):
        write(f"include: p{i + 1}.yaml\n", f"p{i}.yaml")
    assert "too-deep" in [f.code for f in faults("include: p0.yaml\n" + MINIMAL)]


@pytest.mark.parametrize(
    ("include", "code", "hint"),
    [("nope.yaml", "include-missing", "counts from"),
     ("paging/on_hots", "include-missing", "`paging/on_host`"),
     ("base", "recipe-unreadable", None), ("{a: b}", "wrong-type", None), ("[[x]]", "wrong-type", None)],
)  # fmt: skip
def test_an_include_that_names_no_file_is_a_fault_at_its_place(
    faults: Faults, include: str, code: str, hint: str | None
) -> None:
    (fault,) = faults(f"include: {include}\n{MINIMAL}")
    assert (fault.code, fault.file, fault.line) == (code, "recipe.yaml", 1)
    assert hint is None or hint in (fault.hint or "")


def test_missing_keys_are_not_reported_where_a_part_could_not_be_read(faults: Faults) -> None:
    assert [f.code for f in faults("include: nope.yaml\nlora: {rank: 4}\n")] == ["include-missing"]


@pytest.mark.parametrize("name", ["paging/on_host", "paging/on_host.yaml", "configs/paging/on_host.yaml"])
def test_a_part_that_ships_with_the_package_is_found_by_name_from_anywhere(load: Load, name: str) -> None:
    paging = load(f"include: {name}\n{MINIMAL}").recipe.optimizer.paging
    assert (paging.backend, paging.vram_budget_mib) == ("host", 0)


def test_a_file_beside_the_recipe_wins_over_a_shipped_part_of_that_name(load: Load, write: Write) -> None:
    write("lora: {rank: 3}\n", "paging/on_host")
    recipe = load(f"include: paging/on_host\n{MINIMAL}").recipe
    assert (recipe.lora.rank, recipe.optimizer.paging.backend) == (3, "auto")


def test_a_shipped_recipe_can_be_taken_as_a_part(write: Write, folder: Path) -> None:
    write("include: smollm2_135m\nmodel: {name_or_path: ./base}\ntrain: {seed: 7}\n", "mine.yaml")
    recipe = load_recipe("mine.yaml").recipe
    assert recipe.train.seed == 7
    assert all(source.path.is_file() for source in recipe.data.train)


def test_faults_of_a_recipe_come_before_those_of_its_parts_and_of_set(faults: Faults, write: Write) -> None:
    write("\n\nlora: {rnk: 1}\n", "p.yaml")
    found = faults("include: p.yaml\n" + MINIMAL + "train: {x1x: 1}\n", "log.y=1")
    assert [f.file for f in found] == ["recipe.yaml", "p.yaml", "--set"]
