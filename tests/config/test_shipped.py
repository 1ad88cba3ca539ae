"""What ships: every YAML loads, copies run from anywhere, the reference and the list of codes are fresh."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qlora_cli import shipped
from qlora_cli.config import files
from qlora_cli.config.convert import convert
from qlora_cli.config.copy import copy_recipe, resolved_text
from qlora_cli.config.kinds import fields_of
from qlora_cli.config.load import load_recipe
from qlora_cli.config.names import all_keys
from qlora_cli.config.schema import Recipe
from qlora_cli.errors import InputError
from tests.config.conftest import MINIMAL, Load, Write

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted((REPOSITORY / "recipes").rglob("*.yaml"))
PARTS = sorted((REPOSITORY / "configs").rglob("*.yaml"))


def test_there_are_recipes_and_parts_to_check() -> None:
    assert len(RECIPES) >= 1
    assert len(PARTS) >= 5
    assert {*shipped.recipe_paths().values(), *shipped.part_paths().values()} == {*RECIPES, *PARTS}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_shipped_recipe_loads_by_path_and_by_name_and_its_data_is_there(path: Path) -> None:
    by_path, by_name = load_recipe(path).recipe, load_recipe(path.stem).recipe
    assert by_path == by_name
    assert all(source.path.is_file() for source in by_path.data.train)


@pytest.mark.parametrize("path", [*RECIPES, *PARTS], ids=lambda path: path.name)
def test_a_shipped_file_begins_with_a_line_that_says_what_it_is_for(path: Path) -> None:
    assert len(shipped.describe(path)) > 20


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.name)
def test_a_shipped_part_has_only_known_keys_and_is_found_by_name(load: Load, path: Path) -> None:
    merged = files.load(path, path.name)
    draft = convert(merged.root, Recipe, path.parent)
    assert [f for f in [*merged.faults, *draft.faults] if f.code != "missing-key"] == []
    name = path.relative_to(REPOSITORY / "configs").with_suffix("").as_posix()
    model = "" if "models" in path.parts else "model: {name_or_path: ./base}\n"
    assert load(f"include: {name}\n{model}data: {{train: [{{path: rows.jsonl}}]}}\n")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_copy_is_the_same_recipe_from_anywhere_and_keeps_every_comment(path: Path, folder: Path) -> None:
    written = copy_recipe(path.stem, folder)
    assert written == folder / path.name
    text = written.read_text("utf-8")
    assert "include:" not in text
    comments = re.findall(r"#.*", path.read_text("utf-8"))
    assert [c for c in comments if c not in text] == []
    assert load_recipe(written).recipe == load_recipe(path).recipe


def test_a_copy_never_overwrites(folder: Path) -> None:
    (folder / "mine.yaml").write_text("precious")
    with pytest.raises(InputError) as caught:
        copy_recipe(RECIPES[0].stem, folder / "mine.yaml")
    assert caught.value.faults[0].code == "file-exists"
    assert (folder / "mine.yaml").read_text() == "precious"


def test_a_copy_into_a_folder_that_is_not_there_is_an_input_error(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        copy_recipe(RECIPES[0].stem, folder / "none" / "mine.yaml")
    assert caught.value.faults[0].code == "not-writable"


# A recipe in every form the text can have: block and flow, sections only the part has, paths with spaces.
COPIES = {
    "block": "include:\n  - part.yaml\n  - part 2.yaml # why\nmodel:\n  name_or_path: ./base\n",
    "flow": "model: {name_or_path: ./base, quantization: {}}\ninclude: part.yaml\nlora: {rank: 2}\n",
    "sections": "include: [part.yaml,\n  part 2.yaml]  # both\nmodel:\n  # the base\n  name_or_path: base\n"
    "lora:\n  # how much\n  rank: 2\n  target_modules: [q_proj]\noptimizer:\n  learning_rate: 1e-4 # fast\n",
    "no-newline-at-the-end": "model: {name_or_path: ./base}\ninclude: [part.yaml]",
    "sections-added-after-a-line-without-end": "include: part.yaml\nmodel: {name_or_path: ./base}",
    "without-parts": "model: {name_or_path: './base'}\n",
}


@pytest.mark.parametrize("name", COPIES)
def test_resolving_the_text_never_changes_the_recipe(write: Write, folder: Path, name: str) -> None:
    write(
        "optimizer: {paging: {backend: host, vram_budget_mib: 0}}\nlora: {alpha: 3, rank: 9}\n",
        "in/part.yaml",
    )
    part = "data:\n  train: [{path: r o.jsonl, name: 'off'}]\n  chat_template: t.jinja\n"
    write(f"{part}train: {{sample_prompts: ['a: b']}}", "in/part 2.yaml")
    write("{}\n", "in/r o.jsonl")
    write("x", "in/t.jinja")
    (folder / "in" / "base").mkdir()
    text = COPIES[name]
    if "part 2" not in text:
        text = "data: {train: [{path: r o.jsonl}]}\n" + text
    path = write(text, "in/recipe.yaml")
    copied = write(resolved_text(path), "out/recipe.yaml")
    assert load_recipe(copied).recipe == load_recipe(path).recipe
    assert "include" not in copied.read_text("utf-8")


def test_every_key_has_a_docstring_and_says_what_it_accepts() -> None:
    def sections(section: type) -> Iterator[type]:
        yield section
        for kind in fields_of(section).values():
            for inner in (kind.section, kind.item.section if kind.item else None):
                if inner is not None:
                    yield from sections(inner)

    for section in sections(Recipe):
        for name, field in section.model_fields.items():
            assert field.description, (section, name)
            assert fields_of(section)[name].describe(), (section, name)


def test_a_recipe_is_frozen(load: Load) -> None:
    recipe = load(MINIMAL).recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.lora.rank = 4


def test_the_reference_is_what_the_schema_says() -> None:
    script = REPOSITORY / "scripts" / "make_reference.py"
    assert subprocess.run([sys.executable, script, "--check"], check=False).returncode == 0
    page = (REPOSITORY / "docs" / "recipe.md").read_text("utf-8")
    for key in all_keys():
        assert f"`{key.rpartition('.')[2]}`" in page or f"## {key}" in page, key


# Words with a hyphen in the package that are no code of a fault.
NOT_CODES = {"all-linear", "bf16-mixed", "bf16-true", "kaiming-uniform", "ms-swift", "read-only", "rev-parse",
             "rs-lora", "utf-8", "utf-8-sig"}  # fmt: skip
CODES_OF_ONE_WORD = {"usage", "interrupted", "unexpected", "overlong"}


def codes() -> set[str]:
    """Every code that the package gives to a fault: its texts in kebab case, apart from known other words."""
    texts = set(CODES_OF_ONE_WORD)
    for path in (REPOSITORY / "qlora_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts |= set(re.findall(r"\A[a-z0-9]+(?:-[a-z0-9]+)+\Z", node.value))
    return texts - NOT_CODES


def test_every_code_is_documented_and_no_other() -> None:
    page = (REPOSITORY / "docs" / "errors.md").read_text("utf-8")
    documented = re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE)
    assert len(documented) == len(set(documented)) > 60
    assert set(documented) == codes()
