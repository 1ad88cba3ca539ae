"""The claim: a merged folder holds base + adapter, and a merge that does not is caught before it appears.

References: weights computed in numpy fp64 from the files, peft's own `merge_and_unload`, and the values that
a loaded bitsandbytes layer multiplies with.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qlora_cli.errors import RunError
from qlora_cli.model import adapter as adapter_module
from qlora_cli.model.adapter import align, read_adapter
from qlora_cli.model.base_files import open_base
from qlora_cli.model.fit import fit
from qlora_cli.model.fold import Fold
from qlora_cli.model.merge import merge

# with p significant bits, rounding to nearest is off by at most 2**-p of the value
ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Q, V, DOWN = "self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"


def write_adapter(folder: Path, base: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(
        {f"base_model.model.{key}": value for key, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    document = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), **config}
    (folder / "adapter_config.json").write_text(json.dumps(document), "utf-8")
    return folder


def random_pairs(base: Path, ranks: dict[str, int], spread: float = 0.3) -> dict[str, torch.Tensor]:
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for module, rank in ranks.items():
        rows, columns = weights[f"{module}.weight"].shape
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * spread
        tensors[f"{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * spread
    return tensors


def wide(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.double().numpy()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(1, 9),
    special_rank=st.integers(1, 9),
    alpha=st.integers(1, 64),
    special_alpha=st.integers(1, 64),
    pattern=st.sampled_from([V, "v_proj", rf"model\.layers\.\d\.{V}", r".*v_proj"]),
    use_rslora=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
)
def test_merged_weights_are_those_computed_in_fp64_from_the_files(
    tiny_model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    rank: int,
    special_rank: int,
    alpha: int,
    special_alpha: int,
    pattern: str,
    use_rslora: bool,
    dtype: str,
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    ranks = {f"model.layers.{i}.{name}": rank for i in (0, 1) for name in (Q, DOWN)}
    ranks |= {f"model.layers.{i}.{V}": special_rank for i in (0, 1)}
    tensors = random_pairs(tiny_model_dir, ranks)
    adapter = write_adapter(
        folder / "adapter",
        tiny_model_dir,
        tensors,
        r=rank,
        lora_alpha=alpha,
        rank_pattern={pattern: special_rank},
        alpha_pattern={pattern: special_alpha},
        use_rslora=use_rslora,
        target_modules=["q_proj", "v_proj", "down_proj"],
    )
    files = open_base(str(tiny_model_dir), None, False)
    aligned = align(read_adapter(adapter), files.shapes)
    fold = Fold(aligned, files, fit(aligned, files), None, DTYPES[dtype], "cpu")
    merged = {planned.name: fold.value(planned.name) for planned in fold.plan()}
    base = load_file(tiny_model_dir / "model.safetensors")
    assert merged.keys() == base.keys()
    assert len(fold.changed) == len(ranks)
    for key, before in base.items():
        expected = wide(before)
        module = key.removesuffix(".weight")
        if module in ranks:
            factor = special_alpha if module.endswith(V) else alpha
            factor = factor / (math.sqrt(ranks[module]) if use_rslora else ranks[module])
            expected = expected + factor * (
                wide(tensors[f"{module}.lora_B.weight"]) @ wide(tensors[f"{module}.lora_A.weight"])
            )
        # beside the rounding: sums of at most 9 products in fp32
        allowed = ROUNDING[dtype] * np.abs(expected) + 16 * ROUNDING["fp32"] * np.abs(expected).max()
        assert (np.abs(wide(merged[key]) - expected) <= allowed).all(), key
    shutil.rmtree(folder)


def _llama(tiny_llama: Callable[..., Any], **changes: Any) -> Any:
    return tiny_llama(**changes)


def _gpt2(tiny_llama: Callable[..., Any]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=320, n_positions=128, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2
        )
        return GPT2LMHeadModel(config).eval()


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {"target_modules": "all-linear"}),
    "rslora": ({}, {"target_modules": ["q_proj", "up_proj"], "use_rslora": True}),
    "patterns": (
        {},
        {"target_modules": ["q_proj"], "rank_pattern": {"layers.1.*": 2}, "alpha_pattern": {"q_proj": 5}},
    ),
    "dora": ({}, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "bias-all": ({"attention_bias": True}, {"target_modules": ["q_proj"], "bias": "all"}),
    "bias-lora-only": ({"attention_bias": True}, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "lora-bias": ({"attention_bias": True}, {"target_modules": ["q_proj"], "lora_bias": True}),
    "saved-modules": (
        {},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    ),
    "embedding": ({}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "embedding-dora": ({}, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "head": ({}, {"target_modules": ["lm_head"]}),
    "rows": ({}, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 300]}),
    "rows-of-both": (
        {},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 300], "lm_head": [7]}},
    ),
    "some-layers": ({}, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "conv1d": ({"make": _gpt2}, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d-dora": (
        {"make": _gpt2},
        {"target_modules": ["c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_of_pefts_own_merge(
    tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    changes, settings_of_kind = KINDS[kind]
    make = changes.get("make", _llama)
    base = make(tiny_llama, **{key: value for key, value in changes.items() if key != "make"})
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings_of_kind})
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    trained.save_pretrained(tmp_path / "adapter")

    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    reference = PeftModel.from_pretrained(reference, tmp_path / "adapter").merge_and_unload()
    report = merge(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    expected = reference.state_dict()
    if kind.startswith("conv1d"):  # tied: peft's state dict lists the embedding under both names
        assert merged.keys() == expected.keys()
    before = base.state_dict()
    assert report.changed_tensors == sum(not torch.equal(expected[key], before[key]) for key in before)
    for key, value in expected.items():
        torch.testing.assert_close(merged[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize(("stored", "compute"), [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "fp32")])
def test_the_base_of_a_4_bit_merge_is_bit_for_bit_what_the_loaded_layers_multiply_with(
    tiny_llama: Callable[..., Any],
    tiny_tokenizer: Any,
    tmp_path: Path,
    scheme: str,
    double_quant: bool,
    stored: str,
    compute: str,
) -> None:
    from qlora_cli.model.load import QuantizationSpec, load_base, quantized_module_names

    base = tmp_path / "base"
    tiny_llama().to(DTYPES[stored]).save_pretrained(base)
    tiny_tokenizer.save_pretrained(base)
    spec = QuantizationSpec(scheme, double_quant, compute, ("down_proj",))
    loaded = load_base(str(base), None, spec, "eager", "cpu", False)
    names = quantized_module_names(loaded)
    assert not any("down_proj" in name for name in names)
    module = f"model.layers.0.{Q}"
    pairs = random_pairs(base, {module: 4})
    adapter = write_adapter(tmp_path / "adapter", base, pairs, r=4, lora_alpha=8, target_modules=[module])
    quantization = {
        "scheme": scheme,
        "double_quant": double_quant,
        "compute_dtype": compute,
        "skip_modules": ["down_proj"],
        "quantized_modules": names,
    }
    (adapter / "qlora.json").write_text(json.dumps({"quantization": quantization}), "utf-8")
    report = merge(adapter, tmp_path / "merged", dtype="fp32")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    original = load_file(base / "model.safetensors")
    assert (report.base, report.changed_tensors) == (scheme, 1)
    for name, layer in loaded.named_modules():
        key = f"{name}.weight"
        if name in names:
            layer.compute_dtype = torch.float32
            with torch.no_grad():
                weight = layer(
                    torch.eye(layer.in_features)
                ).T  # what it multiplies with: 1 * w plus exact zeros
            assert not torch.equal(weight, original[key].float())
            if name == module:
                weight = weight + 2.0 * (pairs[f"{module}.lora_B.weight"] @ pairs[f"{module}.lora_A.weight"])
            assert torch.equal(merged[key], weight), name
        elif key in merged:
            assert torch.equal(merged[key], layer.weight.float()), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("spread", [0.3, 0.02], ids=["strong", "faint"])
@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 0.0])
def test_a_wrong_scaling_is_caught_and_leaves_no_folder(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    spread: float,
    factor: float,
) -> None:
    ranks = {f"model.layers.{i}.{name}": 4 for i in (0, 1) for name in (Q, V, DOWN)}
    adapter = write_adapter(
        tmp_path / "adapter",
        tiny_model_dir,
        random_pairs(tiny_model_dir, ranks, spread),
        r=4,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
    )
    assert merge(adapter, tmp_path / "right", dtype=dtype).comparison.holds
    monkeypatch.setattr(adapter_module, "_scaling", lambda config, module, rank: factor)
    with pytest.raises(RunError) as error:
        merge(adapter, tmp_path / "wrong", dtype=dtype)
    assert error.value.faults[0].code == ("nothing-changed" if factor == 0 else "merge-not-proved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "right", "tiny_model"]


def test_one_lost_module_is_caught(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {f"model.layers.{i}.{name}": 4 for i in (0, 1) for name in (Q, V)}
    adapter = write_adapter(
        tmp_path / "adapter",
        tiny_model_dir,
        random_pairs(tiny_model_dir, ranks, 0.05),
        r=4,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj"],
    )
    right = adapter_module._scaling
    lost = f"model.layers.1.{V}"
    monkeypatch.setattr(
        adapter_module, "_scaling", lambda c, module, rank: 0.0 if module == lost else right(c, module, rank)
    )
    with pytest.raises(RunError, match="is not base"):
        merge(adapter, tmp_path / "wrong")
