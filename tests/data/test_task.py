"""The quickstart's data: what the script makes, and worth a score."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("train", "held_out", "unseen")


def load_script() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("make_task", ROOT / "scripts" / "make_task.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["make_task"] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    return script


def rows(name: str) -> list[list[dict[str, Any]]]:
    path = ROOT / "recipes" / "data" / "sentence_to_json" / f"{name}.jsonl"
    return [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]


def sentences(name: str) -> set[str]:
    return {messages[1]["content"] for messages in rows(name)}


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(messages[2]["content"]) for messages in rows(name)]


def test_the_files_are_what_the_script_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_script().main(["--check"]) == 0
    assert capsys.readouterr().err == ""


def test_a_changed_or_missing_file_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script()
    assert script.main(["--out", str(tmp_path)]) == 0
    assert script.main(["--check", "--out", str(tmp_path)]) == 0
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "unseen.jsonl").unlink()
    assert script.main(["--check", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("is not what this script writes") == 2


def test_no_sentence_stands_in_two_places() -> None:
    assert [len(rows(name)) for name in NAMES] == [304, 64, 40]
    assert sum(len(sentences(name)) for name in NAMES) == 408
    assert len(set().union(*(sentences(name) for name in NAMES))) == 408


def test_every_answer_is_the_only_right_form_of_its_record() -> None:
    for name in NAMES:
        for messages, record in zip(rows(name), records(name), strict=True):
            sentence, answer = messages[1]["content"], messages[2]["content"]
            assert answer == json.dumps(record, separators=(",", ":"))
            assert list(record)[:4] == ["kind", "who", "what", "day"]
            *_, (key, value) = record.items()
            assert key == {"expense": "amount", "order": "count"}.get(record["kind"], "at")
            assert record["who"] in sentence
            assert record["what"] in sentence
            assert str(value) in sentence
            assert sum(day in sentence for day in DAYS) == 1
            assert DAYS[[day[:3].lower() for day in DAYS].index(record["day"])] in sentence


DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def test_kinds_are_balanced_in_every_file() -> None:
    for name in NAMES:
        counts = Counter(record["kind"] for record in records(name))
        assert set(counts.values()) == {len(records(name)) // 4}


def test_unseen_rows_share_neither_names_nor_things_nor_phrasings_with_training() -> None:
    known = records("train") + records("held_out")
    for key in ("who", "what"):
        assert not {record[key] for record in known} & {record[key] for record in records("unseen")}
        assert {record[key] for record in records("held_out")} <= {record[key] for record in records("train")}
    script = load_script()
    assert not {p.text for p in script.PHRASINGS} & {p.text for p in script.UNSEEN_PHRASINGS}
