"""Greedy answers to prompts, in batches, without a trace in the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from qlora_cli.data.templates import stop_token_ids
from qlora_cli.model.aside import aside
from qlora_cli.model.lora import PeftModel
from qlora_cli.model.quiet import quiet


def generate(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
) -> list[str]:
    """Answer prompts, each token the most probable one.

    Prompts of similar length share a batch, padded on the left, which changes no answer but rounding. An
    answer ends in front of any of: the tokenizer's eos token, those of the model's generation config, and the
    token that the chat template writes behind an assistant's turn. Penalties and sampling in the generation
    config are not applied.

    Args:
        model: A causal language model, with or without adapter; mode, random state and settings come back as
            they were.
        tokenizer: With the chat template that the prompts were rendered with.
        prompts: Token ids, each at least one, ending where the assistant's turn begins.
        max_new_tokens: Longest answer, at least 1.
        batch_size: Prompts in one forward, at least 1.

    Returns:
        The answers without special tokens, in the order of the prompts.

    Raises:
        ValueError: If a prompt is empty, or a number is below 1.
    """
    if max_new_tokens < 1 or batch_size < 1:
        raise ValueError("max_new_tokens and batch_size are at least 1")
    if not all(prompts):
        raise ValueError("a prompt has at least one token")
    base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    stops = stop_tokens(base, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stops or None,
        pad_token_id=pad,
        use_cache=True,
    )
    own = base.generation_config
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: dict[int, str] = {}
    try:
        base.generation_config = settings  # generate() fills gaps of what it is given from here
        with aside(model), quiet():
            for start in range(0, len(order), batch_size):
                indices = order[start : start + batch_size]
                new_tokens = _continue(base, [prompts[index] for index in indices], pad, settings)
                for index, tokens in zip(indices, new_tokens, strict=True):
                    answers[index] = tokenizer.decode(_until(tokens, stops), skip_special_tokens=True)
    finally:
        base.generation_config = own
    return [answers[index] for index in range(len(prompts))]


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends an answer.

    Args:
        model: Its generation config may name some.
        tokenizer: Its eos token, and what its chat template closes an assistant's turn with.

    Returns:
        Token ids in ascending order; empty where there are none, and answers have full length.
    """
    named = getattr(model.generation_config, "eos_token_id", None)
    stops = {named} if isinstance(named, int) else set(named or ())
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        stops |= set(stop_token_ids(tokenizer))
    return sorted(stops)


def _continue(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad: int, settings: GenerationConfig
) -> list[list[int]]:
    """New tokens of one batch, with whatever stands behind a stop token."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings
    )
    new_tokens: list[list[int]] = output[:, longest:].tolist()
    return new_tokens


def _until(tokens: Sequence[int], stops: Sequence[int]) -> list[int]:
    """The tokens in front of the first stop token."""
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:end])
