"""Which characters of a rendered conversation the assistant wrote, for every kind of template."""

from __future__ import annotations

import pytest

from qlora_cli.data.rendering import Renderer, RenderError
from qlora_cli.data.spans import MaskNotFound, lost_texts, prompt_text, turn_spans
from tests.data.chat_templates import TEMPLATES
from tests.data.conftest import chat, templated

TALK = ("How many legs?", "Eight.", "And a heron?", "Two legs.")
TWO_ANSWERS = pytest.mark.parametrize("name", TEMPLATES)


def turns(name: str, *talk: object, only: list[int] | None = None) -> list[str]:
    example = chat(*talk)  # type: ignore[arg-type]
    text, spans = turn_spans(Renderer(templated(name)), example, example.answers if only is None else only)
    return [text[span.start : span.end] for span in spans]


@TWO_ANSWERS
def test_each_turn_is_what_the_model_has_to_write_and_nothing_else(name: str) -> None:
    template = TEMPLATES[name]
    eos = "<|eos|>" if template.appends_eos else ""  # appended to the tokens, it stands in no text
    expected = [template.turn("Eight.", False), template.turn("Two legs.", True)]
    assert turns(name, *TALK) == [expected[0], expected[1].removesuffix(eos)]


@TWO_ANSWERS
@pytest.mark.parametrize("content", ["<|im_end|", "a", "end", "<", "\n\nx\n\n", "x  ", "assistant", "Eight."])
def test_no_content_leads_the_search_astray(name: str, content: str) -> None:
    spoken = turns(name, "q", content, "Eight.", "Eight.")
    assert content.strip() in spoken[0]
    assert spoken[1].count("Eight.") == 1
    assert all("q" not in turn and "USER" not in turn for turn in spoken)


@TWO_ANSWERS
def test_a_question_behind_the_last_answer_changes_no_turn(name: str) -> None:
    closes = TEMPLATES[name].turn("Eight.", False)
    assert turns(name, "q", "Eight.", "and then?") == [closes]


@TWO_ANSWERS
def test_the_turn_continues_the_prompt_that_generation_starts_from(name: str) -> None:
    renderer, example = Renderer(templated(name)), chat(*TALK)
    text, spans = turn_spans(renderer, example, [3])
    prompt = prompt_text(renderer, example.messages[:3])
    if name == "r1":  # its prompt says more than its turns
        assert not text.startswith(prompt)
    else:
        assert text[: spans[0].start] == prompt


def test_an_answer_before_the_first_question_is_found() -> None:
    greeting = {"role": "assistant", "content": "Good day."}
    assert turns("chatml", greeting, {"role": "user", "content": "q"}, "Eight.")[0] == "Good day.<|im_end|>"


def test_two_answers_in_a_row_are_two_turns() -> None:
    second = {"role": "assistant", "content": "Or nine."}
    assert turns("chatml", "q", "Eight.", second) == ["Eight.<|im_end|>", "Or nine.<|im_end|>"]


def test_thinking_of_an_earlier_turn_is_left_out_and_of_the_last_is_kept() -> None:
    talk = (
        "Six and two?",
        "<think>\nAdd.\n</think>\n\nEight.",
        "Less two?",
        "<think>\nTake.\n</think>\n\nSix.",
    )
    assert turns("qwen3", *talk) == ["Eight.<|im_end|>", "<think>\nTake.\n</think>\n\nSix.<|im_end|>"]


def test_only_thinking_that_the_template_drops_counts_as_lost() -> None:
    renderer = Renderer(templated("qwen3"))
    dropped = chat("a", "<think>\nAdd.\n</think>\nEight.", "b", "Six.")
    kept = chat("b", "<think>\nTake.\n</think>\nSix.")
    assert lost_texts(dropped, renderer.render(dropped.messages)) == (True, False)
    assert lost_texts(kept, renderer.render(kept.messages)) == (False, False)


def test_thinking_in_a_field_that_the_template_ignores_counts_as_lost() -> None:
    example = chat("a", {"role": "assistant", "content": "Eight.", "reasoning_content": "Add."})
    assert lost_texts(example, Renderer(templated("chatml")).render(example.messages)) == (True, False)


