from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from qlora_cli.model import loss as loss_module
from qlora_cli.model.loss import training_loss

FP32_SUM = 2**-20  # relative; sums of a few thousand fp32 terms in another order


@dataclass
class Rows:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


def batch(*, share: float, rows: int = 3, length: int = 17, vocabulary: int = 320) -> Rows:
    """Random rows of which about `share` of the tokens are supervised, the last row padded."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocabulary, (rows, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0
    supervised = (torch.rand(rows, length, generator=draw) < share) & (mask == 1)
    return Rows(ids, mask, ids.masked_fill(~supervised, -100))


def plain_loss(model: Any, rows: Rows) -> torch.Tensor:
    """What transformers computes: a mean over all labels, from all logits."""
    logits = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), rows.labels[:, 1:].flatten(), reduction="sum"
    )


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def soft_capped() -> Any:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            final_logit_softcapping=2.0,
            attn_implementation="eager",
            initializer_range=0.5,
        )  # fmt: skip
    )


def transposed() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2)).eval()


@pytest.mark.parametrize("share", [0.06, 0.4, 1.1])
@pytest.mark.parametrize("chunk_values", [320, 1000, 2**24])
@pytest.mark.parametrize("model", ["llama", "gemma2", "gpt2"])
def test_loss_and_gradients_are_those_of_full_logits(
    tiny_llama: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    share: float,
    chunk_values: int,
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_VALUES", chunk_values)
    net = {"llama": tiny_llama, "gemma2": soft_capped, "gpt2": transposed}[model]().eval()
    rows = batch(share=share)
    assert (rows.labels[:, 1:] != -100).any()
    expected, found = plain_loss(net, rows), training_loss(net, rows)
    torch.testing.assert_close(found, expected, rtol=FP32_SUM, atol=0)
    wanted, got = gradients(net, expected), gradients(net, found)
    assert wanted.keys() == got.keys()
    for name in wanted:
        scale = float(wanted[name].abs().max())
        torch.testing.assert_close(got[name], wanted[name], rtol=0, atol=scale * 2**-16, msg=name)


def test_it_is_transformers_own_mean_times_the_number_of_supervised_tokens(
    tiny_llama: Callable[..., Any],
) -> None:
    net, rows = tiny_llama(), batch(share=0.5)
    mean = net(input_ids=rows.input_ids, attention_mask=rows.attention_mask, labels=rows.labels).loss
    number = int((rows.labels[:, 1:] != -100).sum())
    torch.testing.assert_close(training_loss(net, rows), mean * number, rtol=FP32_SUM, atol=0)


def test_the_head_computes_logits_of_supervised_positions_only(tiny_llama: Callable[..., Any]) -> None:
    net, rows = tiny_llama(), batch(share=0.2)
    shapes: list[torch.Size] = []
    net.lm_head.register_forward_hook(lambda _module, _inputs, output: shapes.append(output.shape))
    training_loss(net, rows)
    assert shapes == [(1, int((rows.labels[:, 1:] != -100).sum()), 320)]


def test_the_hook_is_gone_afterwards_even_after_an_error(tiny_llama: Callable[..., Any]) -> None:
    net, rows = tiny_llama(), batch(share=0.5)
    training_loss(net, rows)
    with pytest.raises(IndexError):
        training_loss(net, Rows(rows.input_ids + 1000, rows.attention_mask, rows.labels))
    assert not net.lm_head._forward_pre_hooks
    assert net(input_ids=rows.input_ids).logits.shape == (3, 17, 320)


def test_a_head_that_is_never_called_falls_back_to_full_logits(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, rows = tiny_llama(), batch(share=0.5)
    expected = training_loss(net, rows)
    monkeypatch.setattr(net, "get_output_embeddings", lambda: torch.nn.Linear(2, 2))
    torch.testing.assert_close(training_loss(net, rows), expected, rtol=FP32_SUM, atol=0)


def test_nothing_supervised_gives_zero_and_zero_gradients(tiny_llama: Callable[..., Any]) -> None:
    net, rows = tiny_llama(), batch(share=0.0)
    loss = training_loss(net, rows)
    assert loss.item() == 0
    assert all(not grad.any() for grad in gradients(net, loss).values())


def test_one_row_of_one_supervised_token_is_told_from_full_logits(tiny_llama: Callable[..., Any]) -> None:
    net = tiny_llama()
    ids = torch.tensor([[5, 6]])
    rows = Rows(ids, torch.ones_like(ids), torch.tensor([[-100, 6]]))
    torch.testing.assert_close(training_loss(net, rows), plain_loss(net, rows), rtol=FP32_SUM, atol=0)


def test_a_label_on_the_first_token_counts_for_nothing(tiny_llama: Callable[..., Any]) -> None:
    net, rows = tiny_llama(), batch(share=1.1)
    masked = rows.labels.clone()
    masked[:, 0] = -100
    assert torch.equal(
        training_loss(net, rows), training_loss(net, Rows(rows.input_ids, rows.attention_mask, masked))
    )


def test_bf16_logits_are_summed_in_fp32(tiny_llama: Callable[..., Any]) -> None:
    net, rows = tiny_llama().bfloat16(), batch(share=1.1)
    found = training_loss(net, rows)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found, plain_loss(net, rows), rtol=2**-8, atol=0
    )  # a bf16 matmul of other shape
