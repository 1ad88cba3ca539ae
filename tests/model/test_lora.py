from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from qlora_cli.errors import InputError
from qlora_cli.model.load import QuantizationSpec, load_base, load_tokenizer
from qlora_cli.model.lora import (
    LoraSpec,
    TargetError,
    attach,
    enable_checkpointing,
    linear_names,
    load_trainable,
    match_targets,
    save_adapter,
)
from qlora_cli.model.quiet import quiet

PARTS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
IDS = torch.arange(4, 44).reshape(2, 20)
SPEC = LoraSpec(rank=4, alpha=8)


def base(folder: Path, scheme: str = "nf4", dtype: str = "fp32") -> Any:
    return load_base(str(folder), None, QuantizationSpec(scheme, True, dtype), "sdpa", "cpu", False)


def adapter_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def trained(folder: Path, spec: LoraSpec = SPEC, seed: int = 0) -> Any:
    """A model whose adapter changes something: B is not zero."""
    model = attach(base(folder), spec, seed)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in adapter_of_parameters(model):
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def adapter_of_parameters(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def save(model: Any, folder: Path, tokenizer_dir: Path, **record: Any) -> Path:
    folder.mkdir(parents=True)
    save_adapter(model, folder, load_tokenizer(str(tokenizer_dir), None, None, False), record)
    return folder


class TestNames:
    def test_names_come_from_the_config_alone_and_are_those_of_the_base(self, tiny_model_dir: Path) -> None:
        from_base = linear_names(base(tiny_model_dir))
        (tiny_model_dir / "model.safetensors").unlink()
        config = AutoConfig.from_pretrained(tiny_model_dir)
        text = config.to_json_string(use_diff=False)
        before = torch.get_rng_state()
        assert linear_names(config) == from_base
        assert torch.equal(torch.get_rng_state(), before)
        assert config.to_json_string(use_diff=False) == text
        assert "lm_head" not in from_base

    def test_all_linear_leaves_out_the_head_also_where_it_is_tied(self, tiny_llama: Any) -> None:
        names = linear_names(tiny_llama(tie_word_embeddings=True))
        assert match_targets(names, "all-linear") == names
        assert sorted({name.rpartition(".")[2] for name in names}) == PARTS

    @pytest.mark.parametrize(
        ("targets", "number"),
        [
            (("q_proj",), 2),
            (("self_attn.q_proj", "v_proj"), 4),
            (("model.layers.1.mlp.up_proj",), 1),
            (r".*layers\.0\..*_proj", 7),
            (r"model\.layers\.\d\.self_attn\.[qv]_proj", 4),
        ],
    )
    def test_a_name_matches_in_full_or_by_its_end_and_an_expression_in_full(
        self, tiny_llama: Any, targets: Any, number: int
    ) -> None:
        names = linear_names(tiny_llama())
        assert len(match_targets(names, targets)) == number

    @pytest.mark.parametrize(
        ("targets", "unmatched"),
        [
            (("q_proj", "query_proj", "_proj"), ["query_proj", "_proj"]),  # whole parts only
            (r"layers\.0", [r"layers\.0"]),
            (r"*(", [r"*("]),
        ],
    )
    def test_what_matches_nothing_is_listed_with_what_there_is(
        self, tiny_llama: Any, targets: Any, unmatched: list[str]
    ) -> None:
        with pytest.raises(TargetError) as caught:
            match_targets(linear_names(tiny_llama()), targets)
        assert caught.value.unmatched == unmatched
        assert caught.value.available == PARTS

    @pytest.mark.parametrize(
        "targets",
        [
            "all-linear",
            ("q_proj", "mlp.up_proj"),
            r".*\.1\..*\.[kv]_proj",
            ("model.layers.0.mlp.down_proj",),
        ],
    )
    def test_peft_attaches_to_exactly_the_layers_that_match(self, tiny_model_dir: Path, targets: Any) -> None:
        plain = base(tiny_model_dir)
        expected = match_targets(linear_names(plain), targets)
        model = attach(plain, LoraSpec(rank=2, alpha=4, target_modules=targets), seed=0)
        found = [name for name, module in model.get_base_model().named_modules() if hasattr(module, "lora_A")]
        assert found == expected


class TestAttach:
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_only_the_adapter_is_trained_and_it_is_fp32(self, tiny_model_dir: Path, dtype: str) -> None:
        plain = base(tiny_model_dir, dtype=dtype)
        dtypes = {name: p.dtype for name, p in plain.named_parameters()}
        model = attach(plain, SPEC, seed=0)
        assert {p.dtype for p in adapter_of_parameters(model)} == {torch.float32}
        assert all("lora_" in name for name in adapter_of(model))
        named = list(plain.named_parameters())
        now = {name.replace(".base_layer", ""): p.dtype for name, p in named if "lora_" not in name}
        assert now == dtypes
        assert all(module.training for module in model.modules())

    @pytest.mark.parametrize("init", ["default", "gaussian"])
    def test_the_seed_alone_decides_the_adapter(self, tiny_model_dir: Path, init: str) -> None:
        spec = LoraSpec(rank=4, alpha=8, init=init)
        torch.manual_seed(1)
        first = adapter_of(attach(base(tiny_model_dir), spec, seed=5))
        torch.manual_seed(2)
        before = torch.get_rng_state()
        again = adapter_of(attach(base(tiny_model_dir), spec, seed=5))
        assert torch.equal(torch.get_rng_state(), before)
        other = adapter_of(attach(base(tiny_model_dir), spec, seed=6))
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert all(torch.equal(first[name], other[name]) == ("lora_B" in name) for name in first)
        assert all(not tensor.any() for name, tensor in first.items() if "lora_B" in name)

    @pytest.mark.parametrize(("variant", "scaling"), [("lora", 8 / 4), ("rslora", 8 / 4**0.5)])
    def test_the_scaling_is_that_of_the_variant(
        self, tiny_model_dir: Path, variant: str, scaling: float
    ) -> None:
        model = attach(base(tiny_model_dir), LoraSpec(rank=4, alpha=8, variant=variant), seed=0)
        layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        assert {layer.scaling["default"] for layer in layers} == {scaling}

    def test_dropout_acts_in_training_only(self, tiny_model_dir: Path) -> None:
        model = trained(tiny_model_dir, LoraSpec(rank=4, alpha=8, dropout=0.5))
        assert not torch.equal(model(IDS).logits, model(IDS).logits)
        model.eval()
        assert torch.equal(model(IDS).logits, model(IDS).logits)

    def test_attaching_says_nothing(self, tiny_model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
        enable_checkpointing(attach(base(tiny_model_dir), SPEC, seed=0))
        assert capfd.readouterr() == ("", "")


class TestCheckpointing:
    def test_gradients_are_those_without_it(self, tiny_model_dir: Path) -> None:
        def gradients(with_checkpointing: bool) -> dict[str, torch.Tensor]:
            model = trained(tiny_model_dir)
            if with_checkpointing:
                enable_checkpointing(model)
            model(IDS, use_cache=False).logits.square().mean().backward()
            return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

        plain, recomputed = gradients(False), gradients(True)
        assert plain.keys() == recomputed.keys()
        assert len(plain) == 2 * 2 * len(PARTS)
        assert all(torch.equal(plain[name], recomputed[name]) for name in plain)

    def test_each_layer_is_computed_twice(self, tiny_model_dir: Path) -> None:
        model = trained(tiny_model_dir)
        enable_checkpointing(model)
        calls: list[int] = []
        model.get_base_model().model.layers[0].input_layernorm.register_forward_hook(
            lambda _module, _inputs, _output: calls.append(1)
        )
        model(IDS, use_cache=False).logits.square().mean().backward()
        assert len(calls) == 2


class TestFolder:
    def test_plain_peft_loads_it_and_computes_the_same(self, tiny_model_dir: Path, tmp_path: Path) -> None:
        model = trained(tiny_model_dir).eval()
        folder = save(model, tmp_path / "adapter", tiny_model_dir)
        with quiet():  # peft calls a method of transformers by its old name
            loaded = PeftModel.from_pretrained(base(tiny_model_dir), str(folder)).eval()
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        with model.disable_adapter():
            assert not torch.equal(loaded(IDS).logits, model(IDS).logits)

    def test_it_names_its_base_and_carries_tokenizer_template_and_record(
        self, tiny_model_dir: Path, tmp_path: Path
    ) -> None:
        model = trained(tiny_model_dir)
        tokenizer = load_tokenizer(str(tiny_model_dir), None, "{{ 'my own' }}", False)
        folder = tmp_path / "adapter"
        folder.mkdir()
        record = {"base": {"name_or_path": "x", "revision": "main"}, "step": 3}
        save_adapter(model, folder, tokenizer, record)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(tiny_model_dir)
        assert (config["revision"], config["inference_mode"]) == ("main", True)
        assert config["target_modules"] == PARTS
        assert load_tokenizer(str(folder), None, None, False).chat_template == "{{ 'my own' }}"
        assert json.loads((folder / "qlora.json").read_text()) == record
        tensors = load_file(folder / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        assert len(tensors) == 2 * 2 * len(PARTS)

    def test_the_same_adapter_gives_the_same_bytes(self, tiny_model_dir: Path, tmp_path: Path) -> None:
        """The set of peft's target modules has an order that differs from process to process."""
        model = trained(tiny_model_dir)
        first = save(model, tmp_path / "first", tiny_model_dir)
        targets = model.peft_config["default"].target_modules
        assert isinstance(targets, set)
        model.peft_config["default"].target_modules = sorted(targets, reverse=True)
        second = save(model, tmp_path / "second", tiny_model_dir)
        assert sorted(path.name for path in first.iterdir()) == sorted(path.name for path in second.iterdir())
        assert all(path.read_bytes() == (second / path.name).read_bytes() for path in first.iterdir())

    def test_training_goes_on_from_it_with_the_same_adapter(
        self, tiny_model_dir: Path, tmp_path: Path
    ) -> None:
        model = trained(tiny_model_dir)
        folder = save(model, tmp_path / "adapter", tiny_model_dir)
        before = torch.get_rng_state()
        again = load_trainable(base(tiny_model_dir), folder)
        assert torch.equal(torch.get_rng_state(), before)
        mine, theirs = adapter_of(model), adapter_of(again)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert all(module.training for module in again.modules())
        again(IDS).logits.square().mean().backward()
        assert all(p.grad is not None for p in adapter_of_parameters(again))
        second = save(again, tmp_path / "second", tiny_model_dir)
        assert all(path.read_bytes() == (folder / path.name).read_bytes() for path in second.iterdir())

    def test_an_adapter_of_plain_peft_is_taken_up(self, tiny_model_dir: Path, tmp_path: Path) -> None:
        spec = LoraSpec(rank=4, alpha=8, variant="rslora", target_modules=("q_proj",))
        model = trained(tiny_model_dir, spec)
        model.save_pretrained(str(tmp_path / "peft"), save_embedding_layers=False)
        again = load_trainable(base(tiny_model_dir), tmp_path / "peft")
        assert torch.equal(again.eval()(IDS).logits, model.eval()(IDS).logits)

    def test_an_adapter_of_a_wider_base_is_an_error_that_shows_both_shapes(
        self, tiny_llama: Any, tiny_model_dir: Path, tmp_path: Path
    ) -> None:
        folder = save(trained(tiny_model_dir), tmp_path / "adapter", tiny_model_dir)
        tiny_llama(intermediate_size=192).save_pretrained(tmp_path / "wide")
        with pytest.raises(InputError) as caught:
            load_trainable(base(tmp_path / "wide"), folder)
        faults = caught.value.faults
        assert {fault.code for fault in faults} == {"shape-mismatch"}
        assert len(faults) == 2 * 3  # in two layers: B of gate and up, A of down
        assert any("[4, 128]" in fault.message and "[4, 192]" in fault.message for fault in faults)

    def test_an_adapter_of_a_deeper_base_is_an_error(
        self, tiny_llama: Any, tiny_model_dir: Path, tmp_path: Path
    ) -> None:
        folder = save(trained(tiny_model_dir), tmp_path / "adapter", tiny_model_dir)
        for number in (1, 3):
            tiny_llama(num_hidden_layers=number).save_pretrained(tmp_path / str(number))
            with pytest.raises(InputError) as caught:
                load_trainable(base(tmp_path / str(number)), folder)
            assert caught.value.faults[0].code in {"unmatched-tensors", "missing-tensors"}

    def test_another_rank_in_the_config_than_in_the_file_is_an_error(
        self, tiny_model_dir: Path, tmp_path: Path
    ) -> None:
        folder = save(trained(tiny_model_dir), tmp_path / "adapter", tiny_model_dir)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 8}))
        with pytest.raises(InputError, match="rank 8"):
            load_trainable(base(tiny_model_dir), folder)

    def test_a_file_that_lacks_a_tensor_is_an_error(self, tiny_model_dir: Path, tmp_path: Path) -> None:
        folder = save(trained(tiny_model_dir), tmp_path / "adapter", tiny_model_dir)
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        tensors.pop(next(name for name in tensors if "layers.1.mlp.up_proj.lora_B" in name))
        save_file(tensors, path)
        with pytest.raises(InputError, match="up_proj"):
            load_trainable(base(tiny_model_dir), folder)
