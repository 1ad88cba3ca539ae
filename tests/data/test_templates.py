"""Ids and labels: the whole text tokenized once, a label on each token of an answer."""

from __future__ import annotations

import pytest

from qlora_cli.data.templates import (
    IGNORED,
    Tokenized,
    chat_ids,
    check_tokenizer,
    prompt_ids,
    stop_token_ids,
    tokenize,
)
from qlora_cli.errors import InputError
from tests.data.chat_templates import TEMPLATES
from tests.data.conftest import chat, make_tokenizer, templated

TALK = ("How many legs?", "Eight.", "And a heron?", "Two legs.")
KINDS = pytest.mark.parametrize("kind", ["byte_level", "trimmed", "metaspace"])


def supervised(tokens: Tokenized, tokenizer: object) -> str:
    kept = [token for token, label in zip(tokens.input_ids, tokens.labels, strict=True) if label != IGNORED]
    return str(tokenizer.decode(kept))  # type: ignore[attr-defined]


def codes(error: pytest.ExceptionInfo[InputError]) -> list[str]:
    return [fault.code for fault in error.value.faults]


@KINDS
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_supervised_tokens_decode_to_the_turns(name: str, kind: str) -> None:
    template, tokenizer = TEMPLATES[name], templated(name, kind)
    expected = template.turn("Eight.", False) + template.turn("Two legs.", True)
    assert supervised(tokenize(chat(*TALK), tokenizer, "assistant"), tokenizer).strip() == expected.strip()


@KINDS
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_are_those_of_the_rendered_text_tokenized_once(name: str, kind: str) -> None:
    tokenizer = templated(name, kind)
    example = chat(*TALK)
    text = tokenizer.apply_chat_template(example.messages, tokenize=False)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected += [tokenizer.eos_token_id] if TEMPLATES[name].appends_eos else []
    assert tokenize(example, tokenizer, "assistant").input_ids == expected


def test_one_beginning_token_where_template_and_tokenizer_both_write_one() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = templated("llama3")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    assert tokenizer("x")["input_ids"][0] == bos  # the tokenizer does write one
    assert tokenize(chat("q", "a"), tokenizer, "assistant").input_ids.count(bos) == 1
    assert prompt_ids(chat("q", "a"), tokenizer).count(bos) == 1


def test_the_end_of_a_turn_is_supervised_though_it_is_not_the_eos_token() -> None:
    tokenizer = templated("chatml")
    assert tokenizer.eos_token == "<|eos|>"
    assert supervised(tokenize(chat("q", "Eight."), tokenizer, "assistant"), tokenizer) == "Eight.<|im_end|>"


def test_the_end_of_a_turn_is_supervised_where_pad_is_the_same_token() -> None:
    tokenizer = templated("chatml")
    tokenizer.pad_token = tokenizer.eos_token = "<|im_end|>"
    assert supervised(tokenize(chat("q", "Eight."), tokenizer, "assistant"), tokenizer) == "Eight.<|im_end|>"


@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [
        ("assistant", "Eight.<|im_end|>Two legs.<|im_end|>"),
        ("last_assistant", "Two legs.<|im_end|>"),
    ],
)
def test_loss_on_chooses_the_answers(loss_on: str, expected: str) -> None:
    tokenizer = templated("chatml")
    assert supervised(tokenize(chat(*TALK), tokenizer, loss_on), tokenizer) == expected


def test_loss_on_all_leaves_out_the_first_token_alone() -> None:
    tokens = tokenize(chat(*TALK), templated("chatml"), "all")
    assert tokens.labels == [IGNORED, *tokens.input_ids[1:]]


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"weight": 0.0}])
def test_a_silent_answer_stays_in_the_text_and_out_of_the_loss(flag: dict[str, object]) -> None:
    tokenizer = templated("chatml")
    silent = {"role": "assistant", "content": "Six, I think."} | flag
    tokens = tokenize(chat("q", silent, "Look again.", "Eight."), tokenizer, "assistant")
    assert supervised(tokens, tokenizer) == "Eight.<|im_end|>"
    assert "Six, I think.<|im_end|>" in tokenizer.decode(tokens.input_ids)


def test_a_silent_message_of_any_role_is_out_of_the_loss_on_all() -> None:
    tokenizer = templated("chatml")
    question = {"role": "user", "content": "Secret?", "train": False}
    tokens = tokenize(chat(question, "Eight."), tokenizer, "all")
    assert supervised(tokens, tokenizer) == "user\n\n<|im_start|>assistant\nEight.<|im_end|>\n"


def test_last_assistant_with_a_silent_last_answer_supervises_nothing_and_is_a_fault() -> None:
    silent = {"role": "assistant", "content": "Six.", "train": False}
    with pytest.raises(InputError, match="nothing is supervised with `loss_on: last_assistant`") as error:
        tokenize(chat("q", "Eight.", "q", silent), templated("chatml"), "last_assistant")
    assert codes(error) == ["nothing-supervised"]


