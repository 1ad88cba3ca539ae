"""A recipe's inputs made real, in the order that finds faults cheapest: device, base config, tokenizer, data.

Nothing here reads weights or writes files; every fault carries the recipe's file, line and column, or the
data file and row.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_cli.config.load import LoadedRecipe
from qlora_cli.config.schema import Recipe, TrainSource, ValidationSource, ValidationSplit
from qlora_cli.console import Console
from qlora_cli.data.prepare import Split, prepare, split_fraction
from qlora_cli.data.sources import Source
from qlora_cli.device import DeviceFacts, probe
from qlora_cli.errors import Fault, InputError
from qlora_cli.model.load import QuantizationSpec, load_base, load_tokenizer, read_model_config
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
        train: Examples to train; None where they were not needed.
        validation: Examples to evaluate, or None.
        files: Data file to SHA-256, by name, for run.json and the identity of the run.
    """

    loaded: LoadedRecipe
    device: DeviceFacts
    choices: Choices
    config: Any
    tokenizer: Any
    train: Split | None
    validation: Split | None
    files: Mapping[str, str]

    @property
    def training(self) -> Split:
        """The training examples, where they were read."""
        assert self.train is not None, "read_inputs was told that no training data are needed"
        return self.train

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
    name, revision, trust = recipe.model.name_or_path, recipe.model.revision, recipe.model.trust_remote_code
    with placed(loaded):
        config = read_model_config(name, revision, trust)
        _check_targets(loaded, config)
        tokenizer = load_tokenizer(name, revision, template_of(recipe), trust)
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
    splits = [split for split in (train, validation) if split is not None]
    faults = [fault for split in splits for fault in split.faults]
    if faults:
        raise InputError(faults)
    for warning in (warning for split in splits for warning in split.warnings):
        console.warn(
            f"{warning.where}: {warning.message}" if warning.where else warning.message, warning.hint
        )
    return Inputs(loaded, device, choices, config, tokenizer, train, validation, files)


def load_recipe_base(inputs: Inputs) -> Any:
    """The base that a recipe names, loaded as the inputs say; its faults point at the recipe's keys."""
    spec = inputs.loaded.recipe.model
    with placed(inputs.loaded):
        return load_base(
            spec.name_or_path,
            spec.revision,
            inputs.quantization,
            inputs.choices.attention.value,
            inputs.device.torch_device,
            spec.trust_remote_code,
        )


@contextmanager
def placed(loaded: LoadedRecipe) -> Iterator[None]:
    """Give faults that name a recipe key, but no file, the place of that key."""
    try:
        yield
    except InputError as error:
        raise InputError([loaded.located(fault) for fault in error.faults]) from error


def _check_targets(loaded: LoadedRecipe, config: Any) -> None:
    """Match `lora.target_modules` against the module names of the model's config, without its weights."""
    targets = loaded.recipe.lora.target_modules
    names = linear_names(config)
    try:
        match_targets(names, targets if isinstance(targets, str) else tuple(targets))
    except TargetError as error:
        close = [
            near for name in error.unmatched for near in difflib.get_close_matches(name, error.available, n=1)
        ]
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
) -> tuple[Split | None, Split | None, dict[str, str]]:
    recipe = loaded.recipe
    validation = recipe.data.validation
    fraction = validation.fraction if isinstance(validation, ValidationSplit) else 0.0
    listed = validation if isinstance(validation, tuple) else ()
    files = {str(entry.path): sha256(Path(entry.path)) for entry in [*recipe.data.train, *listed]}
    held_out = read_split(recipe, listed, tokenizer) if listed else None
    train = read_split(recipe, recipe.data.train, tokenizer) if needs_train or fraction else None
    if train is not None and fraction and not train.faults:
        train, held_out = split_fraction(train, fraction, recipe.train.seed)
    return train, held_out, files


def read_split(recipe: Recipe, entries: Sequence[TrainSource], tokenizer: Any) -> Split:
    """Read and tokenize the files of one list of sources, as the recipe says.

    Args:
        recipe: Gives template, mask and length.
        entries: Sources of training or of validation.
        tokenizer: A fast tokenizer.

    Returns:
        The examples with every fault; nothing is raised for a bad row.
    """
    sources = [
        Source(
            path=Path(entry.path),
            format=entry.format,
            name=entry.name,
            exact_match=entry.exact_match if isinstance(entry, ValidationSource) else False,
        )
        for entry in entries
    ]
    data = recipe.data
    return prepare(
        sources, tokenizer, loss_on=data.loss_on, max_seq_len=data.max_seq_len, overlong=data.overlong
    )


def template_of(recipe: Recipe) -> str | None:
    """Text of the chat template file that the recipe names, None where the tokenizer's own is used."""
    path = recipe.data.chat_template
    return Path(path).read_text("utf-8") if path else None


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

    Free to change are the length of the run, its intervals, and everything under `optimizer.paging`, none of
    which alters what a step computes.
    """
    recipe = inputs.loaded.recipe
    flat = dict(_flatten(recipe.model_dump(mode="json", exclude={"data": {"train", "validation"}})))
    kept = {
        k: v for k, v in flat.items() if k not in FREE_ON_RESUME and not k.startswith("optimizer.paging.")
    }
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
