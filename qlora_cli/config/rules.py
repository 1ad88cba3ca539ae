"""Rules between keys, one function a rule: what the schema cannot say about a single key.

A rule looks keys up by their dotted names and yields faults. Where a key it asks for is faulty itself the
rule is left out, so rules run on every recipe and one run of the program shows all faults. Rules about the
machine are in `resolve`. This module must not know YAML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from qlora_cli.config import paths
from qlora_cli.config.schema import Recipe
from qlora_cli.errors import Fault

_SECOND = "remove one of the two"


class _NotJudged(Exception):
    """A key that a rule reads is faulty or missing."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The values of a recipe that may still have faults.

    Attributes:
        values: Nested values of the keys that were given.
        bad_keys: Dotted keys whose value was refused.
        fault: Makes a fault at a dotted key: code, key, message, accepted, hint.
        place: `file:line:column` of a dotted key.
    """

    values: dict[str, Any]
    bad_keys: frozenset[str]
    fault: Callable[..., Fault]
    place: Callable[[str], str]

    def __getitem__(self, key: str) -> Any:
        """The value of a dotted key, its default where it is not given.

        Raises:
            _NotJudged: If the value was refused, or is required and missing.
        """
        value: Any = self.values
        model: type[BaseModel] = Recipe
        names = key.split(".")
        for depth, name in enumerate(names):
            if ".".join(names[: depth + 1]) in self.bad_keys:
                raise _NotJudged
            info = model.model_fields[name]
            value = value.get(name) if isinstance(value, dict) else None
            if value is None and not info.is_required():
                value = info.get_default()
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                model = info.annotation
                value = dict(value) if isinstance(value, BaseModel) else value
        return value

    def is_given(self, key: str) -> bool:
        """Whether somebody wrote the key with a value other than null."""
        value: Any = self.values
        for name in key.split("."):
            if not isinstance(value, dict) or value.get(name) is None:
                return False
            value = value[name]
        return True


def check(keys: Keys, with_files: bool) -> list[Fault]:
    """Apply every rule.

    Args:
        keys: The values.
        with_files: Whether files and folders that are named have to exist.
    """
    faults: list[Fault] = []
    for rule in _RULES + (_FILE_RULES if with_files else ()):
        try:
            faults += rule(keys)
        except _NotJudged:
            continue
    return faults


def _epochs_or_steps(keys: Keys) -> Iterator[Fault]:
    if keys["train.epochs"] is not None and keys["train.max_steps"] is not None:
        message = f"`train.max_steps` and `train.epochs` ({keys.place('train.epochs')}) are both given"
        yield keys.fault("conflicting-keys", "train.max_steps", message, hint=_SECOND)


def _bits_of_alias(keys: Keys) -> Iterator[Fault]:
    name, bits = keys["optimizer.name"], keys["optimizer.state_bits"]
    if keys.is_given("optimizer.name") and bits is not None and bits_of(name) not in (None, bits):
        message = f"`optimizer.state_bits` is `{bits}`, but `name: {name}` has {bits_of(name)}"
        yield keys.fault("conflicting-keys", "optimizer.state_bits", message, hint=_SECOND)


def _budget_of_resident(keys: Keys) -> Iterator[Fault]:
    budget = keys["optimizer.paging.vram_budget_mib"]
    if keys["optimizer.paging.backend"] == "resident" and budget != "auto":
        message = f"`optimizer.paging.vram_budget_mib` is `{budget}`, but `backend: resident` pages nothing"
        yield keys.fault("conflicting-keys", "optimizer.paging.vram_budget_mib", message, accepted="auto",
                         hint="remove it, or set `backend: host`")  # fmt: skip


def _decay_of_wsd(keys: Keys) -> Iterator[Fault]:
    name, decay, warmup = keys["schedule.name"], keys["schedule.decay_ratio"], keys["schedule.warmup_ratio"]
    if name != "wsd" and decay != Recipe.model_fields["schedule"].get_default().decay_ratio:
        message = f"`schedule.decay_ratio` is `{decay}`, but `name: {name}` does not read it"
        yield keys.fault("conflicting-keys", "schedule.decay_ratio", message,
                         hint="remove it, or set `name: wsd`")  # fmt: skip
    if name == "wsd" and decay + warmup > 1:
        message = f"`schedule.decay_ratio` {decay} and `schedule.warmup_ratio` {warmup} are more than the run"
        yield keys.fault("conflicting-keys", "schedule.decay_ratio", message, accepted="a sum of 1 or less")


def _evaluation_of_nothing(keys: Keys) -> Iterator[Fault]:
    every, prompts = keys["train.eval_every_steps"], keys["train.sample_prompts"]
    validation = keys["data.validation"]
    if every is not None and not prompts and (validation is None or validation == {"fraction": 0.0}):
        message = f"`train.eval_every_steps` is `{every}`, but there is nothing to evaluate"
        yield keys.fault("conflicting-keys", "train.eval_every_steps", message,
                         hint="give `data.validation` or `train.sample_prompts`, or remove it")  # fmt: skip


def _skipped_of_unquantized(keys: Keys) -> Iterator[Fault]:
    if keys["model.quantization.scheme"] == "none" and keys["model.quantization.skip_modules"]:
        message = "`model.quantization.skip_modules` is given, but `scheme: none` quantizes nothing"
        yield keys.fault("conflicting-keys", "model.quantization.skip_modules", message, hint="remove it")


def _target_expression(keys: Keys) -> Iterator[Fault]:
    targets = keys["lora.target_modules"]
    if not isinstance(targets, str):
        return
    if re.fullmatch(r"\w+(\s*,\s*\w+)+", targets):
        names = ", ".join(name.strip() for name in targets.split(","))
        yield keys.fault("wrong-type", "lora.target_modules", "`lora.target_modules` is one text with commas",
                         accepted="all-linear, a list of names or one regular expression",
                         hint=f"write `target_modules: [{names}]`")  # fmt: skip
        return
    try:
        re.compile(targets)
    except re.error as error:
        message = f"`lora.target_modules` is no regular expression: {error}"
        yield keys.fault("bad-expression", "lora.target_modules", message,
                         hint="names are given as a list: `[q_proj, v_proj]`")  # fmt: skip


def _names_of_sources(keys: Keys) -> Iterator[Fault]:
    for key in ("data.train", "data.validation"):
        sources = keys[key]
        seen: dict[str, int] = {}
        for index, source in enumerate(sources if isinstance(sources, tuple) else ()):
            name = source.get("name") if isinstance(source, dict) else None
            if name in seen:
                first = keys.place(f"{key}.{seen[name]}.name")
                message = f"`{key}` has two sources named `{name}`, the first at {first}"
                yield keys.fault(
                    "conflicting-keys", f"{key}.{index}.name", message, hint="name them differently"
                )
            elif name is not None:
                seen[name] = index


def _data_files(keys: Keys) -> Iterator[Fault]:
    for key in ("data.train", "data.validation"):
        sources = keys.values.get("data", {}).get(key.rpartition(".")[2])
        for index, source in enumerate(sources if isinstance(sources, tuple) else ()):
            path = source.get("path") if isinstance(source, dict) else None
            problem = paths.file_problem(path) if path is not None else None
            if problem is not None:
                yield keys.fault("data-unreadable", f"{key}.{index}.path", f"data file `{path}` {problem}",
                                 hint="a path counts from the file that names it")  # fmt: skip


def _template_file(keys: Keys) -> Iterator[Fault]:
    path: Path | None = keys["data.chat_template"]
    problem = paths.file_problem(path) if path is not None else None
    if problem is not None:
        yield keys.fault("template-unreadable", "data.chat_template", f"chat template `{path}` {problem}",
                         hint="it is the path of a .jinja file; null takes the tokenizer's own")  # fmt: skip


def _adapter_folder(keys: Keys) -> Iterator[Fault]:
    path: Path | None = keys["lora.continue_from"]
    problem = paths.folder_problem(path) if path is not None else None
    if problem is not None:
        yield keys.fault("adapter-unreadable", "lora.continue_from", f"adapter `{path}` {problem}")


def _model_text(keys: Keys) -> Iterator[Fault]:
    place = keys["model.name_or_path"]
    if place is not None and not paths.is_unicode(place):
        message = f"model `{place}` is not UTF-8, which model libraries need"
        yield keys.fault("model-missing", "model.name_or_path", message)


def _model_folder(keys: Keys) -> Iterator[Fault]:
    place = keys["model.name_or_path"]
    if place is None or not paths.is_unicode(place):
        return
    problem = paths.model_problem(place)
    if problem is not None:
        yield keys.fault("model-missing", "model.name_or_path", f"model `{place}` {problem}",
                         accepted="a model folder, or a hub id such as `owner/name`")  # fmt: skip


def bits_of(name: str) -> int | None:
    """The `state_bits` that an optimizer's name says, None where it leaves them open."""
    return {"paged_adamw_8bit": 8, "paged_adamw_32bit": 32}.get(name)


_RULES: tuple[Callable[[Keys], Iterator[Fault]], ...] = (
    _epochs_or_steps,
    _bits_of_alias,
    _budget_of_resident,
    _decay_of_wsd,
    _evaluation_of_nothing,
    _skipped_of_unquantized,
    _target_expression,
    _names_of_sources,
    _model_text,
)
_FILE_RULES: tuple[Callable[[Keys], Iterator[Fault]], ...] = (
    _data_files,
    _template_file,
    _adapter_folder,
    _model_folder,
)
