"""Files that YAML cannot read, or that hold something else than a recipe: one clear message each."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from qlora_cli.config.load import load_recipe
from qlora_cli.errors import InputError
from tests.config.conftest import MINIMAL, Faults, Load, Write

# name: (file, code, line, column, words of the message)
UNREADABLE: dict[str, tuple[bytes, str, int, int, str]] = {
    "empty": (b"", "empty-recipe", 1, 1, "no keys"),
    "only-comments": (b"# nothing\n\n", "empty-recipe", 1, 1, "no keys"),
    "list": (b"- a\n", "not-a-mapping", 1, 1, "a list"),
    "word": (b"hello\n", "not-a-mapping", 1, 1, "a single value"),
    "utf-16": (MINIMAL.encode("utf-16"), "not-utf8", 1, 1, "UTF-16"),
    "latin-1": (b"a: 1\n# caf\xe9\n", "not-utf8", 2, 6, "0xe9"),
    "two-documents": (b"a: 1\n---\nb: 1\n", "multiple-documents", 2, 1, "second document"),
    "control-character": (b"a: 1\nb: \x07\n", "control-character", 2, 4, "U+0007"),
    "null-byte": (b"a: 1\n\x00", "control-character", 2, 1, "U+0000"),
    "deep-list": (b"a: " + b"[" * 500 + b"]" * 500, "too-deep", 1, 35, "32 levels"),
    "alias-bomb": (
        b"a: &a [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (i + 1, i + 1, b",".join([b"*%c" % i] * 9)) for i in range(97, 106)),
        "too-large", 5, 34, "aliases",
    ),
    "alias-to-itself": (b"lora: &a\n  rank: *a\n", "alias-cycle", 2, 9, "`*a`"),
    "alias-to-nothing": (b"lora: {target_modules: *_proj}\n", "unknown-alias", 1, 24, "`*_proj`"),
    "merge-key": (b"lora: &l {rank: 4}\ntrain:\n  <<: *l\n", "merge-key", 3, 3, "<<"),
    "tab-in-front": (b"data:\n\ttrain: x\n", "tab-indentation", 2, 1, "tab"),
    "tab-after-spaces": (b"data:\n  \ttrain: x\n", "tab-indentation", 2, 3, "tab"),
    "tab-after-colon": (b"lora:\n  rank:\t4\n", "tab-indentation", 2, 8, "tab"),
    "open-list": (b"data:\n  train: [a\nlora: 1\n", "yaml-syntax", 3, 5, "opened at 2:10"),
    "open-mapping": (b"lora: {rank: 4\ntrain: {}\n", "yaml-syntax", 2, 6, "opened at 1:7"),
    "open-quote": (b'a: 1\nb: "abc\nc: 1\n', "yaml-syntax", 2, 4, "never closed"),
    "two-colons": (b"model: a: b\n", "yaml-syntax", 1, 9, "`:`"),
    "no-colon": (b"lora:\n  rank: 1\n  alpha 3\n  init: x\n", "yaml-syntax", 3, 3, "no `key: value`"),
    "indentation": (b"lora:\n  rank: 3\n alpha: 4\n", "yaml-syntax", 3, 2, "indentation"),
    "item-on-the-line": (b"lora: - a\n", "yaml-syntax", 1, 7, "list item"),
    "at-sign": (b"model: @x\n", "yaml-syntax", 1, 8, "`@`"),
    "backslash": (b'output_dir: "C:\\d"\n', "yaml-syntax", 1, 17, "backslash"),
    "mapping-then-more": (b"{a: 1}\nb: 2\n", "yaml-syntax", 2, 1, "cannot follow"),
    "yaml-2": (b"%YAML 2.0\n---\na: 1\n", "yaml-syntax", 1, 1, "YAML 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_one_fault_at_its_place(faults: Faults, name: str) -> None:
    text, code, line, column, words = UNREADABLE[name]
    found = faults(text)
    assert [(f.code, f.file, f.line, f.column) for f in found] == [(code, "recipe.yaml", line, column)]
    assert words in found[0].message
    assert "token" not in found[0].message  # a parser's word, not an author's


@pytest.mark.parametrize("line_end", ["\r\n", "\r", "\n"])
@pytest.mark.parametrize("mark", ["", "﻿"])
def test_line_ends_and_a_byte_order_mark_change_nothing(load: Load, line_end: str, mark: str) -> None:
    text = mark + MINIMAL.replace("\n", line_end)
    assert load(text).recipe == load(MINIMAL).recipe


@pytest.mark.parametrize("line_end", ["\r\n", "\r", "\n"])
def test_lines_are_counted_as_an_editor_counts_them(faults: Faults, line_end: str) -> None:
    found = faults((MINIMAL + "lora: {rnk: 4}\n").replace("\n", line_end))
    assert [(f.line, f.column) for f in found] == [(4, 8)]


def test_a_unicode_line_separator_in_a_text_does_not_move_the_lines_below(faults: Faults) -> None:
    found = faults(MINIMAL + 'train: {sample_prompts: ["a\u2028b"]}\nlora: {rnk: 4}\n')
    assert [(f.line, f.column) for f in found] == [(5, 8)]


def test_document_start_and_end_lines_are_fine(load: Load) -> None:
    assert load(f"%YAML 1.1\n---\n{MINIMAL}...\n").recipe.lora.rank == 16


def test_every_duplicate_key_names_both_places(faults: Faults) -> None:
    found = faults(MINIMAL + "lora:\n  rank: 1\n  rank: 2\n  rank: 3\nmodel: {}\n")
    assert [(f.code, f.line, f.column) for f in found if f.code == "duplicate-key"] == [
        ("duplicate-key", 6, 3),
        ("duplicate-key", 7, 3),
        ("duplicate-key", 8, 1),
    ]
    assert "first at 5:3" in found[0].message
    assert "first at 5:3" in found[1].message


def test_keys_that_other_yaml_readers_take_for_numbers_or_null_are_words(faults: Faults) -> None:
    found = faults(MINIMAL + "1: a\nnull: b\nyes: c\n2024-01-01: d\n~: e\n")
    assert [f.message for f in found] == [
        f"unknown key `{key}`" for key in ("1", "null", "yes", "2024-01-01", "~")
    ]


def test_a_list_or_mapping_as_key_is_a_fault(faults: Faults) -> None:
    found = faults(MINIMAL + "? [a, b]\n: c\n? {a: b}\n: c\n")
    assert [(f.code, f.line) for f in found] == [("bad-key", 4), ("bad-key", 6)]


def test_tags_are_faults_and_run_nothing(faults: Faults, folder: Path) -> None:
    found = faults(MINIMAL + "log: !!python/object/apply:os.mkdir [made]\nlora: {rank: !!int '4'}\n")
    assert [f.message for f in found if f.code == "yaml-tag"] == [
        "`!!python/object/apply:os.mkdir` is a YAML tag",
        "`!!int` is a YAML tag",
    ]
    assert not (folder / "made").exists()


def test_anchors_and_aliases_are_values_like_any_other(load: Load) -> None:
    recipe = load(
        "model: {name_or_path: ./base}\ndata:\n  train: &t [{path: rows.jsonl}]\n  validation: *t\n"
    )
    assert recipe.recipe.data.validation[0].path == recipe.recipe.data.train[0].path


def test_a_part_that_cannot_be_read_does_not_hide_the_faults_of_the_rest(
    faults: Faults, write: Write
) -> None:
    write("lora: [\n", "part.yaml")
    found = faults("include: part.yaml\nlora: {rnk: 1}\n")
    assert [(f.code, f.file) for f in found] == [("unknown-key", "recipe.yaml"), ("yaml-syntax", "part.yaml")]


def test_a_missing_recipe_is_met_with_the_nearest_name(write: Write, folder: Path) -> None:
    write(MINIMAL, "mine.yaml")
    for config, hint in (
        ("mien.yaml", "mine.yaml"),
        ("smolm2_135m", "smollm2_135m"),
        ("qqq", "qlora recipes list"),
    ):
        with pytest.raises(InputError) as caught:
            load_recipe(config)
        (fault,) = caught.value.faults
        assert fault.code == "recipe-missing"
        assert fault.hint is not None
        assert hint in fault.hint


def test_a_folder_given_as_recipe_names_the_recipe_inside(write: Write, folder: Path) -> None:
    write(MINIMAL, "run/recipe.yaml")
    with pytest.raises(InputError) as caught:
        load_recipe("run")
    assert "run/recipe.yaml" in (caught.value.faults[0].hint or "")


def test_a_recipe_that_may_not_be_read_is_said_to_be_unreadable(
    faults: Faults, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    write(MINIMAL)
    monkeypatch.setattr("builtins.open", refuse)
    assert [(f.code, f.message) for f in faults(None)] == [
        ("recipe-unreadable", "cannot read `recipe.yaml`: permission denied")
    ]


@pytest.mark.parametrize("name", ["a b.yaml", "rezépt 😀.yaml", "-x.yaml", "x.yml", "noending"])
def test_any_file_name_works(write: Write, name: str) -> None:
    write(MINIMAL, name)
    loaded = load_recipe(name)
    assert loaded.recipe.output_dir.name == Path(name).stem


@pytest.mark.parametrize("config", ["x" * 5000, "a\0b", ""])
def test_a_name_that_no_file_can_have_is_a_missing_recipe(config: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(config)
    assert caught.value.faults[0].code == "recipe-missing"
