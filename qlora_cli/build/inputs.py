"""A recipe's inputs made real, in the order that finds faults cheapest: device, base config, tokenizer, data.

Nothing here reads weights or writes files; every fault carries the recipe's file, line and column, or the data
file and row.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_cli.config.load import LoadedRecipe
from qlora_cli.config.schema import ValidationSplit
from qlora_cli.console import Console
from qlora_cli.data.prepare import Split, prepare, split_fraction
from qlora_cli.data.sources import Source
from qlora_cli.device import DeviceFacts, probe
from qlora_cli.errors import Fault, InputError
from qlora_cli.model.load import QuantizationSpec, load_tokenizer, read_model_config
from qlora_cli.model.lora import LoraSpec, TargetError, linear_names, match_targets
from qlora_cli.resolve import Choices, resolve
from qlora_cli.run_folder import sha256


@dataclass(frozen=True)
class Inputs:
    """Everything a run reads, before any weight.

    Attributes:
        loaded: The recipe with the positions of its keys.
        device: The device that will do the work.
        choices: What `auto` became.
        config: The base model's transformers config.
        tokenizer: With the recipe's chat template, if it names one.
        train: Examples to train.
        validation: Examples to evaluate, or None.
        files: Data file to SHA-256, by name, for run.json and the identity of the run.
    """

    loaded: LoadedRecipe
    device: DeviceFacts
    choices: Choices
    config: Any
    tokenizer: Any
    train: Split
    validation: Split | None
    files: Mapping[str, str]

    @property
    def quantization(self) -> QuantizationSpec:
        """How the base is loaded."""
        spec = self.loaded.recipe.model.quantization
        return QuantizationSpec(
            scheme=spec.scheme,
            double_quant=spec.double_quant,
            compute_dtype=self.choices.compute_dtype.value,
            skip_modules=tuple(spec.skip_modules),
        )

    @property
    def lora(self) -> LoraSpec:
        """What is attached to the base."""
        spec = self.loaded.recipe.lora
        targets = spec.target_modules
        return LoraSpec(
            rank=spec.rank,
            alpha=spec.alpha,
            dropout=spec.dropout,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            variant=spec.variant,
            init=spec.init,
        )


def read_inputs(loaded: LoadedRecipe, console: Console, *, needs_train: bool = True) -> Inputs:
    """Read and check everything a run needs except the weights.

    Args:
        loaded: A complete recipe.
        console: Told the choices, and every warning of the data.
        needs_train: False where only the validation data are used (`qlora eval`).

    Returns:
        The inputs.

    Raises:
        InputError: With every fault of the first stage that has any (base, target modules, data).
    """
    recipe = loaded.recipe
    device = probe()
    choices = resolve(recipe, device)
    config = read_model_config(recipe.model.name_or_path, recipe.model.revision, recipe.model.trust_remote_code)
    _check_targets(loaded, config)
    template = recipe.data.chat_template
    tokenizer = load_tokenizer(
        recipe.model.name_or_path,
        recipe.model.revision,
        Path(template).read_text("utf-8") if template else None,
        recipe.model.trust_remote_code,
    )
    if tokenizer.chat_template is None:
        raise InputError(
            loaded.fault(
                "no-chat-template",
                "data.chat_template",
                f"the tokenizer of `{recipe.model.name_or_path}` has no chat template",
                accepted="the path of a .jinja file",
                hint="an instruction-tuned model of the same family has one",
            )
        )
    train, validation, files = _read_data(loaded, tokenizer, needs_train)
    faults = [*train.faults, *(validation.faults if validation else ())]
    if faults:
        raise InputError(faults)
    for split in (train, validation):
        for line in split.warnings if split else ():
            console.warn(line)
    return Inputs(loaded, device, choices, config, tokenizer, train, validation, files)


def _check_targets(loaded: LoadedRecipe, config: Any) -> None:
    """Match `lora.target_modules` against the module names of the model's config, without its weights."""
    targets = loaded.recipe.lora.target_modules
    names = linear_names(config)
    try:
        match_targets(names, targets if isinstance(targets, str) else tuple(targets))
    except TargetError as error:
        close = [near for name in error.unmatched for near in difflib.get_close_matches(name, error.available, n=1)]
        raise InputError(
            loaded.fault(
                "target-not-found",
                "lora.target_modules",
                f"`target_modules`: {', '.join(f'`{n}`' for n in error.unmatched)} matches no linear layer of"
                f" `{loaded.recipe.model.name_or_path}`",
                accepted=", ".join([*error.available, "all-linear"]),
                hint=f"did you mean {', '.join(f'`{name}`' for name in close)}?" if close else None,
            )
        ) from None


