"""Rows into conversations, and every reason for which a row is none."""

from __future__ import annotations

from typing import Any

import pytest

from qlora_cli.data.examples import Example, detect_format, to_example
from qlora_cli.data.sources import Origin, Row
from qlora_cli.errors import Fault

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def row(**fields: Any) -> Row:
    return Row(Origin("train.jsonl", 7), fields)


def make(format: str = "chat", **fields: Any) -> tuple[Example | None, list[Fault]]:
    faults: list[Fault] = []
    return to_example(row(**fields), format, faults, "train"), faults


def one_fault(format: str = "chat", **fields: Any) -> Fault:
    example, faults = make(format, **fields)
    assert example is None
    assert len(faults) == 1, faults
    assert faults[0].where == "train.jsonl:7"
    return faults[0]


def test_a_chat_row_keeps_its_messages_and_their_other_keys() -> None:
    named = USER | {"name": "Ana"}
    example, faults = make(messages=[named, ANSWER], id=3)
    assert faults == []
    assert example == Example([named, ANSWER], (True, True), None, Origin("train.jsonl", 7), "train")
    assert example.answer == "a"


def test_from_and_value_are_role_and_content() -> None:
    talk = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    example, faults = make(conversations=talk)
    assert faults == []
    assert example is not None
    assert example.messages == [{"role": "system", "content": "s"}, USER, ANSWER]


def test_an_instruction_row_becomes_a_question_and_an_answer() -> None:
    example, _ = make("instruction", instruction="Sort.", input="c a b", output="a b c", system="Be short.")
    assert example is not None
    assert example.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Sort.\n\nc a b"},
        {"role": "assistant", "content": "a b c"},
    ]


@pytest.mark.parametrize("extra", [{}, {"input": None}, {"input": ""}, {"input": " \n"}, {"system": None}])
def test_a_missing_input_is_an_empty_input(extra: dict[str, Any]) -> None:
    example, faults = make("instruction", instruction="Name a colour.", output="Blue.", **extra)
    assert faults == []
    assert example is not None
    assert [message["content"] for message in example.messages] == ["Name a colour.", "Blue."]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"output": None}, "null-answer", "`output` is null"),
        ({"output": 7}, "not-text", "`output` is `7`"),
        ({"output": "  \n"}, "empty-answer", "`output` is empty"),
        ({"instruction": None}, "missing-field", "`instruction` is null"),
        ({"instruction": " "}, "missing-field", "both empty"),
        ({"input": ["c"]}, "not-text", "`input` is a list"),
    ],
)
def test_a_faulty_instruction_row_names_the_field(fields: dict[str, Any], code: str, words: str) -> None:
    fault = one_fault("instruction", **({"instruction": "Sort.", "output": "a"} | fields))
    assert (fault.code, words in fault.message) == (code, True), fault


def test_a_missing_output_is_named() -> None:
    assert one_fault("instruction", instruction="Sort.").message == "`output` is missing"


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"text": "x"}, "no-messages", "has no `messages`, only `text`"),
        ({"messages": None}, "no-messages", "`messages` is null, not a list"),
        ({"messages": "q"}, "no-messages", "`messages` is `q`, not a list"),
        ({"messages": []}, "no-messages", "`messages` is an empty list"),
        ({"messages": [USER, "a"]}, "not-a-message", "`messages[1]` is `a`"),
        ({"messages": [USER]}, "nothing-supervised", "no `assistant` message"),
        ({"messages": [USER, ANSWER | {"train": False}]}, "nothing-supervised", "every `assistant`"),
        ({"messages": [USER, {"role": "assistant"}]}, "null-answer", "`content` of `messages[1]` is missing"),
        ({"messages": [USER, ANSWER | {"content": None}]}, "null-answer", "`messages[1]` is null"),
        ({"messages": [USER, ANSWER | {"content": " \n"}]}, "empty-answer", "`messages[1]`"),
        ({"messages": [USER, ANSWER | {"content": 3}]}, "not-text", "`messages[1]` is `3`"),
        ({"messages": [USER | {"content": None}, ANSWER]}, "missing-field", "`messages[0]` is null"),
        ({"messages": [{"content": "q"}, ANSWER]}, "unknown-role", "`messages[0]` has no `role`"),
        ({"messages": [USER | {"role": "narrator"}, ANSWER]}, "unknown-role", "`narrator`"),
        ({"messages": [USER | {"role": None}, ANSWER]}, "unknown-role", "`null`"),
        ({"messages": [USER | {"role": ["user"]}, ANSWER]}, "unknown-role", "a list"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "unknown-role", "`narrator`"),
        ({"conversations": [{"from": "human"}, {"from": "gpt", "value": "a"}]}, "missing-field", "[0]"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "bad-weight", "`weight` of `messages[1]` is `0.5`"),
        ({"messages": [USER, ANSWER | {"weight": True}]}, "bad-weight", "`true`"),
        ({"messages": [USER, ANSWER | {"train": "no"}]}, "bad-weight", "`train` of `messages[1]` is `no`"),
        ({"messages": [USER, ANSWER | {"train": True, "weight": 0}]}, "bad-weight", "contradict"),
        ({"messages": [USER, ANSWER], "tools": {"name": "x"}}, "bad-tools", "`tools` is an object"),
        ({"messages": [USER, ANSWER], "tools": ["x"]}, "bad-tools", "`tools` is a list"),
    ],
)
def test_a_faulty_chat_row_names_what_is_wrong(fields: dict[str, Any], code: str, words: str) -> None:
    example, faults = make(**fields)
    assert example is None
    assert code in [fault.code for fault in faults]
    assert any(words in fault.message for fault in faults), faults


