"""Names of other tools, misplaced and misspelt keys: the hint says what to write."""

from __future__ import annotations

import pytest

from qlora_cli.config import foreign
from qlora_cli.config.kinds import Kind
from qlora_cli.config.names import all_keys
from tests.config.conftest import MINIMAL, Faults, Load

# a recipe as another tool's user would bring it: line, then what the hint has to hold
LINES = {
    "adapter: qlora": ["lora", "model.quantization.scheme"],
    "load_in_4bit: true": ["model.quantization", "{scheme: nf4}"],
    "lora_r: 8": ["lora.rank", "lora: {rank: 8}"],
    "r: 8": ["lora.rank"],
    "lora_alpha: 16": ["lora: {alpha: 16}"],
    "lora_dropout: 0.05": ["lora: {dropout: 0.05}"],
    "lora_target: all": ["lora: {target_modules: all-linear}"],
    "lora_target_linear: true": ["lora: {target_modules: all-linear}"],
    "use_rslora: true": ["lora: {variant: rslora}"],
    "base_model: owner/name": ["model: {name_or_path: owner/name}"],
    "bf16: true": ["model: {quantization: {compute_dtype: bf16}}"],
    "bnb_4bit_compute_dtype: bfloat16": ["model: {quantization: {compute_dtype: bf16}}"],
    "sequence_len: 1024": ["data: {max_seq_len: 1024}"],
    "cutoff_len: 1024": ["data: {max_seq_len: 1024}"],
    "sample_packing: true": ["data.packing"],
    "datasets: [{path: x}]": ["data: {train: [{path: FILE}]}"],
    "val_set_size: 0.05": ["data: {validation: {fraction: 0.02}}"],
    "per_device_train_batch_size: 2": ["train: {micro_batch_size: 2}"],
    "num_train_epochs: 3": ["train: {epochs: 3}"],
    "optim: paged_adamw_8bit": ["optimizer: {name: paged_adamw_8bit}"],
    "optim: adamw_torch": ["optimizer: {name: paged_adamw_32bit}", "backend: resident"],
    "lr: 2e-4": ["optimizer: {learning_rate: 2e-4}"],
    "lr_scheduler_type: cosine": ["schedule: {name: cosine}"],
    "warmup_steps: 100": ["schedule.warmup_ratio", "from 0 to 1"],
    "adam_beta1: 0.9": ["optimizer.betas", "2 numbers"],
    "gradient_checkpointing: true": ["train: {activation_checkpointing: full}"],
    "save_total_limit: 3": ["train: {keep_checkpoints: 3}"],
    "logging_steps: 5": ["log: {every_steps: 5}"],
    "wandb_project: x": ["metrics.jsonl"],
    "deepspeed: ds.json": ["optimizer.paging"],
    "learning_rate: 1e-4": ["did you mean `optimizer.learning_rate`?"],
    "rank: 4": ["did you mean `lora.rank`?"],
    "seed: 1": ["did you mean `train.seed`?"],
    "paging: {}": ["did you mean `optimizer.paging`?"],
    "modle: {}": ["did you mean `model`?"],
    "includes: x.yaml": ["did you mean `include`?"],
    "learning_rates: 1": ["did you mean `optimizer.learning_rate`?"],
    "lora.rank: 4": ["keys are nested", "lora: {rank: 4}"],
    "per_device_train_batchsize: 4": ["train: {micro_batch_size: 4}"],
}


@pytest.mark.parametrize("line", LINES)
def test_an_unknown_key_at_the_top_is_met_with_what_to_write(faults: Faults, line: str) -> None:
    (fault,) = faults(f"{MINIMAL}{line}\n")
    assert fault.code in ("foreign-key", "unknown-key")
    assert fault.message == f"unknown key `{line.partition(':')[0]}`"
    assert (fault.line, fault.column) == (4, 1)
    for part in LINES[line]:
        assert part in (fault.hint or "")


