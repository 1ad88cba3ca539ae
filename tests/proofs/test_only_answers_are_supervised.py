"""Proof: for any chat and any kind of template, the tokens with a label are the assistant's turns, whole.

The reference is `Template.turn`, written by hand beside each template: what the model has to write for an
answer. The mask is found by rendering, never told; so the two share nothing but the template.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qlora_cli.data.templates import IGNORED, prompt_ids, tokenize
from tests.data.chat_templates import TEMPLATES
from tests.data.conftest import chat, templated

# Pieces that templates and searches trip over, between any characters.
PIECES = [
    "<|im_end|>",
    "<|eos|>",
    "USER: ",
    "### Response:\n",
    "((end))",
    "[/INST]",
    "<",
    "\n\n",
    " ",
    "{{ 1 }}",
]
TEXT = st.lists(
    st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4
).map("".join)
CONTENT = TEXT.map(lambda text: (text + "x").strip())
TURNS = st.lists(CONTENT, min_size=2, max_size=6)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_supervised_text_is_exactly_the_answers_with_what_closes_them(
    name: str, data: st.DataObject
) -> None:
    template, tokenizer = TEMPLATES[name], _tokenizer(name)
    talk: list[Any] = data.draw(TURNS)
    if template.allows_system and data.draw(st.booleans()):
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(talk)]
        talk = [{"role": "system", "content": data.draw(CONTENT)}, *messages]
    example = chat(*talk)
    trailing = example.messages[-1]["role"] == "user"
    expected = "".join(
        template.turn(example.messages[index]["content"], index == example.answers[-1] and not trailing)
        for index in example.answers
    )
    tokens = tokenize(example, tokenizer, "assistant")
    assert _supervised(tokens.input_ids, tokens.labels, tokenizer) == expected
    moved = [IGNORED, *tokens.labels[:-1]]  # the comparison sees a mask that is off by one token
    assert _supervised(tokens.input_ids, moved, tokenizer) != expected or len(set(tokens.input_ids)) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_model_that_repeats_the_labels_says_the_answer_and_stops(name: str) -> None:
    """Prompt and labels joined are the training text, so what is learned is what is generated."""
    tokenizer = _tokenizer(name)
    example = chat("How many legs?", "Eight.", "And a heron?", "Two legs.")
    tokens = tokenize(example, tokenizer, "last_assistant")
    prompt, labels = prompt_ids(example, tokenizer), [t for t in tokens.labels if t != IGNORED]
    if name in ("r1", "llama3"):  # `prepare` warns of both: `prompt-differs`
        assert tokens.input_ids[: len(prompt)] != prompt
    else:
        assert tokens.input_ids[: len(prompt) + len(labels)] == prompt + labels


@cache
def _tokenizer(name: str) -> Any:
    return templated(name)


def _supervised(ids: list[int], labels: list[int], tokenizer: Any) -> str:
    kept = [token for token, label in zip(ids, labels, strict=True) if label != IGNORED]
    return str(tokenizer.decode(kept))
