"""Shared fixtures: a tiny Llama and its tokenizer made in memory, in a process without network.

Nothing here imports torch before a fixture asks for it, so that tests of help and messages stay light.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

TINY_VOCAB_SIZE = 320  # 256 bytes, 4 special tokens, 60 merges
TINY_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

_hub_home = Path(tempfile.mkdtemp(prefix="qlora-tests-"))


def pytest_configure(config: pytest.Config) -> None:
    """Put every hub cache out of the user's home, before a library reads the variables at import."""
    os.environ |= {
        "HF_HOME": str(_hub_home),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for variable in (
        "HF_HUB_CACHE",
        "HF_DATASETS_CACHE",
        "HF_MODULES_CACHE",
        "HF_TOKEN",
        "TRANSFORMERS_CACHE",
    ):
        os.environ.pop(variable, None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the caches of this test process."""
    shutil.rmtree(_hub_home, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none was found"))


@pytest.fixture(autouse=True)
def _apart_from_the_user(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own home folder and no colour, also in the processes it starts."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any way out of the machine an error; local sockets between processes stay allowed."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(f"a test tried to reach the network: {args}")

    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            refuse(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_locally)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _lines() -> list[str]:
    """200 short lines for the tokenizer to learn from."""
    things = ["river", "hill", "heron", "spider", "roof", "road", "colour", "number", "name", "day"]
    forms = ["the {} is long", "what is a {} ?", "one {} and two more", "write about the {} .", "a blue {}"]
    tails = ["", " today", " answer : yes", " question : why"]
    return [form.format(thing) + tail for thing in things for form in forms for tail in tails]


@pytest.fixture(scope="session")
def _tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE,
        special_tokens=["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_lines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = TINY_TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_tokenizer(_tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with a ChatML template; pad, bos and eos (`<|im_end|>`) differ."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_tokenizer_folder)


def _make_llama(**changes: Any) -> LlamaForCausalLM:
    """Build the tiny Llama from seed 0 and leave the random state as it was."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,  # wide enough that the next token depends on the ones before
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 3,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


@pytest.fixture
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """A function that builds a two-layer fp32 Llama, always the same; keywords change its config."""
    return _make_llama


@pytest.fixture(scope="session")
def _model_folder(tmp_path_factory: pytest.TempPathFactory, _tokenizer_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("model")
    _make_llama().save_pretrained(folder)
    shutil.copytree(_tokenizer_folder, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture
def tiny_model_dir(_model_folder: Path, tmp_path: Path) -> Path:
    """A fresh folder of the tiny Llama and its tokenizer: config, safetensors, template."""
    return shutil.copytree(_model_folder, tmp_path / "tiny_model")
