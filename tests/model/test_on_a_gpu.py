from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qlora_cli.device import probe
from qlora_cli.generate import generate
from qlora_cli.model.load import QuantizationSpec, load_base
from qlora_cli.model.lora import LoraSpec, attach, enable_checkpointing
from qlora_cli.model.nf4 import linear4bit_layers

pytestmark = pytest.mark.gpu

IDS = torch.arange(4, 44).reshape(2, 20)


def model_on_gpu(folder: Path, dtype: str = "bf16") -> Any:
    spec = QuantizationSpec("nf4", True, dtype)
    base = load_base(str(folder), None, spec, "sdpa", probe().torch_device, False)
    return attach(base, LoraSpec(rank=4, alpha=8), seed=0)


def test_every_weight_is_on_the_gpu_and_none_is_upcast(tiny_model_dir: Path) -> None:
    model = model_on_gpu(tiny_model_dir)
    quantised = {id(layer.weight) for _, layer in linear4bit_layers(model)}
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    frozen = [p for p in model.parameters() if not p.requires_grad and id(p) not in quantised]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_the_adapter_starts_from_the_same_numbers_as_on_a_cpu(tiny_model_dir: Path) -> None:
    spec = QuantizationSpec("nf4", True, "fp32")
    base = load_base(str(tiny_model_dir), None, spec, "sdpa", "cpu", False)
    on_cpu = attach(base, LoraSpec(rank=4, alpha=8), seed=0).named_parameters()
    on_gpu = dict(model_on_gpu(tiny_model_dir, "fp32").named_parameters())  # with bf16, peft rounds to it
    assert all(torch.equal(p, on_gpu[name].cpu()) for name, p in on_cpu if p.requires_grad)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_answers_during_training_leave_no_trace_in_it(
    tiny_model_dir: Path, tiny_tokenizer: Any, checkpointing: bool
) -> None:
    def train(asking: bool) -> list[torch.Tensor]:
        model = model_on_gpu(tiny_model_dir)
        if checkpointing:
            enable_checkpointing(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        ids = IDS.to("cuda")
        for _ in range(3):
            if asking:
                generate(model, tiny_tokenizer, [[5, 9], [7] * 9], 5, 2)
            with torch.autocast("cuda", torch.bfloat16):
                model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*parameters, torch.cuda.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))
