"""The resolved recipe: reading back what was written gives the same recipe, also by other readers of YAML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from qlora_cli.config.dump import dump_recipe
from qlora_cli.config.kinds import Kind, fields_of, is_filled
from qlora_cli.config.load import load_recipe
from qlora_cli.config.schema import Recipe
from tests.config.conftest import MINIMAL, Load

TRICKY = [
    *(
        "off",
        "no",
        "null",
        "~",
        "1e4",
        "0x10",
        "1:30",
        "2024-01-01",
        ".5",
        "=",
        "<<",
        "a: b",
        "a #b",
        "'",
        '"',
        "\\",
    ),
    *(
        "- a",
        "? a",
        "!x",
        "&x",
        "*x",
        "%x",
        "@x",
        "`x",
        "{",
        "[",
        "|",
        ">",
        "é😀",
        "a\nb",
        " a ",
        "\t",
        "a\u2028b",
    ),
    *("\x07", "\ufeff", "true", "y", "nan", "+1", "1_0", "010"),
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
TEXTS = (st.sampled_from(TRICKY) | TEXT).filter(str.strip)


def values(kind: Kind) -> st.SearchStrategy[Any]:
    """Values that a kind accepts."""
    found: list[st.SearchStrategy[Any]] = [
        st.sampled_from(w) for w in (kind.words, kind.numbers, kind.flags) if w
    ]
    if kind.integer is not None:
        low, high = kind.integer.least or 1, kind.integer.most or 10**9
        found.append(st.integers(int(low), int(high)))
    if kind.number is not None:
        floats = st.floats(0, 1e9, allow_nan=False).filter(kind.number.holds)
        found.append(floats)
    if kind.text:
        found.append(TEXTS)
    if kind.section is not None:
        found.append(sections(kind.section))
    if kind.item is not None:
        items = st.lists(values(kind.item), min_size=kind.least_items, max_size=kind.most_items or 3)
        found.append(items.map(tuple))
    if kind.null:
        found.append(st.none())
    return st.one_of(found)


def sections(section: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Sections with any of their keys given; paths are added by the test."""
    required, optional = {}, {}
    for name, kind in fields_of(section).items():
        field = section.model_fields[name]
        if kind.path:
            continue
        must = field.is_required() and not is_filled(field)
        (required if must else optional)[name] = values(kind)
    return st.fixed_dictionaries(required, optional=optional)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    values_=sections(Recipe),
    name=st.sampled_from(["rows.jsonl", "r o w s.jsonl", "1e4", "off", "réws #.jsonl"]),
)
def test_reading_a_resolved_recipe_back_gives_the_same_recipe(
    folder: Path, values_: dict[str, Any], name: str
) -> None:
    (folder / name).write_text("{}\n", "utf-8")
    values_["model"]["name_or_path"] = "./base"
    values_["data"]["train"] = [{**source, "path": name} for source in values_["data"]["train"]]
    if isinstance(values_["data"].get("validation"), tuple):
        values_["data"]["validation"] = [{**s, "path": name} for s in values_["data"]["validation"]]
    settle(values_)
    given_ = folder / "given.yaml"
    given_.write_text(yaml.safe_dump(plain(values_), allow_unicode=True), "utf-8")
    recipe = load_recipe(given_).recipe
    resolved = folder / "resolved.yaml"
    resolved.write_text(dump_recipe(recipe), "utf-8")
    assert load_recipe(resolved).recipe == recipe
    assert dump_recipe(load_recipe(resolved).recipe) == dump_recipe(recipe)
    read_by_others = yaml.safe_load(resolved.read_text("utf-8"))
    assert Recipe.model_validate(typed(read_by_others, recipe.model_dump())) == recipe


def settle(values_: dict[str, Any]) -> None:
    """Take out what excludes something else, so that every example is a recipe."""
    optimizer, train = values_.get("optimizer", {}), values_.get("train", {})
    if train.get("max_steps") is not None:
        train.pop("epochs", None)
    train.pop("eval_every_steps", None)
    if optimizer.get("name") in ("paged_adamw_8bit", "paged_adamw_32bit"):
        optimizer.pop("state_bits", None)
    if optimizer.get("paging", {}).get("backend") == "resident":
        optimizer["paging"].pop("vram_budget_mib", None)
    values_.get("schedule", {}).pop("decay_ratio", None)
    values_["model"].get("quantization", {}).pop("scheme", None)
    if isinstance(values_.get("lora", {}).get("target_modules"), str):
        values_["lora"]["target_modules"] = r"model\.layers\.\d+\..*(q|v)_proj"
    for sources in (values_["data"]["train"], values_["data"].get("validation")):
        for index, source in enumerate(sources if isinstance(sources, list) else []):
            source["name"] = f"{source.get('name') or ''}{index}"


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def typed(read: Any, model: Any) -> Any:
    """What another reader read, with lists as tuples and paths as paths where the recipe has them."""
    if isinstance(model, dict):
        assert list(read) == list(model)
        return {key: typed(read[key], model[key]) for key in model}
    if isinstance(model, tuple):
        return tuple(typed(r, m) for r, m in zip(read, model, strict=True))
    assert isinstance(read, str if isinstance(model, Path) else type(model)), (read, model)
    return Path(read) if isinstance(model, Path) else read


@pytest.mark.parametrize("text", [t for t in TRICKY if t.strip()])
def test_any_text_survives(load: Load, folder: Path, text: str) -> None:
    loaded = load(MINIMAL)
    train = loaded.recipe.train.model_copy(update={"sample_prompts": (text, text)})
    recipe = loaded.recipe.model_copy(update={"train": train})
    (folder / "resolved.yaml").write_text(dump_recipe(recipe), "utf-8")
    assert load_recipe("resolved.yaml").recipe == recipe
    assert yaml.safe_load(dump_recipe(recipe))["train"]["sample_prompts"] == [text, text]


def test_a_folder_whose_name_is_not_unicode_survives(load: Load, folder: Path) -> None:
    name = os.fsdecode(b"r\xfcns")
    recipe = load(MINIMAL, f"output_dir={name}").recipe
    (folder / "resolved.yaml").write_text(dump_recipe(recipe), "utf-8")
    assert load_recipe("resolved.yaml").recipe.output_dir == folder / name


def test_the_resolved_recipe_has_every_key_and_absolute_paths(load: Load, folder: Path) -> None:
    text = dump_recipe(load(MINIMAL).recipe)
    document = yaml.safe_load(text)
    assert list(document) == list(Recipe.model_fields)
    assert document["optimizer"]["learning_rate"] == 0.0002
    assert document["optimizer"]["eps"] == 1e-8
    assert document["data"]["train"] == [
        {"path": str(folder / "rows.jsonl"), "format": "auto", "name": "rows"}
    ]
    assert 'prefetch: "off"' in dump_recipe(load(MINIMAL, "optimizer.paging.prefetch=off").recipe)
    assert "&" not in text
    assert "!" not in text