def _read_data(
    loaded: LoadedRecipe, tokenizer: Any, needs_train: bool
) -> tuple[Split, Split | None, dict[str, str]]:
    data = loaded.recipe.data
    validation = data.validation
    fraction = validation.fraction if isinstance(validation, ValidationSplit) else 0.0
    train_sources = [_source(entry, data.format) for entry in data.train]
    validation_sources = [] if isinstance(validation, ValidationSplit) or not validation else [
        _source(entry, data.format) for entry in validation
    ]

    def read(sources: Sequence[Source]) -> Split:
        return prepare(
            sources, tokenizer, loss_on=data.loss_on, max_seq_len=data.max_seq_len, overlong=data.overlong
        )

    files = {str(s.path): sha256(s.path) for s in [*train_sources, *validation_sources]}
    held_out = read(validation_sources) if validation_sources else None
    train = read(train_sources if needs_train or fraction else [])
    if fraction and not train.faults:
        train, held_out = split_fraction(train, fraction, loaded.recipe.train.seed)
    return train, held_out, files


def _source(entry: Any, default_format: str) -> Source:
    return Source(
        path=Path(entry.path),
        format=entry.format if entry.format != "auto" else default_format,
        name=entry.name or Path(entry.path).stem,
        exact_match=getattr(entry, "exact_match", False),
    )


FREE_ON_RESUME = (
    "train.epochs",
    "train.max_steps",
    "train.eval_every_steps",
    "train.save_every_steps",
    "train.keep_checkpoints",
    "train.sample_prompts",
    "log.every_steps",
    "output_dir",
)


def identity(inputs: Inputs) -> dict[str, Any]:
    """What must be equal for a run to go on: dotted recipe keys, with files replaced by their hashes.

    Free to change are the length of the run, its intervals, and everything under `optimizer.paging`, none of which
    alters what a step computes.
    """
    recipe = inputs.loaded.recipe
    flat = dict(_flatten(recipe.model_dump(mode="json", exclude={"data": {"train", "validation"}})))
    kept = {k: v for k, v in flat.items() if k not in FREE_ON_RESUME and not k.startswith("optimizer.paging.")}
    kept["model.name_or_path"] = _fingerprint(inputs.config)
    kept["model.quantization.compute_dtype"] = inputs.choices.compute_dtype.value
    kept["data.train"] = [[Path(e.path).name, inputs.files[str(Path(e.path))]] for e in recipe.data.train]
    if isinstance(recipe.data.validation, ValidationSplit):
        kept["data.validation"] = recipe.data.validation.fraction
    if recipe.data.chat_template:
        kept["data.chat_template"] = sha256(Path(recipe.data.chat_template))
    return kept


def _fingerprint(config: Any) -> str:
    """Hash of the base's config: a moved folder is the same base, another model is not."""
    document = config.to_json_string(use_diff=False).split("\n")
    lines = [line for line in document if '"_name_or_path"' not in line]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _flatten(node: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        if isinstance(value, Mapping):
            found += _flatten(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found


def missing_validation(loaded: LoadedRecipe) -> Fault:
    """The fault of a command that needs validation data when the recipe names none."""
    return loaded.fault(
        "no-validation-data",
        "data.validation",
        "`data.validation` is not set, so there is nothing to evaluate",
        accepted="a list of sources, or {fraction: F}",
        hint="give it for this command with `--set data.validation='[{path: FILE.jsonl}]'`",
    )