def test_the_eos_token_is_appended_only_where_nothing_closes_the_last_answer() -> None:
    for name, template in TEMPLATES.items():
        tokenizer = templated(name)
        tokens = tokenize(chat(*TALK), tokenizer, "assistant")
        text = tokenizer.apply_chat_template(chat(*TALK).messages, tokenize=False)
        appended = len(tokens.input_ids) - len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert appended == template.appends_eos, name
        if appended:
            assert tokens.labels[-1] == tokenizer.eos_token_id, name


def test_an_answer_that_nothing_can_end_is_a_fault() -> None:
    tokenizer = templated("glm")
    tokenizer.eos_token = None
    with pytest.raises(InputError) as error:
        tokenize(chat("q", "Eight."), tokenizer, "assistant")
    assert codes(error) == ["no-turn-end"]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("r1", "llama3")])
def test_prompt_ids_are_the_ids_that_stand_before_the_last_answer_in_training(name: str) -> None:
    tokenizer = templated(name)
    tokens = tokenize(chat(*TALK), tokenizer, "last_assistant")
    prompt = prompt_ids(chat(*TALK), tokenizer)
    assert tokens.input_ids[: len(prompt)] == prompt
    first = next(at for at, label in enumerate(tokens.labels) if label != IGNORED)
    assert len(prompt) == first


def test_prompt_ids_leave_out_what_follows_the_last_answer() -> None:
    tokenizer = templated("chatml")
    with_tail = prompt_ids(chat("q", "Eight.", "and then?"), tokenizer)
    assert with_tail == prompt_ids(chat("q", "Eight."), tokenizer)


def test_a_template_without_generation_prompt_gets_the_header_of_an_answer() -> None:
    tokenizer = templated("no_prompt")
    ids = chat_ids([{"role": "user", "content": "q"}], tokenizer)
    assert tokenizer.decode(ids) == "[user]\nq<|im_end|>\n[assistant]\n"


def test_a_token_over_the_border_of_prompt_and_answer_is_supervised() -> None:
    tokenizer = templated("plain_end")
    tokenizer.chat_template = (
        TEMPLATES["plain_end"]
        .source.replace("((assistant))", "assistant\\n")
        .replace("'((' + m.role + '))'", "m.role + '\\n'")
    )
    two = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    assert len(two) == 1  # two line feeds are one token to this tokenizer
    tokens = tokenize(chat("q", "\n\nEight."), tokenizer, "assistant")
    assert supervised(tokens, tokenizer) == "\n\n\nEight.((end))"  # one of the three is the prompt's
    assert prompt_ids(chat("q", "\n\nEight."), tokenizer)[-1] != two[0]


def test_bytes_of_one_character_are_all_supervised() -> None:
    tokenizer = templated("chatml")
    tokens = tokenize(chat("\U0001f980", "\U0001f980\u4e16"), tokenizer, "assistant")
    assert supervised(tokens, tokenizer) == "\U0001f980\u4e16<|im_end|>"
    assert tokens.num_supervised == 4 + 3 + 1


def test_generation_stops_at_every_token_that_closes_an_answer() -> None:
    def names(template: str) -> set[str]:
        tokenizer = templated(template)
        return set(tokenizer.convert_ids_to_tokens(stop_token_ids(tokenizer)))

    assert names("chatml") == {"<|eos|>", "<|im_end|>"}
    assert names("harmony") == {"<|eos|>", "<|end|>", "<|return|>"}
    assert names("plain_end") == {"<|eos|>"}
    assert names("gemma") == {"<|eos|>", "<end_of_turn>"}


def test_a_tokenizer_without_template_or_offsets_is_a_fault() -> None:
    class Slow:
        is_fast = False
        chat_template = None
        name_or_path = "some/model"

    assert [fault.code for fault in check_tokenizer(Slow())] == ["slow-tokenizer", "no-chat-template"]
    assert check_tokenizer(templated("chatml")) == []
    assert [fault.code for fault in check_tokenizer(make_tokenizer())] == ["no-chat-template"]


def test_what_the_template_says_against_a_row_is_in_its_fault() -> None:
    system = {"role": "system", "content": "Be short."}
    talk = [system, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(InputError, match="chat.jsonl:1: .*System role not supported") as error:
        tokenize(chat(*talk), templated("gemma"), "assistant")
    assert codes(error) == ["template-refuses"]


def test_tools_reach_the_template_as_the_row_has_them() -> None:
    tokenizer = templated("chatml")
    tokenizer.chat_template = "{{ tools | tojson }}" + tokenizer.chat_template
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"left": {"type": "integer"}}}}]
    ids = tokenize(chat("q", "a", tools=tools), tokenizer, "assistant").input_ids
    assert '"parameters": {"left": {"type": "integer"}}' in tokenizer.decode(ids)
