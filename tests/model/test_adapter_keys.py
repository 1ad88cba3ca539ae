from __future__ import annotations

from typing import Any

import pytest

from qlora_cli.model.adapter_keys import is_expected, is_target, locate, parse_keys, pattern_value

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "key",
    [
        f"base_model.model.{Q}.lora_A.weight",
        f"base_model.model.{Q}.lora_A.default.weight",
        f"{Q}.lora_A.weight",
        f"{Q}.lora_A.sft.weight",
        f"_orig_mod.base_model.model.{Q}.lora_A.weight",
        f"base_model.model._orig_mod.{Q}.lora_A.weight",
        f"module.base_model.model.{Q}.lora_A.default.weight",
        "base_model.model.model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.lora_A.weight",
        f"_fsdp_wrapped_module.base_model.model._fsdp_wrapped_module.{Q}.lora_A.default.weight",
    ],
)
def test_prefixes_wrappers_and_adapter_names_do_not_change_what_a_key_means(key: str) -> None:
    (parsed,) = parse_keys([key])
    assert (parsed.module, parsed.role, parsed.tensor) == (Q, "lora_A", f"{Q}.weight")
    assert parsed.canonical == f"base_model.model.{Q}.lora_A.weight"


@pytest.mark.parametrize(
    ("end", "role", "parameter"),
    [
        ("lora_B.weight", "lora_B", "weight"),
        ("lora_B.bias", "lora_B_bias", "bias"),
        ("lora_B.default.bias", "lora_B_bias", "bias"),
        ("lora_embedding_A", "embedding_A", "weight"),
        ("lora_embedding_B.default", "embedding_B", "weight"),
        ("lora_magnitude_vector", "magnitude", "weight"),
        ("lora_magnitude_vector.weight", "magnitude", "weight"),
        ("lora_magnitude_vector.default", "magnitude", "weight"),
        ("lora_magnitude_vector.default.weight", "magnitude", "weight"),
        ("token_adapter.trainable_tokens_delta", "rows", "weight"),
        ("token_adapter.base_layer.weight", "stored", "weight"),
        ("base_layer.weight", "stored", "weight"),
        ("base_layer.bias", "trained", "bias"),
        ("original_module.weight", "stored", "weight"),
        ("modules_to_save.weight", "trained", "weight"),
        ("modules_to_save.default.weight", "trained", "weight"),
        ("weight", "trained", "weight"),
    ],
)
def test_every_suffix_that_peft_writes_has_its_role(end: str, role: str, parameter: str) -> None:
    (parsed,) = parse_keys([f"base_model.model.lm_head.{end}"])
    assert (parsed.module, parsed.role, parsed.parameter) == ("lm_head", role, parameter)


def test_the_adapter_name_in_the_pairs_is_also_dropped_from_saved_modules() -> None:
    keys = parse_keys([f"{Q}.lora_A.sft.weight", "lm_head.modules_to_save.sft.weight"])
    assert keys[1].tensor == "lm_head.weight"


@pytest.mark.parametrize(
    "key",
    [
        f"{Q}.lora_E",
        f"{Q}.lora_diag.weight",
        "model.layers.0.mlp.experts.base_layer.lora_A.weight",
        "model.norm.weight",
        f"{Q}.bias",
        "prompt_embeddings",
    ],
)
def test_a_tensor_that_the_config_does_not_account_for_is_not_expected(key: str) -> None:
    (parsed,) = parse_keys([key])
    assert not is_expected(parsed, {"bias": "none", "modules_to_save": ["lm_head"]})


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("lm_head.weight", {"modules_to_save": ["lm_head"]}),
        ("lm_head.weight", {}),  # stored unasked when the vocabulary was resized
        ("model.layers.0.mlp.gate_proj.weight", {"modules_to_save": ["mlp"]}),
        (f"{Q}.base_layer.bias", {"bias": "lora_only"}),
        ("model.norm.bias", {"bias": "all"}),
    ],
)
def test_a_trained_tensor_is_expected_where_the_config_asks_for_it(key: str, config: dict[str, Any]) -> None:
    (parsed,) = parse_keys([key])
    assert is_expected(parsed, config)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"q_proj": 2}, 2),
        ({"self_attn.q_proj": 2}, 2),
        ({r"layers\.0\..*": 2}, 2),
        ({f"^{Q}": 2}, 2),
        ({"^self_attn.q_proj": 2}, 8),
        ({"proj": 2}, 8),  # whole path segments only
        ({"v_proj": 2, "q_proj": 3, "self_attn.q_proj": 4}, 3),  # the first that matches
    ],
)
def test_a_pattern_applies_as_in_peft(patterns: dict[str, Any], expected: int) -> None:
    from peft.utils.other import get_pattern_key

    assert pattern_value(patterns, Q, 8) == expected
    assert patterns.get(get_pattern_key(patterns.keys(), Q), 8) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": [Q]},
        {"target_modules": ["proj"]},
        {"target_modules": r".*\.q_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "layers_to_transform": 0},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["blocks", "layers"]},
        {"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*0.*"},
        {"target_modules": ["q_proj"], "modules_to_save": ["self_attn"]},
    ],
)
@pytest.mark.parametrize("module", [Q, Q.replace("0", "1"), f"{Q}.q_proj", "lm_head"])
def test_a_module_is_a_target_as_in_peft(config: dict[str, Any], module: str) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

    theirs = check_target_module_exists(LoraConfig(**config), module)
    assert is_target(module, config) == (bool(theirs) and not isinstance(theirs, _ExcludedModule))


@pytest.mark.parametrize(
    ("module", "modules", "found"),
    [
        (Q, {Q, "lm_head"}, Q),
        ("layers.0.self_attn.q_proj", {Q}, Q),
        (f"model.{Q}", {Q}, Q),
        ("model.lm_head", {"lm_head"}, "lm_head"),
        ("q_proj", {Q}, None),  # more than `model.` is missing
        ("vision.model.layers.0.self_attn.q_proj", {Q}, None),  # another part of a model with two
        ("layers.0.q", {"model.layers.0.q", "language_model.layers.0.q"}, None),  # ambiguous
    ],
)
def test_a_module_is_found_under_the_name_of_the_base_or_not_at_all(
    module: str, modules: set[str], found: str | None
) -> None:
    assert locate(module, modules) == found
