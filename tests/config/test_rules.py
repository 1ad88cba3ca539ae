"""Rules between keys, files that are named, and what is filled in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qlora_cli.config import rules
from qlora_cli.config.load import load_recipe
from qlora_cli.errors import InputError
from tests.config.conftest import MINIMAL, Faults, Load, Write

# name: (text after the minimal recipe, key of the fault, words of the message)
CONFLICTS = {
    "epochs-and-steps": ("train: {epochs: 1, max_steps: 2}", "train.max_steps", "recipe.yaml:4:17"),
    "bits-of-name": ("optimizer: {name: paged_adamw_32bit, state_bits: 8}", "optimizer.state_bits", "has 32"),
    "budget-of-resident": (
        "optimizer: {paging: {backend: resident, vram_budget_mib: 0}}",
        "optimizer.paging.vram_budget_mib",
        "pages nothing",
    ),
    "decay-of-cosine": ("schedule: {name: cosine, decay_ratio: 0.5}", "schedule.decay_ratio", "cosine"),
    "decay-and-warmup": (
        "schedule: {name: wsd, decay_ratio: 0.7, warmup_ratio: 0.4}",
        "schedule.decay_ratio",
        "more than the run",
    ),
    "nothing-to-evaluate": ("train: {eval_every_steps: 2}", "train.eval_every_steps", "nothing to evaluate"),
    "skipped-of-none": (
        "lora: {rank: 4}",
        "model.quantization.skip_modules",
        "quantizes nothing",
    ),
    "commas-for-a-list": ("lora: {target_modules: 'q_proj, v_proj'}", "lora.target_modules", "commas"),
    "bad-expression": ("lora: {target_modules: 'a(b'}", "lora.target_modules", "regular expression"),
    "two-of-a-name": (
        "#",
        "data.train.1.name",
        "two sources named `a`",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_keys_that_exclude_each_other_are_a_fault_at_the_second(faults: Faults, name: str) -> None:
    text, key, words = CONFLICTS[name]
    recipe = f"{MINIMAL}{text}\n"
    if name == "skipped-of-none":
        recipe = recipe.replace("./base", "./base, quantization: {scheme: none, skip_modules: [x]}")
    if name == "two-of-a-name":
        recipe = recipe.replace(
            "[{path: rows.jsonl}]", "[{path: rows.jsonl, name: a}, {path: rows.jsonl, name: a}]"
        )
    (fault,) = faults(recipe)
    assert fault.key == key
    assert words in fault.message
    assert fault.file == "recipe.yaml"
    assert fault.line in (1, 3, 4)


def test_every_rule_has_a_case_here() -> None:
    """Two of the ten above are of schedules, two of target modules; text that is no text has its own."""
    assert len(rules._RULES) == len(CONFLICTS) - 2 + 1


@pytest.mark.parametrize(
    "text",
    ["schedule: {name: wsd, decay_ratio: 0.5, warmup_ratio: 0.5}",
     "schedule: {name: cosine, decay_ratio: 0.1}",
     "train: {eval_every_steps: 2, sample_prompts: [hi]}", "train: {epochs: null, max_steps: 2}",
     "train: {epochs: 0.5}", "optimizer: {name: paged_adamw, state_bits: 32}", "optimizer: {state_bits: 32}",
     "optimizer: {paging: {backend: resident, vram_budget_mib: auto}}",
     "optimizer: {paging: {backend: host, vram_budget_mib: 0}}"],
)  # fmt: skip
def test_keys_that_go_together_are_no_fault(load: Load, text: str) -> None:
    assert load(f"{MINIMAL}{text}\n")


def test_a_rule_says_nothing_about_a_key_that_is_faulty_itself(faults: Faults) -> None:
    found = faults(MINIMAL + "train: {epochs: x, max_steps: 2}\noptimizer: {name: adam, state_bits: 8}\n")
    assert [f.code for f in found] == ["wrong-type", "unknown-value"]


@pytest.mark.parametrize(
    ("key", "code", "problem"),
    [("data.train=[{path: none.jsonl}]", "data-unreadable", "does not exist"),
     ("data.train=[{path: base}]", "data-unreadable", "is a folder"),
     ("data.validation=[{path: none.jsonl}]", "data-unreadable", "does not exist"),
     ("data.chat_template=none.jinja", "template-unreadable", "does not exist"),
     ("data.chat_template=base", "template-unreadable", "is a folder"),
     ("lora.continue_from=none", "adapter-unreadable", "does not exist"),
     ("lora.continue_from=rows.jsonl", "adapter-unreadable", "is a file"),
     ("model.name_or_path=./none", "model-missing", "does not exist"),
     ("model.name_or_path=~/none", "model-missing", "does not exist"),
     ("model.name_or_path=rows.jsonl", "model-missing", "is a file"),
     ("model.name_or_path=a/b/c", "model-missing", "neither a folder here nor a hub id"),
     ("model.name_or_path=a b", "model-missing", "neither a folder here nor a hub id"),
     ("data.train=[{path: rows.jsonl/x}]", "data-unreadable", "cannot be read"),
     (f"data.train=[{{path: {'x' * 3000}}}]", "data-unreadable", "cannot be read")],
)  # fmt: skip
def test_a_file_that_is_named_and_not_there_is_a_fault_of_its_key(
    faults: Faults, key: str, code: str, problem: str
) -> None:
    (fault,) = faults(MINIMAL, key)
    assert fault.code == code
    assert problem in fault.message


def test_every_missing_data_file_is_listed_with_its_own_place(faults: Faults) -> None:
    found = faults(MINIMAL.replace("rows.jsonl", "a.jsonl}, {path: b.jsonl"))
    assert [(f.line, f.column, f.key) for f in found] == [
        (3, 18, "data.train.0.path"),
        (3, 35, "data.train.1.path"),
    ]


def test_files_need_not_exist_where_only_the_recipe_is_wanted(write: Write) -> None:
    write(MINIMAL.replace("rows", "gone").replace("./base", "./gone"))
    assert load_recipe("recipe.yaml", check_files=False).recipe.lora.rank == 16


def test_a_data_file_that_would_block_is_not_opened(load: Load, folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    assert load(MINIMAL.replace("rows", "pipe")).recipe.data.train[0].name == "pipe"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("./base", "{folder}/base"), ("base", "{folder}/base"), ("{folder}/base", "{folder}/base"),
     ("sub/../base", "{folder}/base"), ("owner/name", "owner/name"), ("gpt2", "gpt2"),
     ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")],
)  # fmt: skip
def test_a_model_is_a_folder_where_one_is_meant_or_found_else_a_hub_id(
    load: Load, folder: Path, text: str, expected: str
) -> None:
    (folder / "sub").mkdir()
    loaded = load(MINIMAL.replace("./base", text.format(folder=folder)))
    assert loaded.recipe.model.name_or_path == expected.format(folder=folder)


def test_a_model_folder_is_looked_for_beside_the_recipe_then_in_the_current_folder(
    write: Write, folder: Path
) -> None:
    write("{}\n", "sub/rows.jsonl")
    write(MINIMAL.replace("./base", "base"), "sub/recipe.yaml")
    assert load_recipe("sub/recipe.yaml").recipe.model.name_or_path == str(folder / "base")
    (folder / "sub" / "base").mkdir()
    assert load_recipe("sub/recipe.yaml").recipe.model.name_or_path == str(folder / "sub" / "base")


def test_the_home_folder_can_be_written_as_a_tilde(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load(MINIMAL + "output_dir: ~/runs/x\n").recipe.output_dir == Path("/home/somebody/runs/x")


def test_dots_in_a_path_through_a_link_lead_where_the_system_leads(load: Load, folder: Path) -> None:
    (folder / "far" / "deep").mkdir(parents=True)
    (folder / "far" / "rows.jsonl").write_text("{}\n", "utf-8")
    (folder / "link").symlink_to("far/deep")
    recipe = load(MINIMAL.replace("rows.jsonl", "link/../rows.jsonl")).recipe
    assert recipe.data.train[0].path.samefile(folder / "far" / "rows.jsonl")


def test_names_of_files_that_are_not_unicode_are_refused_where_text_is_needed_and_kept_elsewhere(
    load: Load, faults: Faults, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = os.fsdecode(b"r\xfcws")
    (folder / f"{name}.jsonl").write_text("{}\n", "utf-8")
    (source,) = load(MINIMAL, r'data.train=[{path: "r\udcfcws.jsonl"}]').recipe.data.train
    assert (source.path, source.name) == (folder / f"{name}.jsonl", "r\\udcfcws")
    assert [f.code for f in faults(MINIMAL, r'train.sample_prompts=["\udcfc"]')] == ["wrong-type"]
    assert [f.code for f in faults(MINIMAL, f"train.sample_prompts=['{name}']")] == ["not-utf8"]
    (folder / name / "base").mkdir(parents=True)
    monkeypatch.chdir(name)
    with pytest.raises(InputError) as caught:
        load_recipe("../recipe.yaml", ["model.name_or_path=./base"])
    (fault,) = caught.value.faults
    assert (fault.code, fault.key) == ("model-missing", "model.name_or_path")


def test_what_is_left_out_is_filled_in(load: Load, write: Write, folder: Path) -> None:
    write("{}\n", "other/rows.jsonl")
    text = MINIMAL.replace("}]", "}, {path: other/rows.jsonl, format: auto}]") + "  format: chat\n"
    recipe = load(text).recipe
    assert [(s.name, s.format) for s in recipe.data.train] == [("rows", "chat"), ("rows-2", "auto")]
    assert recipe.output_dir == folder / "runs" / "recipe"
    assert (recipe.optimizer.name, recipe.optimizer.state_bits) == ("paged_adamw_8bit", 8)
    assert (recipe.train.epochs, recipe.train.max_steps) == (1.0, None)


@pytest.mark.parametrize(
    ("text", "name", "bits"),
    [("{}", "paged_adamw_8bit", 8), ("{state_bits: 32}", "paged_adamw_32bit", 32),
     ("{name: paged_adamw}", "paged_adamw", 8), ("{name: paged_adamw, state_bits: 32}", "paged_adamw", 32),
     ("{name: paged_adamw_32bit, state_bits: null}", "paged_adamw_32bit", 32)],
)  # fmt: skip
def test_state_bits_follow_the_name(load: Load, text: str, name: str, bits: int) -> None:
    optimizer = load(f"{MINIMAL}optimizer: {text}\n").recipe.optimizer
    assert (optimizer.name, optimizer.state_bits) == (name, bits)
