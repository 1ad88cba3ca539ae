from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qlora_cli.errors import InputError
from qlora_cli.model.adapter import align, read_adapter

Q0, Q1 = (f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1))


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def fault_codes(error: Any) -> list[str]:
    return [fault.code for fault in error.value.faults]


@pytest.mark.parametrize(
    ("config", "rank", "scaling"),
    [
        ({"r": 4, "lora_alpha": 8}, 4, 2.0),
        ({"r": 16, "lora_alpha": 8, "use_rslora": True}, 16, 8 / math.sqrt(16)),
        ({"r": 4, "lora_alpha": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 12}}, 2, 6.0),
        ({"r": 4, "lora_alpha": 4, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 12}}, 4, 1.0),
        (
            {
                "r": 4,
                "lora_alpha": 4,
                "use_rslora": True,
                "rank_pattern": {"q_proj": 9},
                "alpha_pattern": {"q_proj": 6},
            },
            9,
            2.0,
        ),
    ],
)
def test_the_scaling_is_that_of_the_config(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], config: dict[str, Any], rank: int, scaling: float
) -> None:
    folder = make_adapter(tiny_model_dir, {Q0: rank, Q1: rank}, **config)
    adapter = align(read_adapter(folder), shapes_of(tiny_model_dir))
    assert {pair.scaling for pair in adapter.pairs.values()} == {scaling}


def test_a_pattern_that_names_the_whole_path_holds_for_a_key_without_prefix(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter(
        tiny_model_dir,
        {Q0: 4, Q1: 2},
        key_of=lambda key: key.removeprefix("model."),
        lora_alpha=4,
        rank_pattern={"model.layers.1.self_attn.q_proj": 2},
        alpha_pattern={"^model.layers.1.self_attn.q_proj": 6},
    )
    adapter = align(read_adapter(folder), shapes_of(tiny_model_dir))
    assert {module: pair.scaling for module, pair in adapter.pairs.items()} == {Q0: 1.0, Q1: 3.0}


@pytest.mark.parametrize(
    "key_of",
    [
        lambda key: key,
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: f"base_model.model._orig_mod.{key}",
        lambda key: f"base_model.model.model.{key}",
        lambda key: key.removeprefix("model."),
    ],
    ids=["bare", "adapter-name", "compiled", "model-twice", "model-missing"],
)
def test_keys_under_other_names_give_the_same_pairs(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], key_of: Callable[[str], str]
) -> None:
    shapes = shapes_of(tiny_model_dir)
    plain = align(read_adapter(make_adapter(tiny_model_dir)), shapes)
    other = align(read_adapter(make_adapter(tiny_model_dir, name="other", key_of=key_of)), shapes)
    assert other.pairs.keys() == plain.pairs.keys() == {Q0, Q1}
    for module, pair in plain.pairs.items():
        assert torch.equal(other.pairs[module].a, pair.a)
        assert torch.equal(other.pairs[module].b, pair.b)
    assert other.canonical().keys() == plain.canonical().keys()


