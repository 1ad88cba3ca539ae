"""Tokenizers of several kinds, and rows written to files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from qlora_cli.data.examples import Example, to_example
from qlora_cli.data.sources import Origin, Row
from tests.data.chat_templates import TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

settings.register_profile("steady", deadline=None, derandomize=True)  # no clock, the same examples each time
settings.load_profile("steady")

_TEXT = [
    "how many legs has a spider ? eight . name a colour . blue is a colour .",
    "USER: ASSISTANT: ### Instruction: ### Response: user assistant system ((end)) [INST] [/INST]",
    "the river is long and the hill is low \n\n\n\n and   more",
]


@cache
def make_tokenizer(kind: str = "byte_level", special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A small tokenizer with `<|pad|>`, `<|bos|>`, `<|eos|>` and the special tokens that are named.

    Kinds: `byte_level` (GPT-2's way), `trimmed` (the same with blanks cut off the offsets), `metaspace`
    (Llama 2's way: blanks become U+2581, unknown characters become bytes).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if kind == "metaspace":
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        bpe.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        named = ["<unk>", "<|pad|>", "<|bos|>", "<|eos|>", *bytes_]
        alphabet: list[str] = []
    else:
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        if kind == "trimmed":
            bpe.post_processor = processors.ByteLevel(trim_offsets=True)
        named, alphabet = ["<|pad|>", "<|bos|>", "<|eos|>"], sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=named, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_TEXT, trainer)
    if kind == "metaspace":
        bpe = _with_plain_bytes(bpe)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=list(special),
        clean_up_tokenization_spaces=False,
    )


def _with_plain_bytes(bpe: Any) -> Any:
    """Take the byte tokens off the list of added ones, as SentencePiece models have them."""
    from tokenizers import Tokenizer

    content = json.loads(bpe.to_str())
    content["added_tokens"] = [
        each for each in content["added_tokens"] if not each["content"].startswith("<0x")
    ]
    return Tokenizer.from_str(json.dumps(content))


def templated(name: str, kind: str = "byte_level") -> PreTrainedTokenizerFast:
    """A tokenizer with one of the templates and the tokens it needs; not shared, so it may be changed."""
    from copy import deepcopy

    template = TEMPLATES[name]
    tokenizer = deepcopy(make_tokenizer(kind, template.special))
    tokenizer.chat_template = template.source
    return tokenizer


def chat(*turns: str | dict[str, Any], **fields: Any) -> Example:
    """An example of user and assistant messages by turns; a dict is a message as it stands."""
    roles = ("user", "assistant")
    messages = [
        turn if isinstance(turn, dict) else {"role": roles[number % 2], "content": turn}
        for number, turn in enumerate(turns)
    ]
    faults: list[Any] = []
    example = to_example(
        Row(Origin("chat.jsonl", 1), {"messages": messages, **fields}), "chat", faults, "chat"
    )
    assert example is not None, faults
    return example


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes objects or raw lines to a file of JSON lines."""

    def write(*rows: Any, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="")
        return path

    return write
