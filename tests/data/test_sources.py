"""Reading JSON lines: which bytes are a row, and what is said of those that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_cli.data.sources import Origin, Row, Source, read_rows
from qlora_cli.errors import Fault

Write = Callable[..., Path]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(path: Path) -> tuple[list[Row], list[Fault]]:
    faults: list[Fault] = []
    return list(read_rows(Source(path), faults)), faults


def read_bytes(folder: Path, data: bytes) -> tuple[list[Row], list[Fault]]:
    path = folder / "train.jsonl"
    path.write_bytes(data)
    return read(path)


def only_fault(folder: Path, line: str | bytes) -> Fault:
    data = line if isinstance(line, bytes) else line.encode()
    rows, faults = read_bytes(folder, b'{"a": 1}\n' + data + b'\n{"a": 2}\n')
    assert [row.origin.row for row in rows] == [1, 3]  # the rows around it are read
    assert len(faults) == 1
    assert faults[0].line == 2
    return faults[0]


def test_rows_are_numbered_by_line_and_blank_lines_count(tmp_path: Path) -> None:
    rows, faults = read_bytes(tmp_path, b'{"a": 1}\r\n\r\n  \t\n{"a": "x\\r"}\r\n{"a": 3}')
    assert [(row.origin.row, row.fields["a"]) for row in rows] == [(1, 1), (4, "x\r"), (5, 3)]
    assert faults == []


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    rows, faults = read_bytes(tmp_path, b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')
    assert [row.fields for row in rows] == [{"a": 1}, {"a": 2}]
    assert faults == []


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x1c", "\x0b", "\x0c"])
def test_only_a_line_feed_ends_a_row(tmp_path: Path, separator: str) -> None:
    raw = separator if separator > "\x1f" else json.dumps(separator)[1:-1]
    rows, faults = read_bytes(tmp_path, f'{{"a": "x{raw}y"}}\n'.encode())
    assert [row.fields for row in rows] == [{"a": f"x{separator}y"}]
    assert faults == []


@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \n\t\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_rows_is_a_fault(tmp_path: Path, content: bytes) -> None:
    rows, faults = read_bytes(tmp_path, content)
    assert rows == []
    assert [(fault.code, fault.file, fault.line) for fault in faults] == [
        ("empty-file", str(tmp_path / "train.jsonl"), None)
    ]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ('{"a": "How lon', "broken-row", "position 7"),
        ('{"a": 1} {"b": 2}', "broken-row", "extra data"),
        ("{'a': 1}", "broken-row", "not JSON"),
        ('{"a": NaN}', "broken-row", "`NaN` is not JSON"),
        ('{"a": -Infinity}', "broken-row", "`-Infinity` is not JSON"),
        ('{"a": 1e999}', "broken-row", "`1e999` is too large"),
        ('{"a": "tab\there"}', "broken-row", "control character"),
        ("[" * 100_000, "broken-row", "nested too deeply"),
        ("42", "not-an-object", "`42`"),
        ("null", "not-an-object", "`null`"),
        ('["a"]', "not-an-object", '`["a"]`'),
        ('{"a": 1, "a": 1}', "duplicate-field", "`a`"),
        ('{"m": [{"content": "x", "role": "user", "content": "y"}]}', "duplicate-field", "`content`"),
        ('{"a": "\\ud83d"}', "lone-surrogate", "`\\ud83d`"),
        ('{"\\uDC00": 1}', "lone-surrogate", "`\\udc00`"),
        (b'{"a": "caf\xe9"}', "not-utf8", "0xe9 at position 11"),
        (b'{"a": "\xed\xa0\x80"}', "not-utf8", "0xed"),
    ],
)
def test_a_row_that_is_no_object_is_named_with_its_reason(
    tmp_path: Path, line: str | bytes, code: str, words: str
) -> None:
    fault = only_fault(tmp_path, line)
    assert fault.code == code
    assert words in fault.message


def test_an_integer_of_any_length_stays_exact_or_is_a_fault(tmp_path: Path) -> None:
    rows, faults = read_bytes(tmp_path, b'{"a": 12345678901234567890123}\n{"a": %b}\n' % (b"9" * 5000))
    assert rows[0].fields["a"] == 12345678901234567890123
    assert len(rows) + len(faults) == 2  # Pythons before 3.10.7 know no limit


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    rows, faults = read_bytes(tmp_path, b'{"a": "\\ud83e\\udd80"}\n')
    assert rows[0].fields["a"] == "\U0001f980"
    assert faults == []


def test_a_utf16_file_is_one_fault(tmp_path: Path) -> None:
    rows, faults = read_bytes(tmp_path, '{"a": 1}\n{"a": 2}\n{"a": 3}\n'.encode("utf-16"))
    assert rows == []
    assert [(fault.code, fault.line) for fault in faults] == [("not-utf8", 1)]
    assert "UTF-16" in faults[0].message


@pytest.mark.parametrize("name", ["train.csv", "train.json", "train.jsonl.gz", "train", "folder"])
def test_a_path_of_another_kind_is_a_fault_that_says_what_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir() if name == "folder" else path.write_bytes(b'{"a": 1}\n')
    rows, faults = read(path)
    assert rows == []
    assert [fault.code for fault in faults] == ["unknown-file-type"]
    assert ".jsonl" in str(faults[0].accepted)


def test_a_file_that_cannot_be_opened_is_a_fault(tmp_path: Path) -> None:
    rows, faults = read(tmp_path / "missing.jsonl")
    assert rows == []
    assert [fault.code for fault in faults] == ["unreadable-file"]


def test_keys_that_a_row_does_not_have_are_not_filled_in(write_rows: Write) -> None:
    rows, _ = read(write_rows({"a": {"x": 1}}, {"a": {"y": "007"}, "b": None}))
    assert [row.fields for row in rows] == [{"a": {"x": 1}}, {"a": {"y": "007"}, "b": None}]


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=4), st.booleans())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, objects: list[dict[str, object]], ascii_only: bool
) -> None:
    lines = [json.dumps(each, ensure_ascii=ascii_only) for each in objects]
    folder = tmp_path_factory.mktemp("rows")
    rows, faults = read_bytes(folder, "\n".join(lines).encode("utf-8"))
    assert [row.fields for row in rows] == objects
    assert faults == []


@given(st.binary(max_size=60))
def test_no_bytes_end_in_anything_but_rows_and_faults(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    rows, faults = read_bytes(tmp_path_factory.mktemp("rows"), data)
    assert rows or faults


def test_an_origin_reads_as_file_and_row() -> None:
    assert str(Origin("data/train.jsonl", 412)) == "data/train.jsonl:412"
