from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch

from qlora_cli.model.load import QuantizationSpec, load_base
from qlora_cli.model.nf4 import linear4bit_layers

IDS = torch.arange(4, 44).reshape(2, 20)


@pytest.fixture
def base(tiny_model_dir: Path) -> Any:
    return load_base(str(tiny_model_dir), None, QuantizationSpec("nf4", True, "fp32"), "sdpa", "cpu", False)


def state_of(layer: Any) -> list[Any]:
    """Everything a 4-bit layer computes with."""
    state = layer.weight.quant_state
    tensors = [
        layer.weight.data,
        state.absmax,
        state.code,
        state.offset,
        state.state2.absmax,
        state.state2.code,
    ]
    settings = [layer.compute_dtype, layer.compute_type_is_set, tuple(layer.weight.shape), state.dtype]
    return [tensor.clone() for tensor in tensors] + settings + [sorted(vars(state))]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def evaluate(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(IDS)


def input_gradient(model: Any) -> torch.Tensor:
    """Gradient of the embeddings of a training forward, which must pass through every 4-bit layer."""
    model.train()
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embeddings).logits.square().mean().backward()
    assert embeddings.grad is not None
    return embeddings.grad


def test_no_layer_may_repack_its_weight(base: Any) -> None:
    layers = list(linear4bit_layers(base))
    assert layers
    assert not any(layer.support_avx512bf16_for_cpu for _, layer in layers)


def test_the_attribute_is_what_keeps_a_layer_from_repacking(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repacking itself needs AVX512-BF16; that the call is made or not can be seen on any CPU."""

    class Repacked(Exception):
        pass

    def repack(*_: Any) -> None:
        raise Repacked

    monkeypatch.setattr(bitsandbytes.nn.modules, "_convert_weight_packed_for_cpu", repack)
    evaluate(base)
    next(linear4bit_layers(base))[1].support_avx512bf16_for_cpu = True
    with pytest.raises(Repacked):
        evaluate(base)


def test_an_evaluation_leaves_every_layer_as_it_was_and_gradients_flow(base: Any) -> None:
    expected = input_gradient(base)
    before = {name: state_of(layer) for name, layer in linear4bit_layers(base)}
    evaluate(base)
    assert all(same(before[name], state_of(layer)) for name, layer in linear4bit_layers(base))
    assert torch.equal(input_gradient(base), expected)
    assert expected.abs().max() > 0


def test_a_bias_has_the_compute_dtype_from_the_start(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama(attention_bias=True)
    model.save_pretrained(tmp_path)
    base = load_base(str(tmp_path), None, QuantizationSpec("nf4", True, "bf16"), "sdpa", "cpu", False)
    biases = {layer.bias.dtype for _, layer in linear4bit_layers(base) if layer.bias is not None}
    assert biases == {torch.bfloat16}