def test_a_message_that_the_template_leaves_out_counts_as_lost() -> None:
    tokenizer = templated("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "messages %}", "messages if m.role != 'tool' %}"
    )
    example = chat("a", "b", {"role": "tool", "content": "12 degrees"}, "c")
    assert lost_texts(example, Renderer(tokenizer).render(example.messages)) == (False, True)


CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + (c | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("content", [None, "", "Let me look."])
def test_a_tool_call_belongs_to_the_turn_with_or_without_text(content: str | None) -> None:
    tokenizer = templated("chatml")
    tokenizer.chat_template = CALLS
    call = {"role": "assistant", "content": content, "tool_calls": [{"name": "look"}]}
    example = chat("q", call, {"role": "tool", "content": "12"}, {"role": "assistant", "content": "Twelve."})
    text, spans = turn_spans(Renderer(tokenizer), example, example.answers)
    assert [text[span.start : span.end] for span in spans] == [
        (content or "") + '<call>{"name": "look"}</call><|im_end|>',
        "Twelve.<|im_end|>",
    ]


def test_markers_that_a_template_sets_wrongly_are_not_believed() -> None:
    tokenizer = templated("markers")
    once = tokenizer.chat_template.replace(
        "{%- generation %}", "{%- if loop.first %}{% generation %}x{% endgeneration %}{% endif %}"
    )
    tokenizer.chat_template = once.replace("{%- endgeneration %}\n", "\n")
    example = chat(*TALK)
    text, spans = turn_spans(Renderer(tokenizer), example, example.answers)
    assert [text[span.start : span.end] for span in spans] == ["Eight.<|im_end|>", "Two legs.<|im_end|>"]


def test_private_use_characters_in_the_data_do_not_pass_for_marks() -> None:
    odd = "\ue000" + "1" + "\ue002 \ue001"
    assert turns("chatml", odd, odd) == [odd + "<|im_end|>"]
    assert turns("markers", odd, odd) == [odd + "<|im_end|>"]


def test_a_template_that_hides_the_answers_is_a_fault_not_a_guess() -> None:
    tokenizer = templated("chatml")
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(MaskNotFound, match="where message 2 ends"):
        turn_spans(Renderer(tokenizer), chat(*TALK), [1])


def test_answers_that_stand_behind_all_questions_are_found() -> None:
    tokenizer = templated("chatml")
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
        "{% if messages[-1].role == 'assistant' %}"
        "{% for m in messages if m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}{% endfor %}"
        "{% endif %}"
    )
    talk = ("q", {"role": "assistant", "content": "a"}, "r", {"role": "assistant", "content": "b"})
    example = chat(*talk)
    renderer = Renderer(tokenizer)
    assert renderer.render(example.messages) == "qra<|im_end|>b<|im_end|>"
    text, spans = turn_spans(renderer, example, [1, 3])
    assert [text[span.start : span.end] for span in spans] == ["a<|im_end|>", "b<|im_end|>"]


def test_a_template_that_reads_the_length_of_an_answer_still_gives_the_last_turn() -> None:
    tokenizer = templated("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m.content +", "(m.content | length | string) + ':' + m.content +"
    )
    assert _last_turn(tokenizer) == "6:Eight.<|im_end|>"


def _last_turn(tokenizer: object) -> str:
    text, spans = turn_spans(Renderer(tokenizer), chat("q", "Eight."), [1])
    return text[spans[0].start : spans[0].end]


def test_what_a_template_refuses_keeps_its_reason() -> None:
    with pytest.raises(RenderError, match="System role not supported"):
        turns(
            "gemma",
            {"role": "system", "content": "Be short."},
            "q",
            {"role": "assistant", "content": "a"},
            only=[1],
        )


def test_generation_prompts_without_messages_are_the_header_alone() -> None:
    assert prompt_text(Renderer(templated("chatml")), []) == "<|im_start|>assistant\n"