def test_every_tensor_that_is_not_understood_is_listed(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    strange = {f"{Q0}.lora_E": torch.ones(4), "model.norm.weight": torch.ones(64)}
    with pytest.raises(InputError) as error:
        read_adapter(make_adapter(tiny_model_dir, tensors=strange))
    assert fault_codes(error) == ["unknown-tensors"]
    assert all(f"base_model.model.{key}" in str(error.value) for key in strange)


def test_every_tensor_without_a_module_in_the_base_is_listed(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter(tiny_model_dir, key_of=lambda key: key.replace("layers.1", "layers.7"))
    with pytest.raises(InputError) as error:
        align(read_adapter(folder), shapes_of(tiny_model_dir))
    assert fault_codes(error) == ["unmatched-tensors"]
    assert str(error.value).count("layers.7") == 2


def test_a_target_without_tensors_is_an_error_that_names_it(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter(tiny_model_dir, {Q0: 4}, target_modules=["q_proj"])
    with pytest.raises(InputError, match=Q1) as error:
        align(read_adapter(folder), shapes_of(tiny_model_dir))
    assert fault_codes(error) == ["missing-tensors"]


def test_a_saved_module_without_tensors_is_an_error_that_names_it(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter(tiny_model_dir, modules_to_save=["lm_head"])
    with pytest.raises(InputError, match="lm_head"):
        align(read_adapter(folder), shapes_of(tiny_model_dir))


def test_modules_to_save_may_name_what_this_base_does_not_have(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter(tiny_model_dir, modules_to_save=["classifier", "score"])
    assert align(read_adapter(folder), shapes_of(tiny_model_dir)).pairs


def test_a_rank_other_than_the_configs_is_an_error(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    with pytest.raises(InputError, match=r"\[8, 64\].*not rank 4") as error:
        align(read_adapter(make_adapter(tiny_model_dir, {Q0: 8, Q1: 4})), shapes_of(tiny_model_dir))
    assert len(error.value.faults) == 1


def test_half_a_pair_is_an_error_for_each_module(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter(tiny_model_dir)
    path = folder / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if "lora_A" in key}, path)
    with pytest.raises(InputError, match="lacks lora_B") as error:
        read_adapter(folder)
    assert len(error.value.faults) == 2


def test_values_that_are_not_finite_are_an_error(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter(tiny_model_dir, tensors={f"{Q0}.lora_A.weight": torch.full((4, 64), math.nan)})
    with pytest.raises(InputError) as error:
        read_adapter(folder)
    assert fault_codes(error) == ["not-finite"]


def test_an_empty_file_is_an_input_error_that_names_it(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter(tiny_model_dir)
    save_file({}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"adapter_model\.safetensors") as error:
        read_adapter(folder)
    assert fault_codes(error) == ["empty-adapter"]


def test_a_truncated_file_is_an_input_error(tiny_model_dir: Path, make_adapter: Callable[..., Path]) -> None:
    folder = make_adapter(tiny_model_dir)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError) as error:
        read_adapter(folder)
    assert fault_codes(error) == ["unreadable-tensors"]


def test_a_pickle_is_refused_with_a_hint(tiny_model_dir: Path, make_adapter: Callable[..., Path]) -> None:
    folder = make_adapter(tiny_model_dir)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InputError) as error:
        read_adapter(folder)
    assert "adapter_model.bin" in (error.value.faults[0].hint or "")


def test_a_base_folder_is_no_adapter(tiny_model_dir: Path) -> None:
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        read_adapter(tiny_model_dir)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_an_unreadable_config_is_an_input_error(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], text: str
) -> None:
    folder = make_adapter(tiny_model_dir)
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(InputError) as error:
        read_adapter(folder)
    assert fault_codes(error) == ["unreadable-json"]


def test_kinds_that_are_more_than_their_tensors_are_refused_by_name_all_at_once(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter(
        tiny_model_dir, init_lora_weights="pissa_niter_4", use_qalora=True, peft_type="LOHA"
    )
    with pytest.raises(InputError) as error:
        read_adapter(folder)
    assert fault_codes(error) == ["adapter-kind"] * 3
    assert all(word in str(error.value) for word in ("pissa_niter_4", "use_qalora", "LOHA"))


def test_the_record_names_base_and_revision_before_the_config_does(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    record = {"base": {"name_or_path": "org/name", "revision": "abc"}}
    adapter = read_adapter(make_adapter(tiny_model_dir, record=record))
    assert (adapter.base_name, adapter.revision) == ("org/name", "abc")
    config = json.loads((adapter.folder / "adapter_config.json").read_text())
    assert (
        read_adapter(make_adapter(tiny_model_dir, name="other")).base_name
        == config["base_model_name_or_path"]
    )


def test_the_same_tensor_stored_twice_must_be_the_same(
    tiny_model_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    head = torch.ones(320, 64)
    twice = {"lm_head.weight": head, "lm_head.modules_to_save.weight": head.clone()}
    assert list(read_adapter(make_adapter(tiny_model_dir, tensors=twice)).full) == ["lm_head.weight"]
    twice["lm_head.modules_to_save.weight"] = head * 2
    with pytest.raises(InputError, match="twice with different values"):
        read_adapter(make_adapter(tiny_model_dir, name="other", tensors=twice))
