"""Values by the schema: what a key accepts decides how its text is read."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_cli.config.convert import convert
from qlora_cli.config.nodes import Entry, Mapping, Mark, Scalar
from qlora_cli.config.schema import Recipe
from qlora_cli.errors import Fault
from tests.config.conftest import MINIMAL, Faults, Load


def value(loaded: Any, key: str) -> Any:
    for name in key.split("."):
        loaded = getattr(loaded, name)
    return loaded


@pytest.mark.parametrize("given_by", ["file", "set"])
@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("optimizer.learning_rate", "1e-4", 1e-4),
        ("optimizer.learning_rate", "2", 2.0),
        ("optimizer.eps", "1E-8", 1e-8),
        ("schedule.warmup_ratio", ".5", 0.5),
        ("schedule.warmup_ratio", "1.", 1.0),
        ("optimizer.weight_decay", "0", 0.0),
        ("train.max_steps", "1_000", 1000),
        ("train.max_steps", "+3", 3),
        ("lora.alpha", "16", 16),
        ("lora.alpha", "1.5", 1.5),
        ("optimizer.paging.prefetch", "off", "off"),
        ("optimizer.paging.prefetch", '"off"', "off"),
        ("model.quantization.scheme", "none", "none"),
        ("model.quantization.double_quant", "off", False),
        ("model.trust_remote_code", "Yes", True),
        ("optimizer.paging.vram_budget_mib", "auto", "auto"),
        ("optimizer.paging.vram_budget_mib", "0", 0),
        ("optimizer.paging.page_mib", "16", 16),
        ("optimizer.paging.page_mib", "~", None),
        ("model.revision", "null", None),
        ("model.revision", '"null"', "null"),
        ("model.revision", "1234567", "1234567"),
        ("model.revision", "12e4567", "12e4567"),
        ("model.revision", "on", "on"),
        ("lora.target_modules", "all-linear", "all-linear"),
        ("lora.target_modules", ".*_proj", ".*_proj"),
        ("lora.target_modules", "[q_proj]", ("q_proj",)),
        ("optimizer.betas", "[0, 1e-1]", (0.0, 0.1)),
        ("train.sample_prompts", "['Who?', 12, yes]", ("Who?", "12", "yes")),
        ("data.validation", "{fraction: .25}", {"fraction": 0.25}),
    ],
)
def test_text_is_read_as_its_key_wants_it(
    load: Load, given_by: str, key: str, text: str, expected: Any
) -> None:
    *sections, leaf = key.split(".")
    if given_by == "set":
        loaded = load(MINIMAL, f"{key}={text}")
    elif sections[0] == "data":
        loaded = load(f"{MINIMAL}  {leaf}: {text}\n")
    elif sections[0] == "model":
        opening, closing = "".join(f"{s}: {{" for s in sections[1:]), "}" * (len(sections) - 1)
        loaded = load(MINIMAL.replace("./base}", f"./base, {opening}{leaf}: {text}{closing}}}"))
    else:
        lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(sections)]
        loaded = load(MINIMAL + "\n".join(lines) + f"\n{'  ' * len(sections)}{leaf}: {text}\n")
    found = value(loaded.recipe, key)
    found = found.model_dump() if isinstance(expected, dict) else found
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("key", "text", "code", "accepted", "hint"),
    [
        ("lora.rank", "0", "out-of-range", "from 1 to 1024", None),
        ("lora.rank", "1025", "out-of-range", "from 1 to 1024", None),
        ("lora.rank", "9" * 5000, "out-of-range", "from 1 to 1024", None),
        ("lora.rank", "four", "wrong-type", "a whole number", None),
        ("lora.rank", '"16"', "wrong-type", "a whole number", "remove the quotes: `16`"),
        ("lora.rank", "16.0", "wrong-type", "a whole number", "write `16`"),
        ("lora.rank", "1e1", "wrong-type", "a whole number", "write `10`"),
        ("lora.rank", "1.5", "wrong-type", "a whole number", None),
        ("lora.rank", "true", "wrong-type", "a whole number", None),
        ("lora.rank", "null", "wrong-type", "a whole number", None),
        ("lora.rank", "", "wrong-type", "a whole number", None),
        ("lora.rank", "010", "wrong-type", "a whole number", "write `10`"),
        ("lora.rank", "0x10", "wrong-type", "a whole number", None),
        ("lora.rank", "[4]", "wrong-type", "a whole number", None),
        ("lora.rank", "{a: 4}", "wrong-type", "a whole number", None),
        ("lora.alpha", "0", "out-of-range", "above 0", None),
        ("lora.dropout", "1", "out-of-range", "from 0 below 1", None),
        ("lora.dropout", "-0.1", "out-of-range", "from 0 below 1", None),
        ("optimizer.learning_rate", ".nan", "wrong-type", "a number above 0", None),
        ("optimizer.learning_rate", "nan", "wrong-type", "a number above 0", None),
        ("optimizer.learning_rate", ".inf", "wrong-type", "a number above 0", None),
        ("optimizer.learning_rate", "inf", "wrong-type", "a number above 0", None),
        ("optimizer.learning_rate", "1e999", "out-of-range", "a number above 0", None),
        ("optimizer.learning_rate", "1" * 400, "out-of-range", "a number above 0", None),
        ("optimizer.learning_rate", "true", "wrong-type", "a number above 0", None),
        ("optimizer.learning_rate", '"1e-4"', "wrong-type", "a number", "remove the quotes: `1e-4`"),
        ("optimizer.betas", "[0.9]", "wrong-type", "a list of 2 numbers", None),
        ("optimizer.betas", "[0.9, 1.0]", "out-of-range", "from 0 below 1", None),
        ("optimizer.paging.page_mib", "12", "wrong-type", "1, 2, 4, 8", None),
        ("model.trust_remote_code", "1", "wrong-type", "true or false", None),
        ("model.trust_remote_code", '"true"', "wrong-type", "true or false", "remove the quotes: `true`"),
        ("lora.variant", "rslra", "unknown-value", "lora or rslora", "did you mean `rslora`?"),
        ("lora.variant", "RSLORA", "unknown-value", "lora or rslora", "did you mean `rslora`?"),
        ("lora.target_modules", "[]", "wrong-type", "a list of texts", None),
        ("lora.target_modules", "[[q_proj]]", "wrong-type", "text", None),
        ("lora.target_modules", '""', "wrong-type", "text", None),
        ("data.train", "[]", "wrong-type", "a list", None),
        ("data.train", "rows.jsonl", "wrong-type", "a list", "[{path: rows.jsonl}]"),
        ("data.train", "[rows.jsonl]", "wrong-type", "a mapping", "{path: rows.jsonl}"),
        ("data.train", "{path: rows.jsonl}", "wrong-type", "a list", "[{path: FILE}]"),
        ("data.validation", "0.02", "wrong-type", "fraction", "{fraction: 0.02}"),
        ("data.validation", "{fraction: 1}", "out-of-range", "below 1", None),
        ("data.validation", "{}", "missing-key", "from 0 below 1", None),
        ("model", "owner/name", "wrong-type", "a mapping", "{name_or_path: owner/name}"),
        ("train", "null", "wrong-type", "a mapping", None),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_accepted(
    faults: Faults, key: str, text: str, code: str, accepted: str, hint: str | None
) -> None:
    found = faults(MINIMAL, f"{key}={text}")
    assert [f.code for f in found] == [code]
    assert found[0].file == "--set"
    assert found[0].key is not None
    assert found[0].key.startswith(key)
    assert accepted in (found[0].accepted or "")
    assert (hint is None and found[0].hint is None) or hint in (found[0].hint or "")
    assert len(found[0].message) < 200


def test_all_faults_come_at_once_in_file_order(faults: Faults) -> None:
    found = faults(
        "lora: {rank: x, aplha: 3}\ndata:\n  train: [{path: none.jsonl}]\n  max_seq_len: 2\ntrian: {}\n"
        "train: {epochs: 1, max_steps: 1}\n"
    )
    assert [(f.code, f.line) for f in found] == [
        ("missing-key", 1),
        ("wrong-type", 1),
        ("unknown-key", 1),
        ("data-unreadable", 3),
        ("out-of-range", 4),
        ("unknown-key", 5),
        ("conflicting-keys", 6),
    ]


def test_the_position_is_that_of_the_value_and_of_the_key_where_the_key_is_wrong(faults: Faults) -> None:
    found = faults(MINIMAL + "train:\n  micro_batch_size:   four\n  seeed: 1\n")
    assert [f.where for f in found] == ["recipe.yaml:5:23", "recipe.yaml:6:3"]


def test_a_section_whose_keys_are_all_commented_out_has_its_defaults(load: Load) -> None:
    assert load(MINIMAL + "lora:\n  # rank: 4\noptimizer:\n").recipe.lora.rank == 16


def test_a_position_can_be_asked_for_after_loading(load: Load) -> None:
    loaded = load(MINIMAL + "lora:\n  target_modules: [q_proj, vproj]\n", "train.max_steps=3")
    places = {
        "lora.target_modules.1": ("recipe.yaml", 5, 28),
        "lora.target_modules": ("recipe.yaml", 5, 19),
        "lora.rank": ("recipe.yaml", 4, 1),
        "data.train.0.path": ("recipe.yaml", 3, 18),
        "schedule.name": ("recipe.yaml", 1, 1),
        "train.max_steps": ("--set", None, None),
    }
    assert {key: loaded.mark(key).where for key in places} == places
    raised = Fault("base-not-found", "no such base", key="model.name_or_path")
    assert loaded.located(raised).where == "recipe.yaml:1:23"
    assert loaded.located(Fault("broken-row", "x", "rows.jsonl", 3, key="data.train")).where == "rows.jsonl:3"
    assert loaded.located(Fault("usage", "x")).where == ""
    fault = loaded.fault("target-not-found", "lora.target_modules.1", "`vproj` matches nothing", hint="x")
    assert (fault.where, fault.key, fault.hint) == ("recipe.yaml:5:28", "lora.target_modules.1", "x")


@given(
    st.text(st.characters(exclude_characters="_"), max_size=12)
    | st.decimals(allow_nan=True, places=3).map(str)
    | st.integers().map(str)
)
def test_the_loader_accepts_a_rank_exactly_where_the_schema_does(text: str) -> None:
    """The text is judged twice, by the loader and by pydantic; the two must not disagree on any text."""
    scalar = Scalar(Mark("x", 1, 1), text, True, folder=Path("/"))
    root = Mapping(Mark("x", 1, 1), {"rank": Entry(Mark("x", 1, 1), scalar)})
    draft = convert(root, Recipe.model_fields["lora"].annotation, scalar.folder)
    is_rank = text.isascii() and text.lstrip("+").isdigit() and str(Decimal(text)) == text.lstrip("+")
    expected = is_rank and 1 <= int(text) <= 1024
    assert ("rank" in draft.values) == expected
