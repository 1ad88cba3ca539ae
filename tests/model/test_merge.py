from __future__ import annotations

import json
import shutil
import warnings
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qlora_cli.errors import InputError, QloraError, RunError
from qlora_cli.model import merge as merge_module
from qlora_cli.model.merge import merge

Q0, Q1 = (f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1))
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MakeAdapter = Callable[..., Path]


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the comparison of logits away where the test is not about it, since it takes two loads."""
    from qlora_cli.model.verify import compare

    def same(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Any:
        logits = torch.randn(4, 8)
        return compare([logits], [logits], [logits + torch.randn(4, 8)], dtype)

    monkeypatch.setattr(merge_module, "compare_logits", same)


def tie(folder: Path) -> Path:
    """Make the head of a base folder the embedding."""
    weights = load_file(folder / "model.safetensors")
    weights.pop(HEAD)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, tie_word_embeddings=True)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def config_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return document


def shard(folder: Path) -> None:
    """Spread a base over three files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {}
    for index in range(3):
        file = f"model-{index + 1:05d}-of-00003.safetensors"
        part = {name: weights[name] for name in names[index::3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_transformers_loads_the_folder_without_a_warning(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = merge(make_adapter(tiny_model_dir), tmp_path / "out" / "merged")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = AutoModelForCausalLM.from_pretrained(report.output, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(report.output)
    assert not any(info.values())
    assert not caplog.records
    assert model.dtype == torch.float32
    base = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert tokenizer.chat_template == base.chat_template
    assert tokenizer.get_vocab() == base.get_vocab()
    assert left_in(report.output) == left_in(tiny_model_dir) | {"README.md"}


def test_the_report_has_the_fields_of_the_interface(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    report = merge(make_adapter(tiny_model_dir), tmp_path / "merged", prompts=[[5, 6, 7], [8, 9]])
    document = json.loads(json.dumps(report.as_json()))
    assert document["changed_tensors"] == 2
    assert document["tensors"] == 21
    assert document["base"] == "original"
    assert document["dtype"] == "fp32"
    assert document["top1_agreement"] == 1.0
    assert document["positions"] == 5
    assert document["holds"] is True
    assert {"max_abs_diff", "mean_kl", "base_reason", "output", "tolerance"} <= document.keys()


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_dtype_is_that_of_every_tensor_and_of_the_config(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path, dtype: str, stored: torch.dtype
) -> None:
    report = merge(make_adapter(tiny_model_dir), tmp_path / "merged", dtype=dtype)
    assert {tensor.dtype for tensor in load_file(report.output / "model.safetensors").values()} == {stored}
    assert config_of(report.output)["dtype"] == str(stored).removeprefix("torch.")


@pytest.mark.usefixtures("unproved")
def test_auto_keeps_the_dtype_of_each_tensor(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_model_dir)
    weights = load_file(tiny_model_dir / "model.safetensors")
    dtypes = {key: torch.float32 if "norm" in key else torch.bfloat16 for key in weights}
    save_file({key: weights[key].to(dtypes[key]) for key in weights}, tiny_model_dir / "model.safetensors")
    edit_config(tiny_model_dir, torch_dtype="float32")
    report = merge(adapter, tmp_path / "merged")
    merged = load_file(report.output / "model.safetensors")
    assert {key: tensor.dtype for key, tensor in merged.items()} == dtypes
    assert (config_of(report.output)["torch_dtype"], report.dtype) == ("bfloat16", "bf16")


@pytest.mark.usefixtures("unproved")
def test_a_base_in_shards_gives_the_same_weights(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_model_dir)
    whole = load_file(merge(adapter, tmp_path / "whole").output / "model.safetensors")
    shard(tiny_model_dir)
    parts = load_file(merge(adapter, tmp_path / "parts").output / "model.safetensors")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[key], whole[key]) for key in whole)


def test_a_large_model_is_written_in_shards_that_transformers_loads(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qlora_cli.model.shards import plan_shards

    monkeypatch.setattr(merge_module, "plan_shards", lambda tensors: plan_shards(tensors, 100_000))
    told: list[tuple[int, int, str]] = []
    report = merge(make_adapter(tiny_model_dir), tmp_path / "merged", on_shard=lambda *a: told.append(a))
    assert report.comparison.holds  # the reloaded folder was compared
    assert len(told) > 2
    assert {name for _, _, name in told} == {path.name for path in report.output.glob("model-*")}


# --- what it is merged into


RECORD = {
    "quantization": {
        "scheme": "nf4",
        "double_quant": True,
        "compute_dtype": "fp32",
        "skip_modules": [],
        "quantized_modules": [Q0, Q1],
    }
}


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize(
    ("asked", "record", "base", "reason"),
    [
        ("auto", None, "original", "no record"),
        ("auto", RECORD, "nf4", "nf4 with double quantisation"),
        ("auto", {"quantization": {"scheme": "none"}}, "original", "was not quantised"),
        ("original", RECORD, "original", "--base original"),
        ("nf4", None, "nf4", "--base nf4"),
    ],
)
def test_auto_is_what_the_record_says_and_original_where_there_is_none(
    tiny_model_dir: Path,
    make_adapter: MakeAdapter,
    tmp_path: Path,
    asked: str,
    record: dict[str, Any] | None,
    base: str,
    reason: str,
) -> None:
    report = merge(make_adapter(tiny_model_dir, record=record), tmp_path / "merged", base=asked)
    assert report.base == base
    assert reason in report.base_reason
    assert report.changed_tensors == 2  # what quantisation changed is not the adapter's doing
    before = load_file(tiny_model_dir / "model.safetensors")
    after = load_file(report.output / "model.safetensors")
    touched = {key for key in before if not torch.equal(before[key], after[key])}
    if asked == "nf4":  # without a record: every linear layer but the head, as transformers quantises
        assert touched == {key for key in before if "proj" in key}
    else:
        assert touched == {f"{Q0}.weight", f"{Q1}.weight"}


@pytest.mark.parametrize(
    "quantization",
    [
        "nf4",
        {"scheme": "int8"},
        {"scheme": "nf4", "compute_dtype": "auto"},
        {"scheme": "nf4", "quantized_modules": ["x"]},
    ],
)
def test_a_record_that_does_not_say_how_the_base_was_loaded_is_an_input_error(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path, quantization: Any
) -> None:
    with pytest.raises(InputError):
        merge(make_adapter(tiny_model_dir, record={"quantization": quantization}), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.usefixtures("unproved")
def test_base_path_is_taken_where_the_recorded_base_is_gone(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_model_dir)
    tiny_model_dir.rename(tmp_path / "moved")
    with pytest.raises(InputError) as error:
        merge(adapter, tmp_path / "merged")
    assert error.value.faults[0].code == "base-not-found"
    assert "--base-path" in (error.value.faults[0].hint or "")
    assert merge(adapter, tmp_path / "merged", base_path=str(tmp_path / "moved")).changed_tensors == 2


# --- tied embeddings and added tokens


def test_a_trained_head_on_a_tied_model_is_stored_on_its_own(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    tie(tiny_model_dir)
    embed = load_file(tiny_model_dir / "model.safetensors")[EMBED]
    head = embed + 0.1 * torch.randn(embed.shape, generator=torch.Generator().manual_seed(3))
    report = merge(
        make_adapter(tiny_model_dir, tensors={HEAD: head}, modules_to_save=["lm_head"]), tmp_path / "merged"
    )
    merged = load_file(report.output / "model.safetensors")
    assert torch.equal(merged[HEAD], head)
    assert torch.equal(merged[EMBED], embed)
    assert config_of(report.output)["tie_word_embeddings"] is False
    assert (report.untied, report.changed_tensors) == ((HEAD,), 3)


def test_a_trained_embedding_on_a_tied_model_leaves_the_head_as_it_was(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    tie(tiny_model_dir)
    before = load_file(tiny_model_dir / "model.safetensors")[EMBED]
    adapter = make_adapter(tiny_model_dir, tensors={EMBED: before * 1.5}, modules_to_save=["embed_tokens"])
    report = merge(adapter, tmp_path / "merged")
    merged = load_file(report.output / "model.safetensors")
    assert torch.equal(merged[EMBED], before * 1.5)
    assert torch.equal(merged[HEAD], before)
    assert config_of(report.output)["tie_word_embeddings"] is False


@pytest.mark.parametrize("both", [True, False])
def test_a_tied_model_stays_tied_where_both_were_trained_alike(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path, both: bool
) -> None:
    tie(tiny_model_dir)
    new = load_file(tiny_model_dir / "model.safetensors")[EMBED] * 1.5
    if both:
        adapter = make_adapter(
            tiny_model_dir,
            tensors={EMBED: new, HEAD: new.clone()},
            modules_to_save=["embed_tokens", "lm_head"],
        )
    else:  # rows of the embedding, which peft also trains in the head
        adapter = make_adapter(
            tiny_model_dir,
            tensors={"model.embed_tokens.token_adapter.trainable_tokens_delta": new[[5, 300]]},
            trainable_token_indices=[5, 300],
        )
    report = merge(adapter, tmp_path / "merged")
    merged = load_file(report.output / "model.safetensors")
    assert HEAD not in merged
    assert torch.equal(merged[EMBED][[5, 300]], new[[5, 300]])
    assert config_of(report.output)["tie_word_embeddings"] is True
    assert report.untied == ()


def test_a_tied_model_without_any_of_it_trained_stays_as_it_is(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    report = merge(make_adapter(tie(tiny_model_dir)), tmp_path / "merged")
    assert HEAD not in load_file(report.output / "model.safetensors")
    assert config_of(report.output)["tie_word_embeddings"] is True


def add_token(source: Path, folder: Path) -> None:
    """Copy a tokenizer into a folder with one token more."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    document = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    token = {"id": 320, "content": "<|note|>", "special": True, "normalized": False}
    document["added_tokens"].append(token | {"single_word": False, "lstrip": False, "rstrip": False})
    (folder / "tokenizer.json").write_text(json.dumps(document), "utf-8")


@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_bring_their_rows_their_config_and_their_tokenizer(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path, tied: bool
) -> None:
    from transformers import AutoTokenizer

    wide = {key: torch.randn(321, 64, generator=torch.Generator().manual_seed(4)) for key in (EMBED, HEAD)}
    adapter = make_adapter(tiny_model_dir, tensors=wide, modules_to_save=["embed_tokens", "lm_head"])
    add_token(tiny_model_dir, adapter)
    if tied:
        tie(tiny_model_dir)
    report = merge(adapter, tmp_path / "merged")
    merged = load_file(report.output / "model.safetensors")
    assert torch.equal(merged[EMBED], wide[EMBED])
    assert (HEAD in merged) != tied  # made equal by the seed, so a tied model stays tied
    assert config_of(report.output)["vocab_size"] == 321
    assert AutoTokenizer.from_pretrained(report.output).get_vocab()["<|note|>"] == 320


def test_rows_added_to_one_of_embedding_and_head_are_an_input_error(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(
        tiny_model_dir, tensors={EMBED: torch.ones(321, 64)}, modules_to_save=["embed_tokens"]
    )
    with pytest.raises(InputError, match=r"321 rows.*320 rows"):
        merge(adapter, tmp_path / "merged")


def test_a_tokenizer_with_a_token_that_has_no_row_is_an_input_error(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_model_dir)
    add_token(tiny_model_dir, adapter)
    with pytest.raises(InputError) as error:
        merge(adapter, tmp_path / "merged")
    assert error.value.faults[0].code == "tokenizer-mismatch"


# --- tokenizer, template, config, card


@pytest.mark.usefixtures("unproved")
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_the_template_of_the_adapter_wins(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path, with_tokenizer: bool
) -> None:
    from transformers import AutoTokenizer

    adapter = make_adapter(tiny_model_dir)
    if with_tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model_dir / name, adapter)
    (adapter / "chat_template.jinja").write_text("{{ 'mine: ' + messages[0].content }}")
    report = merge(adapter, tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(report.output)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert text == "mine: x"


@pytest.mark.usefixtures("unproved")
def test_the_config_is_the_bases_without_quantisation_and_the_generation_config_comes_along(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    (tiny_model_dir / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    edit_config(tiny_model_dir, quantization_config=None, some_key_of_its_own={"a": 1})
    report = merge(make_adapter(tiny_model_dir), tmp_path / "merged")
    config = config_of(report.output)
    assert "quantization_config" not in config
    assert config["some_key_of_its_own"] == {"a": 1}
    assert json.loads((report.output / "generation_config.json").read_text()) == {"eos_token_id": [3, 2]}


def test_the_card_says_where_the_model_comes_from_and_names_no_path(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    from qlora_cli.run_folder import sha256

    adapter = make_adapter(tiny_model_dir)
    report = merge(adapter, tmp_path / "merged")
    card = (report.output / "README.md").read_text("utf-8")
    assert sha256(adapter / "adapter_model.safetensors") in card
    assert "`tiny_model`" in card
    assert "rank 4, alpha 8" in card
    assert str(tmp_path) not in card


# --- bad input and bad luck: one clear error, and nothing under the name


def test_an_output_that_is_taken_is_left_alone(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_model_dir)
    output = tmp_path / "merged"
    output.mkdir()
    (output / "mine.txt").write_text("mine")
    for taken in (output, output / "mine.txt"):
        with pytest.raises(InputError) as error:
            merge(adapter, taken)
        assert error.value.faults[0].code == "output-exists"
    assert left_in(output) == {"mine.txt"}
    assert (output / "mine.txt").read_text() == "mine"


@pytest.mark.usefixtures("unproved")
def test_an_empty_folder_may_be_the_output_and_leftovers_of_a_crash_go(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_model_dir)
    (tmp_path / "merged").mkdir()
    (tmp_path / ".merged.partial").mkdir()
    (tmp_path / ".merged.partial" / "old").write_text("half")
    merge(adapter, tmp_path / "merged")
    assert left_in(tmp_path) == {"tiny_model", "adapter", "merged"}
    assert "old" not in left_in(tmp_path / "merged")


@pytest.mark.parametrize("at", ["write_shards", "copy_companions", "compare_logits", "_write_card"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_whatever_happens_on_the_way_leaves_no_half_folder(
    tiny_model_dir: Path,
    make_adapter: MakeAdapter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    error: BaseException,
) -> None:
    adapter = make_adapter(tiny_model_dir)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(merge_module, at, fail)
    with pytest.raises((KeyboardInterrupt, RunError)) as caught:
        merge(adapter, tmp_path / "merged")
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value)
    assert left_in(tmp_path) == {"tiny_model", "adapter"}


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    adapter = make_adapter(tiny_model_dir)
    with pytest.raises(RunError, match="no space") as error:
        merge(adapter, tmp_path / "deep" / "merged")
    assert error.value.faults[0].code == "no-space"
    assert not (tmp_path / "deep").exists()


def test_an_adapter_of_zeros_is_a_run_error(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    zeros = {f"{module}.lora_B.weight": torch.zeros(64, 4) for module in (Q0, Q1)}
    with pytest.raises(RunError, match="nothing was changed"):
        merge(make_adapter(tiny_model_dir, tensors=zeros), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_below_the_precision_of_the_output_is_a_run_error(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_model_dir, spread=1e-20)
    with pytest.raises(RunError, match="below the precision of fp32"):
        merge(adapter, tmp_path / "merged")
    assert left_in(tmp_path) == {"tiny_model", "adapter"}


def test_an_effect_that_bf16_rounds_away_in_part_is_said(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    weights = load_file(tiny_model_dir / "model.safetensors")
    ends = ("q_proj.weight", "v_proj.weight", "down_proj.weight")
    ranks = {key.removesuffix(".weight"): 4 for key in weights if key.endswith(ends)}
    adapter = make_adapter(tiny_model_dir, ranks, spread=0.014, lora_alpha=4)
    on_the_grid = {key: value.bfloat16() for key, value in weights.items()}
    save_file(on_the_grid, tiny_model_dir / "model.safetensors", metadata={"format": "pt"})
    report = merge(adapter, tmp_path / "bf16")
    assert report.comparison.effect_ratio < 0.98
    assert "of the adapter's effect" in report.notes[0]
    assert merge(adapter, tmp_path / "fp32", dtype="fp32").notes == ()


def test_values_beyond_the_range_of_fp16_are_a_run_error_that_names_the_tensor(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_model_dir, lora_alpha=10_000_000)
    with pytest.raises(RunError, match=f"`{Q0}.weight`.*float16"):
        merge(adapter, tmp_path / "merged", dtype="fp16")
    assert left_in(tmp_path) == {"tiny_model", "adapter"}


def test_shapes_that_do_not_fit_are_all_named_with_both_shapes(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    wrong = {f"{module}.lora_A.weight": torch.ones(4, 32) for module in (Q0, Q1)}
    with pytest.raises(InputError, match=r"\[64, 32\] in the adapter and \[64, 64\] in the base") as error:
        merge(make_adapter(tiny_model_dir, tensors=wrong), tmp_path / "merged")
    assert len(error.value.faults) == 2


def spoil_adapter(adapter: Path, base: Path) -> None:
    (adapter / "adapter_config.json").unlink()


def spoil_is_adapter(adapter: Path, base: Path) -> None:
    shutil.rmtree(base)
    shutil.copytree(adapter, base)


def spoil_quantised(adapter: Path, base: Path) -> None:
    edit_config(base, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


def spoil_shard(adapter: Path, base: Path) -> None:
    shard(base)
    (base / "model-00002-of-00003.safetensors").unlink()


def spoil_weights(adapter: Path, base: Path) -> None:
    path = base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def spoil_no_weights(adapter: Path, base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")


def spoil_architecture(adapter: Path, base: Path) -> None:
    edit_config(base, model_type="no-such-model")


def spoil_tokenizer(adapter: Path, base: Path) -> None:
    for path in base.glob("tokenizer*"):
        path.unlink()


def spoil_base_name(adapter: Path, base: Path) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (spoil_adapter, "no-adapter"),
        (spoil_is_adapter, "base-is-adapter"),
        (spoil_quantised, "base-is-quantised"),
        (spoil_shard, "base-incomplete"),
        (spoil_weights, "unreadable-tensors"),
        (spoil_no_weights, "no-safetensors"),
        (spoil_architecture, "unknown-architecture"),
        (spoil_tokenizer, "no-tokenizer"),
        (spoil_base_name, "base-not-found"),
    ],
)
def test_bad_input_is_an_input_error_and_nothing_is_written(
    tiny_model_dir: Path,
    make_adapter: MakeAdapter,
    tmp_path: Path,
    spoil: Callable[[Path, Path], None],
    code: str,
) -> None:
    adapter = make_adapter(tiny_model_dir)
    spoil(adapter, tiny_model_dir)
    before = left_in(tmp_path)
    with pytest.raises(QloraError) as error:
        merge(adapter, tmp_path / "merged")
    assert isinstance(error.value, InputError)
    assert [fault.code for fault in error.value.faults] == [code]
    assert left_in(tmp_path) == before


def test_unknown_words_for_base_and_dtype_are_reported_together(
    tiny_model_dir: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        merge(make_adapter(tiny_model_dir), tmp_path / "merged", base="int8", dtype="fp8")
    assert [fault.key for fault in error.value.faults] == ["--base", "--dtype"]