def test_an_unknown_role_lists_those_that_are_accepted() -> None:
    assert "assistant" in str(one_fault(messages=[USER | {"role": "narrator"}, ANSWER]).accepted)


def test_every_fault_of_a_row_is_found() -> None:
    _, faults = make(
        messages=[USER | {"content": 1}, ANSWER | {"content": None}, USER | {"role": "x"}], tools=4
    )
    assert [fault.code for fault in faults] == ["not-text", "null-answer", "unknown-role", "bad-tools"]


@pytest.mark.parametrize("content", [None, "", "Let me look."])
def test_a_message_with_tool_calls_needs_no_text(content: str | None) -> None:
    call = {"role": "assistant", "content": content, "tool_calls": [{"name": "look"}]}
    example, faults = make(messages=[USER, call])
    assert faults == []
    assert example is not None
    assert example.messages[1] == call | {"content": content or ""}


def test_text_parts_are_joined_without_anything_between_them() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    example, _ = make(messages=[USER | {"content": parts}, ANSWER])
    assert example is not None
    assert example.messages[0]["content"] == "one two"


@pytest.mark.parametrize("part", [{"type": "image", "url": "x"}, {"type": "text"}, "x", None])
def test_a_part_that_is_no_text_is_a_fault(part: Any) -> None:
    assert one_fault(messages=[USER | {"content": [part]}, ANSWER]).code == "not-text"


def test_marks_of_a_message_are_not_shown_to_the_template() -> None:
    example, _ = make(
        messages=[USER | {"weight": 1}, ANSWER | {"train": False}, USER, ANSWER | {"weight": 1}]
    )
    assert example is not None
    assert example.trained == (True, False, True, True)
    assert all(set(message) == {"role", "content"} for message in example.messages)


def test_an_empty_answer_that_is_not_trained_may_stay() -> None:
    example, faults = make(messages=[USER, ANSWER | {"content": "", "train": False}, USER, ANSWER])
    assert faults == []
    assert example is not None


def test_making_an_example_leaves_the_row_as_it_was() -> None:
    message = ANSWER | {"train": True}
    make(messages=[USER, message])
    assert message == ANSWER | {"train": True}


@pytest.mark.parametrize(
    ("fields", "format", "reason"),
    [
        ({"messages": []}, "chat", "row 7 has `messages`"),
        ({"conversations": []}, "chat", "row 7 has `conversations`"),
        ({"instruction": "x", "output": None}, "instruction", "row 7 has `instruction` and `output`"),
        ({"messages": [], "instruction": "x"}, "chat", "row 7 has `messages`"),
    ],
)
def test_the_keys_of_a_row_tell_the_format(fields: dict[str, Any], format: str, reason: str) -> None:
    faults: list[Fault] = []
    detected = detect_format(row(**fields), "auto", faults)
    assert detected is not None
    assert (detected.format, detected.reason, faults) == (format, reason, [])


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": [], "instruction": "x", "output": "y"}, "ambiguous-format"),
        ({"text": "x"}, "unknown-format"),
        ({"instruction": "x"}, "unknown-format"),
        ({}, "unknown-format"),
    ],
)
def test_keys_that_fit_both_formats_or_none_are_a_fault_with_the_choices(
    fields: dict[str, Any], code: str
) -> None:
    faults: list[Fault] = []
    assert detect_format(row(**fields), "auto", faults) is None
    assert [fault.code for fault in faults] == [code]
    assert "chat" in str(faults[0].accepted)
    assert "instruction" in str(faults[0].accepted)


def test_a_format_that_the_recipe_sets_is_not_questioned() -> None:
    detected = detect_format(row(text="x"), "instruction", [])
    assert detected is not None
    assert (detected.format, detected.reason) == ("instruction", "set in the recipe")
