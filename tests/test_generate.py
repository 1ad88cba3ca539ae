from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from qlora_cli.data.templates import chat_ids
from qlora_cli.generate import generate, stop_tokens
from qlora_cli.model.load import QuantizationSpec, load_base
from qlora_cli.model.lora import LoraSpec, attach, enable_checkpointing

PROMPTS = [[5, 9, 200], [7], list(range(30, 52)), [11, 12, 13, 14, 15], [7, 7], list(range(60, 70))]


def greedy(model: Any, prompt: list[int], number: int, stops: set[int]) -> list[int]:
    """The answer, found one full forward at a time: no cache, no padding, no library."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(number):
            token = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
            if token in stops:
                break
            tokens.append(token)
    return tokens[len(prompt) :]


def test_every_prompt_gets_its_own_greedy_answer_in_order(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model = tiny_llama()
    stops = set(stop_tokens(model, tiny_tokenizer))
    expected = [greedy(model, prompt, 12, stops) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)  # the test could see a mix-up
    texts = [tiny_tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]
    for batch_size in (1, 2, 4, 6, 9):
        assert generate(model, tiny_tokenizer, PROMPTS, 12, batch_size) == texts


def test_an_answer_ends_in_front_of_any_stop_token(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model = tiny_llama()
    full = greedy(model, PROMPTS[2], 12, set())
    stop = full[4]
    end = full.index(stop)
    model.generation_config.eos_token_id = [stop, 319]
    answer = generate(model, tiny_tokenizer, [PROMPTS[2]], 12, 1)
    assert answer == [tiny_tokenizer.decode(full[:end], skip_special_tokens=True)]


def test_the_turn_terminator_of_the_template_stops_though_it_is_not_the_eos_token(
    tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    model = tiny_llama(eos_token_id=None)
    model.generation_config.eos_token_id = None
    tiny_tokenizer.eos_token = "<|pad|>"
    end = tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_tokens(model, tiny_tokenizer) == [0, end]
    tiny_tokenizer.chat_template = None
    assert stop_tokens(model, tiny_tokenizer) == [0]


def test_max_new_tokens_bounds_an_answer(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    model = tiny_llama()
    lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda _module, _args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generation_config.eos_token_id = None
    tiny_tokenizer.eos_token = None
    tiny_tokenizer.chat_template = None
    generate(model, tiny_tokenizer, [PROMPTS[2]], 7, 1)
    assert lengths == [
        len(PROMPTS[2]),
        1,
        1,
        1,
        1,
        1,
        1,
    ]  # the prompt once, then one token at a time: a cache


def test_sampling_and_penalties_of_the_generation_config_are_not_applied(
    tiny_llama: Any, tiny_tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama()
    plain = generate(model, tiny_tokenizer, PROMPTS, 12, 3)
    own = GenerationConfig(
        do_sample=True, temperature=5.0, top_k=3, repetition_penalty=9.0, eos_token_id=3, max_length=3
    )
    model.generation_config = own
    assert generate(model, tiny_tokenizer, PROMPTS, 12, 3) == plain
    assert model.generation_config is own
    assert capfd.readouterr() == ("", "")


def test_no_prompts_give_no_answers_and_an_empty_prompt_is_an_error(
    tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    model = tiny_llama()
    assert generate(model, tiny_tokenizer, [], 4, 2) == []
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, tiny_tokenizer, [[5], []], 4, 2)
    with pytest.raises(ValueError, match="at least 1"):
        generate(model, tiny_tokenizer, [[5]], 0, 2)


def test_a_rendered_chat_is_answered_with_text_without_special_tokens(
    tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    ids = chat_ids([{"role": "user", "content": "what is a river ?"}], tiny_tokenizer)
    (answer,) = generate(tiny_llama(), tiny_tokenizer, [ids], 20, 1)
    assert "<|" not in answer


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_answers_during_training_leave_no_trace_in_it(
    tiny_model_dir: Path, tiny_tokenizer: Any, checkpointing: bool, dropout: float
) -> None:
    def train(asking: bool) -> list[torch.Tensor]:
        spec = QuantizationSpec("nf4", True, "fp32")
        base = load_base(str(tiny_model_dir), None, spec, "sdpa", "cpu", False)
        model = attach(base, LoraSpec(rank=4, alpha=8, dropout=dropout), seed=0)
        if checkpointing:
            enable_checkpointing(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        torch.manual_seed(3)
        ids = torch.arange(4, 44).reshape(2, 20)
        for _ in range(3):
            if asking:
                generate(model, tiny_tokenizer, PROMPTS, 5, 4)
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(module.training for module in model.modules())
        assert torch.is_grad_enabled()
        return [*parameters, torch.get_rng_state()]

    with_answers, without = train(True), train(False)
    assert all(torch.equal(a, b) for a, b in zip(with_answers, without, strict=True))
    assert any(parameter.any() for parameter in without)
