from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qlora_cli.errors import Fault, InputError
from qlora_cli.model.load import (
    QuantizationSpec,
    load_base,
    load_tokenizer,
    quantized_module_names,
    read_model_config,
)
from qlora_cli.model.names import linear_names
from qlora_cli.model.nf4 import BLOCK_SIZE, linear4bit_layers

NF4 = QuantizationSpec("nf4", True, "fp32")
PLAIN = QuantizationSpec("none", False, "fp32")
PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def load(folder: Path | str, spec: QuantizationSpec = NF4) -> Any:
    return load_base(str(folder), None, spec, "sdpa", "cpu", False)


def faults(call: Callable[..., Any], *args: Any) -> list[Fault]:
    with pytest.raises(InputError) as caught:
        call(*args)
    return list(caught.value.faults)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(folder: Path) -> None:
    """Store the weights in two files with an index."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    assert (folder / "model.safetensors.index.json").is_file()


class TestWeights:
    def test_every_linear_layer_but_the_head_is_held_in_4_bits(self, tiny_model_dir: Path) -> None:
        model = load(tiny_model_dir)
        names = quantized_module_names(model)
        assert names == linear_names(model)
        assert {name.rpartition(".")[2] for name in names} == PARTS
        assert len(names) == 2 * len(PARTS)

    @pytest.mark.parametrize(("scheme", "double_quant"), [("nf4", True), ("nf4", False), ("fp4", True)])
    def test_a_layer_holds_what_bitsandbytes_makes_of_the_stored_weight(
        self, tiny_model_dir: Path, scheme: str, double_quant: bool
    ) -> None:
        stored = load_file(tiny_model_dir / "model.safetensors")
        model = load(tiny_model_dir, QuantizationSpec(scheme, double_quant, "fp32"))
        for name, layer in linear4bit_layers(model):
            codes, state = functional.quantize_4bit(
                stored[f"{name}.weight"],
                blocksize=BLOCK_SIZE,
                compress_statistics=double_quant,
                quant_type=scheme,
            )
            assert torch.equal(layer.weight.data, codes), name
            found = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            assert torch.equal(found, functional.dequantize_4bit(codes, state)), name
            assert (layer.weight.quant_state.state2 is not None) == double_quant

    def test_without_a_scheme_the_logits_are_those_of_plain_transformers(self, tiny_model_dir: Path) -> None:
        ids = torch.arange(4, 40).reshape(2, 18)
        plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa")
        assert torch.equal(load(tiny_model_dir, PLAIN)(ids).logits, plain(ids).logits)

    @pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("compute_dtype", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
    def test_what_is_not_quantised_has_the_compute_dtype_whatever_is_stored(
        self, tiny_model_dir: Path, stored: torch.dtype, compute_dtype: str, dtype: torch.dtype
    ) -> None:
        AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=stored).save_pretrained(tiny_model_dir)
        model = load(tiny_model_dir, QuantizationSpec("nf4", True, compute_dtype))
        layers = [layer for _, layer in linear4bit_layers(model)]
        quantised = {id(layer.weight) for layer in layers}
        rest = {name: p.dtype for name, p in model.named_parameters() if id(p) not in quantised}
        assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= rest.keys()
        assert set(rest.values()) == {dtype}
        assert {layer.compute_dtype for layer in layers} == {dtype}

    def test_a_tied_head_stays_tied_and_is_not_quantised(self, tiny_llama: Any, tmp_path: Path) -> None:
        tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
        model = load(tmp_path)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert "lm_head" not in quantized_module_names(model)

    @pytest.mark.parametrize(
        ("skip", "left"),
        [
            ("down_proj", {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}),
            ("layers.1.self_attn.q_proj", {"model.layers.1.self_attn.q_proj"}),
            ("layers.0.self_attn", {f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"}),
        ],
    )
    def test_skipped_modules_and_the_head_keep_their_weights(
        self, tiny_model_dir: Path, skip: str, left: set[str]
    ) -> None:
        model = load(tiny_model_dir, QuantizationSpec("nf4", True, "fp32", (skip,)))
        assert set(linear_names(model)) - set(quantized_module_names(model)) == left
        assert type(model.lm_head) is torch.nn.Linear

    def test_a_skipped_module_that_is_not_there_is_an_error_that_lists_what_is(
        self, tiny_model_dir: Path
    ) -> None:
        spec = QuantizationSpec("nf4", True, "fp32", ("down_proj", "dwon_proj"))
        (fault,) = faults(load, tiny_model_dir, spec)
        assert fault.code == "skip-not-found"
        assert "`dwon_proj`" in fault.message
        assert "`down_proj`" not in fault.message
        assert set((fault.accepted or "").split(", ")) == PARTS

    def test_a_base_is_frozen_and_in_eval_mode(self, tiny_model_dir: Path) -> None:
        model = load(tiny_model_dir)
        assert not any(p.requires_grad for p in model.parameters())
        assert not any(module.training for module in model.modules())

    def test_loading_draws_no_random_number_and_prints_nothing(
        self, tiny_model_dir: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        before = torch.get_rng_state()
        load(tiny_model_dir)
        assert torch.equal(torch.get_rng_state(), before)
        assert capfd.readouterr() == ("", "")

    def test_shards_load_like_one_file(self, tiny_model_dir: Path) -> None:
        whole = load(tiny_model_dir).state_dict()
        shard(tiny_model_dir)
        parts = load(tiny_model_dir).state_dict()
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)

    def test_a_base_stored_in_4_bits_loads_as_it_is(self, tiny_model_dir: Path, tmp_path: Path) -> None:
        model = load(tiny_model_dir)
        model.save_pretrained(tmp_path / "stored")
        again = load(tmp_path / "stored", QuantizationSpec("nf4", True, "bf16"))
        pairs = zip(linear4bit_layers(model), linear4bit_layers(again), strict=True)
        assert all(torch.equal(a.weight.data, b.weight.data) for (_, a), (_, b) in pairs)
        assert {layer.compute_dtype for _, layer in linear4bit_layers(again)} == {torch.bfloat16}
        assert not any(layer.support_avx512bf16_for_cpu for _, layer in linear4bit_layers(again))

    def test_a_base_stored_in_4_bits_is_refused_where_the_recipe_asks_for_another_kind(
        self, tiny_model_dir: Path, tmp_path: Path
    ) -> None:
        load(tiny_model_dir).save_pretrained(tmp_path / "stored")
        (fault,) = faults(load, tmp_path / "stored", QuantizationSpec("fp4", True, "fp32"))
        assert (fault.code, fault.key) == ("base-is-quantised", "model.quantization")
        assert "scheme: nf4, double_quant: true" in (fault.hint or "")


class TestWrongBases:
    """Each fault is found with its own words, and by `read_model_config` where no weight is needed for it."""

    def test_a_folder_that_does_not_exist(self, tmp_path: Path) -> None:
        (fault,) = faults(read_model_config, str(tmp_path / "nowhere"), None, False)
        assert (fault.code, fault.key) == ("base-not-found", "model.name_or_path")
        assert "does not exist" in fault.message

    def test_a_folder_without_a_config(self, tmp_path: Path) -> None:
        (fault,) = faults(read_model_config, str(tmp_path), None, False)
        assert fault.code == "base-not-found"
        assert "config.json" in fault.message

    def test_an_adapter_folder_names_its_own_base(self, tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/the-base"}')
        (fault,) = faults(read_model_config, str(tmp_path), None, False)
        assert fault.code == "base-is-adapter"
        assert "`org/the-base`" in (fault.hint or "")
        assert "continue_from" in (fault.hint or "")

    @pytest.mark.parametrize("name", ["", "model.Q4_K_M.gguf"])
    def test_a_gguf_file_or_a_folder_of_one(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
        (fault,) = faults(read_model_config, str(tmp_path / name), None, False)
        assert fault.code == "base-is-gguf"

    def test_a_config_that_is_no_json_is_named_with_its_file(self, tiny_model_dir: Path) -> None:
        (tiny_model_dir / "config.json").write_text('{"model_type": "llama",')
        (fault,) = faults(read_model_config, str(tiny_model_dir), None, False)
        assert fault.code == "unreadable-json"
        assert fault.file == str(tiny_model_dir / "config.json")

    def test_a_config_value_that_is_no_number(self, tiny_model_dir: Path) -> None:
        edit_json(tiny_model_dir / "config.json", hidden_size="wide")
        (fault,) = faults(read_model_config, str(tiny_model_dir), None, False)
        assert fault.code == "invalid-config"

    def test_an_architecture_that_nobody_knows(self, tiny_model_dir: Path) -> None:
        edit_json(tiny_model_dir / "config.json", model_type="lamma9")
        (fault,) = faults(read_model_config, str(tiny_model_dir), None, False)
        assert fault.code == "unknown-architecture"
        assert "`lamma9`" in fault.message

    def test_an_architecture_that_does_not_continue_text(self, tiny_model_dir: Path) -> None:
        edit_json(tiny_model_dir / "config.json", model_type="vit")
        (fault,) = faults(read_model_config, str(tiny_model_dir), None, False)
        assert fault.code == "not-a-causal-lm"

    def test_code_that_comes_with_a_model_is_not_run(self, tiny_model_dir: Path) -> None:
        trap = tiny_model_dir / "configuration_own.py"
        trap.write_text("raise SystemExit('ran')")
        auto_map = {"AutoConfig": "configuration_own.OwnConfig"}
        edit_json(tiny_model_dir / "config.json", model_type="own", auto_map=auto_map)
        (fault,) = faults(read_model_config, str(tiny_model_dir), None, False)
        assert (fault.code, fault.key) == ("needs-remote-code", "model.trust_remote_code")

    @pytest.mark.parametrize("name", ["no-such-org/no-such-model", "no-such-model"])
    def test_a_hub_id_without_a_network_says_why_the_hub_was_not_asked(self, name: str) -> None:
        (fault,) = faults(read_model_config, name, None, False)
        assert fault.code == "hub-unreachable"
        assert "HF_HUB_OFFLINE" in fault.message

    def test_a_name_that_can_be_no_hub_id(self) -> None:
        (fault,) = faults(read_model_config, "runs/a/b/adapter", None, False)
        assert fault.code == "base-not-found"

    def test_a_folder_without_weights(self, tiny_model_dir: Path) -> None:
        (tiny_model_dir / "model.safetensors").unlink()
        (fault,) = faults(load, tiny_model_dir)
        assert fault.code == "no-safetensors"

    def test_pickled_weights_are_not_read(self, tiny_model_dir: Path) -> None:
        (tiny_model_dir / "model.safetensors").rename(tiny_model_dir / "pytorch_model.bin")
        (fault,) = faults(load, tiny_model_dir)
        assert fault.code == "no-safetensors"
        assert "`pytorch_model.bin`" in fault.message

    def test_a_weight_file_that_is_cut_short(self, tiny_model_dir: Path) -> None:
        path = tiny_model_dir / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        (fault,) = faults(load, tiny_model_dir)
        assert (fault.code, fault.file) == ("unreadable-tensors", str(path))

    def test_every_shard_that_is_missing_or_damaged_is_named_at_once(self, tiny_model_dir: Path) -> None:
        shard(tiny_model_dir)
        first, second, *_ = sorted(tiny_model_dir.glob("model-*.safetensors"))
        first.unlink()
        second.write_bytes(b"oops")
        found = faults(load, tiny_model_dir)
        assert [(f.code, f.file) for f in found] == [
            ("base-incomplete", str(first)),
            ("unreadable-tensors", str(second)),
        ]

    def test_a_shard_without_a_tensor_that_the_index_places_there(self, tiny_model_dir: Path) -> None:
        shard(tiny_model_dir)
        path = min(tiny_model_dir.glob("model-*.safetensors"))
        tensors = load_file(path)
        gone = sorted(tensors)[0]
        save_file({name: t for name, t in tensors.items() if name != gone}, path, metadata={"format": "pt"})
        (fault,) = faults(load, tiny_model_dir)
        assert fault.code == "base-incomplete"
        assert f"`{gone}`" in fault.message

    def test_a_missing_tensor_is_an_error_and_not_a_random_number(self, tiny_model_dir: Path) -> None:
        path = tiny_model_dir / "model.safetensors"
        tensors = load_file(path)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, path, metadata={"format": "pt"})
        (fault,) = faults(load, tiny_model_dir)
        assert fault.code == "base-incomplete"
        assert "`model.layers.1.mlp.up_proj.weight`" in fault.message

    @pytest.mark.parametrize("spec", [NF4, PLAIN])
    @pytest.mark.parametrize("size", ["intermediate_size", "vocab_size"])
    def test_weights_of_another_shape_than_the_config_says(
        self, tiny_model_dir: Path, spec: QuantizationSpec, size: str
    ) -> None:
        edit_json(tiny_model_dir / "config.json", **{size: 192})
        (fault,) = faults(load, tiny_model_dir, spec)
        assert fault.code in {"base-incomplete", "base-unreadable"}

    @pytest.mark.parametrize(
        ("settings", "word"),
        [
            ({"quant_method": "gptq", "bits": 4}, "`gptq`"),
            ({"quant_method": "fp8"}, "`fp8`"),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8-bit"),
        ],
    )
    def test_a_base_stored_quantised_in_another_way_is_refused_by_name(
        self, tiny_model_dir: Path, settings: dict[str, Any], word: str
    ) -> None:
        edit_json(tiny_model_dir / "config.json", quantization_config=settings)
        (fault,) = faults(load, tiny_model_dir)
        assert fault.code == "base-is-quantised"
        assert word in fault.message


class TestTokenizer:
    def test_a_template_that_is_given_replaces_the_stored_one(self, tiny_model_dir: Path) -> None:
        assert "im_start" in load_tokenizer(str(tiny_model_dir), None, None, False).chat_template
        assert load_tokenizer(str(tiny_model_dir), None, "{{ 'x' }}", False).chat_template == "{{ 'x' }}"

    def test_a_missing_pad_token_becomes_the_eos_token(self, tiny_model_dir: Path) -> None:
        path = tiny_model_dir / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        del settings["pad_token"]
        path.write_text(json.dumps(settings))
        tokenizer = load_tokenizer(str(tiny_model_dir), None, None, False)
        assert tokenizer.pad_token_id == tokenizer.eos_token_id == 3

    def test_a_folder_without_a_tokenizer_and_a_damaged_one_are_named(self, tiny_model_dir: Path) -> None:
        (tiny_model_dir / "tokenizer.json").write_text("{")
        (fault,) = faults(load_tokenizer, str(tiny_model_dir), None, None, False)
        assert fault.code == "unreadable-tokenizer"
        for path in tiny_model_dir.glob("tokenizer*"):
            path.unlink()
        (fault,) = faults(load_tokenizer, str(tiny_model_dir), None, None, False)
        assert fault.code == "unreadable-tokenizer"

    def test_a_tokenizer_survives_the_trip_through_its_folder(
        self, tiny_model_dir: Path, tmp_path: Path
    ) -> None:
        tokenizer = load_tokenizer(str(tiny_model_dir), None, None, False)
        tokenizer.save_pretrained(tmp_path)
        text = "<|im_start|>user\n the  river\t1<|im_end|>\n"
        again = load_tokenizer(str(tmp_path), None, None, False)
        assert again(text).input_ids == tokenizer(text).input_ids