def test_inside_the_right_section_the_hint_names_the_key_alone(faults: Faults) -> None:
    (fault,) = faults(MINIMAL + "lora: {r: 16}\n")
    assert fault.message == "unknown key `r` in `lora`"
    assert fault.hint == "`r` is peft's name for `lora.rank`; write `rank: 16`"
    assert fault.accepted == "rank, alpha, dropout, target_modules, variant, init, continue_from"


def test_after_set_the_hint_is_a_set_option(faults: Faults) -> None:
    (fault,) = faults(MINIMAL, "lora_r=16")
    assert fault.hint == "`lora_r` is axolotl's name for `lora.rank`; write `--set lora.rank=16`"


@pytest.mark.parametrize(
    ("section", "key", "near"),
    [("optimizer", "learning_rte", "learning_rate"), ("train", "bactch_size", "micro_batch_size"),
     ("data", "tran", "train"), ("lora", "Rank", "rank"), ("train", "save-every-steps", "save_every_steps")],
)  # fmt: skip
def test_a_misspelt_key_is_met_with_the_nearest_of_its_section(
    faults: Faults, section: str, key: str, near: str
) -> None:
    assert f"did you mean `{near}`?" in [f.hint for f in faults(MINIMAL, f"{section}={{{key}: 1}}")]


def test_a_key_that_is_near_nothing_gets_no_guess(faults: Faults) -> None:
    (fault,) = faults(MINIMAL + "zzz: 1\n")
    assert fault.hint is None


@pytest.mark.parametrize(
    "override",
    ["lora.train_new_tokens=false", "optimizer.paging.on_oom=raise", "train.early_stopping_patience=null",
     "log.trackers=[]", "data.train=[{path: rows.jsonl, weight: 2}]", "data.packing=true",
     "lora.variant=dora",
     "lora.init=pissa", "data.format=text", "model.attention=flash_attention_2",
     "optimizer.paging.backend=pinned", "optimizer.paging.prefetch=last_micro_batch",
     "train.activation_checkpointing=offload", "data.train=[{path: rows.jsonl, format: text}]"],
)  # fmt: skip
def test_what_comes_later_is_refused_and_said_to_come_later(faults: Faults, override: str) -> None:
    (fault,) = faults(MINIMAL, override)
    assert fault.code == "not-available-yet"
    assert "not available yet" in fault.message
    assert fault.accepted


@pytest.mark.parametrize(
    ("override", "written"),
    [("optimizer.name=adamw_torch", "name: paged_adamw_32bit"), ("data.format=sharegpt", "format: chat"),
     ("model.quantization.scheme=4", "scheme: nf4"),
     ("lora.target_modules=all", "target_modules: all-linear"),
     ("model.quantization.compute_dtype=bfloat16", "compute_dtype: bf16"),
     ("train.activation_checkpointing=true", "activation_checkpointing: full"),
     ("schedule.name=constant_with_warmup", "name: constant")],
)  # fmt: skip
def test_a_value_as_another_tool_spells_it_is_translated(faults: Faults, override: str, written: str) -> None:
    (fault,) = faults(MINIMAL, override)
    assert f"write `{written}`" in (fault.hint or "")


def takes(kind: Kind, word: str) -> bool:
    return word in kind.words


def test_every_name_of_another_tool_leads_to_a_key_that_exists() -> None:
    assert set(foreign.NAMES) <= set(all_keys())
    assert set(foreign.UNLIKE) <= set(all_keys())
    names = [name for names in foreign.NAMES.values() for name in names]
    assert len(names) == len(set(names)) > 150
    assert not set(names) & set(foreign.NOTES)


def test_every_value_of_another_tool_leads_to_a_word_that_its_key_accepts() -> None:
    for key, values in foreign.VALUES.items():
        for theirs, ours in values.items():
            assert takes(all_keys()[key], ours), (key, theirs)
            assert theirs == theirs.lower()


def test_what_comes_later_is_neither_a_key_nor_a_value_now(load: Load) -> None:
    assert not foreign.LATER_KEYS & set(all_keys())
    for key, values in foreign.LATER_VALUES.items():
        assert not any(takes(all_keys()[key], word) for word in values), key
    assert load(MINIMAL).recipe.data.packing is False
