"""From files to examples: every fault at once, lengths, reports, and splits without leaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_cli.data import prepare as module
from qlora_cli.data.examples import Example
from qlora_cli.data.prepare import Split, prepare, split_fraction
from qlora_cli.data.report import DataReport, SourceReport, name_rows
from qlora_cli.data.rows import Conversations, TokenizedRows
from qlora_cli.data.sources import Origin, Source
from qlora_cli.data.templates import Tokenized
from tests.data.conftest import templated

Write = Callable[..., Path]


def talk(question: str = "q", answer: str | None = "Eight.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def run(*paths: Path, template: str = "chatml", **settings: Any) -> Split:
    rules = {"loss_on": "assistant", "max_seq_len": 2048, "overlong": "error"} | settings
    return prepare([Source(path) for path in paths], templated(template), **rules)


def codes(split: Split) -> list[tuple[str, int | None]]:
    return [(fault.code, fault.line) for fault in split.faults]


def rows_of(split: Split) -> dict[str, int]:
    return dict(split.report.as_json()["rows"])


def test_examples_come_in_the_order_of_sources_and_rows(write_rows: Write) -> None:
    first = write_rows(talk("a"), talk("b"), name="first.jsonl")
    second = write_rows({"instruction": "c", "output": "d"}, name="second.jsonl")
    split = run(first, second)
    assert split.faults == ()
    assert [str(example.origin) for example in split.examples] == [f"{first}:1", f"{first}:2", f"{second}:1"]
    assert [example.source for example in split.examples] == ["first", "first", "second"]
    assert [e.origin for e in split.conversations] == [e.origin for e in split.examples]
    assert [(s["format"], s["reason"]) for s in split.report.as_json()["sources"]] == [
        ("chat", "row 1 has `messages`"),
        ("instruction", "row 1 has `instruction` and `output`"),
    ]


def test_faults_of_reading_shaping_and_tokenizing_stand_in_file_order(write_rows: Write) -> None:
    system = {"role": "system", "content": "s"}
    refused = {"messages": [system, *talk()["messages"]]}
    path = write_rows(talk(), refused, "{broken", talk(answer=None), talk(answer=" "), refused, "7")
    split = run(path, template="gemma")
    assert codes(split) == [
        ("template-refuses", 2),
        ("broken-row", 3),
        ("null-answer", 4),
        ("empty-answer", 5),
        ("template-refuses", 6),
        ("not-an-object", 7),
    ]
    assert rows_of(split)["read"] == 7
    assert rows_of(split)["used"] == 1


def test_an_empty_file_beside_a_full_one_is_a_fault(write_rows: Write) -> None:
    full, empty = write_rows(talk()), write_rows(name="empty.jsonl")
    split = run(full, empty)
    assert [(fault.code, fault.file) for fault in split.faults] == [("empty-file", str(empty))]


def test_rows_before_the_first_that_tells_the_format_are_faults(write_rows: Write) -> None:
    split = run(write_rows({"text": "x"}, talk(), {"instruction": "i", "output": "o"}))
    assert codes(split) == [("unknown-format", 1), ("no-messages", 3)]
    assert split.report.sources[0].reason == "row 2 has `messages`"


def test_a_file_of_nothing_but_faults_does_not_list_a_million_of_them(
    write_rows: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FAULTS", 5)
    split = run(write_rows(*["{"] * 10, *[talk(answer=None)] * 10, "{"))
    assert len(split.faults) == 6
    assert split.faults[-1].code == "too-many-faults"


def test_chunks_change_nothing(write_rows: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(*[talk(f"q{number}", f"a{number}") for number in range(7)])
    whole = run(path)
    monkeypatch.setattr(module, "_CHUNK", 2)
    assert list(run(path).examples) == list(whole.examples)


LONG = talk("river " * 60)


def test_an_overlong_row_is_a_fault_with_its_length(write_rows: Write) -> None:
    split = run(write_rows(talk(), LONG, talk("r")), max_seq_len=64)
    assert codes(split) == [("overlong", 2)]
    assert "tokens, `data.max_seq_len` is 64" in split.faults[0].message


def test_a_row_as_long_as_allowed_is_not_overlong(write_rows: Write) -> None:
    path = write_rows(talk())
    length = run(path).examples.lengths[0]
    assert run(path, max_seq_len=length).faults == ()
    assert codes(run(path, max_seq_len=length - 1)) == [("overlong", 1)]


def test_dropped_rows_are_named_and_counted(write_rows: Write) -> None:
    split = run(write_rows(talk(), LONG, LONG), max_seq_len=64, overlong="drop")
    assert split.faults == ()
    assert rows_of(split) == {"read": 3, "used": 1, "dropped": 2, "truncated": 0}
    assert [warning.code for warning in split.warnings] == ["overlong-dropped"]
    assert split.warnings[0].message.startswith("2 rows (2, 3): more than 64 tokens")


def test_a_row_cut_before_its_answer_is_dropped_and_named(write_rows: Write) -> None:
    answer = talk("q", "river " * 60)
    split = run(write_rows(talk(), LONG, answer), max_seq_len=64, overlong="truncate")
    assert rows_of(split) == {"read": 3, "used": 2, "dropped": 1, "truncated": 1}
    assert [(warning.code, warning.message[:5]) for warning in split.warnings] == [
        ("overlong-truncated", "row 3"),
        ("truncated-to-nothing", "row 2"),
    ]
    assert len(split.examples[1].input_ids) == len(split.examples[1].labels) == 64
    assert split.examples[1].num_supervised > 0


def test_no_row_left_is_a_fault(write_rows: Write) -> None:
    split = run(write_rows(LONG), max_seq_len=64, overlong="drop")
    assert codes(split) == [("no-rows-left", None)]


@pytest.mark.parametrize(
    ("template", "row", "code"),
    [
        (
            "qwen3",
            {"messages": [*talk("a", "<think>\nAdd.\n</think>\nb")["messages"], *talk()["messages"]]},
            "thinking-lost",
        ),
        ("glm", talk(), "eos-appended"),
        ("alpaca", {"messages": talk()["messages"] * 2}, "turn-without-end"),
        ("r1", talk(), "prompt-differs"),
        ("llama3", talk(), "prompt-differs"),  # two line feeds at the end are one token, before a letter two
        ("alpaca", talk("q", "\n\nEight."), "answer-merges-with-prompt"),
    ],
)
def test_what_a_template_does_to_a_row_is_said_with_the_row(
    write_rows: Write, template: str, row: dict[str, Any], code: str
) -> None:
    split = run(write_rows({"messages": talk("x")["messages"]}, row), template=template)
    assert split.faults == ()
    warning = next(warning for warning in split.warnings if warning.code == code)
    assert "2" in warning.message.split(":")[0]


def test_a_plain_chat_has_no_warnings(write_rows: Write) -> None:
    assert run(write_rows(talk(), talk("r"))).warnings == ()


def test_the_report_counts_supervised_tokens(write_rows: Write) -> None:
    split = run(write_rows(talk(), talk("a longer question")))
    report = split.report.as_json()
    supervised = sum(example.num_supervised for example in split.examples)
    assert report["supervised_tokens"] == split.examples.num_supervised == supervised
    assert report["tokens"] == sum(split.examples.lengths)
    assert report["supervised_share"] == round(supervised / report["tokens"], 6)
    assert report["sources"][0]["longest"] == max(split.examples.lengths)
    json.dumps(report)


def test_a_tokenizer_without_template_is_one_fault_not_one_a_row(write_rows: Write) -> None:
    tokenizer = templated("chatml")
    tokenizer.chat_template = None
    split = prepare(
        [Source(write_rows(talk(), talk()))], tokenizer, loss_on="assistant", max_seq_len=64, overlong="error"
    )
    assert [fault.code for fault in split.faults] == ["no-chat-template"]


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="loss_on"):
        run(loss_on="assistants")
    with pytest.raises(ValueError, match="overlong"):
        run(overlong="cut")


def test_many_rows_are_named_up_to_a_number() -> None:
    assert name_rows([3]) == "row 3"
    assert name_rows([3, 5]) == "2 rows (3, 5)"
    assert name_rows(range(1, 31)).endswith("19, 20 and 10 more)")


def made(contents: list[str]) -> Split:
    """A split whose examples are these questions, made without a tokenizer."""
    talks = [talk(content)["messages"] for content in contents]
    origins = [Origin("train.jsonl", number + 1) for number in range(len(talks))]
    examples = [Tokenized([1, 2], [-100, 2], origin, "train") for origin in origins]
    conversations = [
        Example(messages, (True, True), None, origin, "train")
        for messages, origin in zip(talks, origins, strict=True)
    ]
    report = DataReport(
        (SourceReport("train", "train.jsonl", num_read=len(talks)),), "assistant", 64, "error"
    )
    return Split(TokenizedRows(examples), Conversations(conversations), report)


def questions(split: Split) -> list[str]:
    return [example.messages[0]["content"] for example in split.conversations]


@given(
    st.lists(st.sampled_from("abcdefghijkl"), min_size=1, max_size=40),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 5),
)
def test_equal_conversations_never_stand_on_both_sides(
    contents: list[str], fraction: float, seed: int
) -> None:
    training, validation = split_fraction(made(contents), fraction, seed)
    assert not set(questions(training)) & set(questions(validation))
    assert sorted(questions(training) + questions(validation)) == sorted(contents)
    assert bool(questions(validation)) == (fraction > 0)
    assert bool(training.faults) == (not questions(training))
    for part in (training, validation):
        assert [e.origin for e in part.examples] == [e.origin for e in part.conversations]
        assert part.report.as_json()["rows"]["used"] == len(part.examples)


def test_the_split_depends_on_content_and_seed_not_on_order() -> None:
    contents = [f"question {number}" for number in range(100)]
    _, validation = split_fraction(made(contents), 0.1, 0)
    _, reversed_ = split_fraction(made(contents[::-1]), 0.1, 0)
    _, other = split_fraction(made(contents), 0.1, 1)
    assert len(validation.examples) == 10
    assert set(questions(validation)) == set(questions(reversed_)) != set(questions(other))


def test_the_share_is_kept_though_some_rows_are_repeated() -> None:
    contents = ["often"] * 50 + [f"question {number}" for number in range(50)]
    _, validation = split_fraction(made(contents), 0.1, 0)
    assert len(validation.examples) == 10


def test_a_small_share_of_a_small_set_is_one_row() -> None:
    training, validation = split_fraction(made(["a", "b", "c"]), 0.01, 0)
    assert len(validation.examples) == 1
    assert training.report.held_out == (validation.examples[0].origin,)


def test_one_row_cannot_be_split() -> None:
    training, _ = split_fraction(made(["a"]), 0.5, 0)
    assert [(fault.code, fault.key) for fault in training.faults] == [
        ("nothing-to-split", "data.validation.fraction")
    ]


def test_fraction_zero_takes_nothing() -> None:
    training, validation = split_fraction(made(["a", "b"]), 0.0, 0)
    assert questions(training) == ["a", "b"]
    assert len(validation.examples) == 0


def test_a_file_listed_twice_is_counted_twice(write_rows: Write) -> None:
    path = write_rows(talk("a"), talk("b"))
    split = run(path, path)
    training, _ = split_fraction(split, 0.0, 0)
    assert rows_of(split) == rows_of(training) == {"read": 4, "used": 4, "dropped": 0, "truncated": 0}


def test_held_examples_read_back_as_they_were() -> None:
    examples = [
        Tokenized([5, 6, 7], [-100, 6, -100], Origin("a.jsonl", 3), "a"),
        Tokenized([9], [-100], Origin("b.jsonl", 1), "b"),
        Tokenized([70000, 8], [70000, 8], Origin("a.jsonl", 4), "a"),
    ]
    held = TokenizedRows(examples)
    assert list(held) == examples
    assert (held[-1], list(held[1:]), held.lengths) == (examples[2], examples[1:], [3, 1, 2])
    assert list(held.select([2, 0])) == [examples[2], examples[0]]
    with pytest.raises(IndexError):
        held[3]
    conversation = Example(
        [{"role": "user", "content": "\u00e9\u2028"}], (True,), [{"x": None}], Origin("a", 1), "a"
    )
    assert list(Conversations([conversation])) == [conversation]
