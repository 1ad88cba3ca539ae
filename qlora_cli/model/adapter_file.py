"""Reads the files of an adapter folder; refuses adapters whose tensors are not the whole change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qlora_cli.errors import Fault, InputError
from qlora_cli.run_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, RECORD

# Config keys under which the trained function is not `W x + scaling * B A x` on the base as it is stored.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_qalora",
)
# Initialisations that also move the base's weights (peft 0.21, `LoraLayer.update_layer`).
_MOVES_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")


def read_config(folder: Path) -> dict[str, Any]:
    """Read `adapter_config.json`.

    Args:
        folder: An adapter folder.

    Returns:
        The config as it stands.

    Raises:
        InputError: If it is missing or unreadable, or the adapter is of a kind that cannot be merged.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        message = f"no `{ADAPTER_CONFIG}`, so this is no adapter folder"
        accepted = "a folder in PEFT format, as `qlora train` writes it"
        raise InputError(Fault("no-adapter", message, file=str(folder), accepted=accepted))
    config = _read_json(path)
    faults = list(_kind_faults(config, str(path)))
    if faults:
        raise InputError(faults)
    return config


def read_record(folder: Path) -> dict[str, Any] | None:
    """Read `qlora.json`, how the adapter was trained; None where another tool wrote the folder.

    Raises:
        InputError: If it is unreadable.
    """
    path = folder / RECORD
    return _read_json(path) if path.is_file() else None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read `adapter_model.safetensors`.

    Args:
        folder: An adapter folder.

    Returns:
        Every tensor by its key; at least one.

    Raises:
        InputError: If the file is missing, unreadable or holds no tensor.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        hint = None
        if (folder / "adapter_model.bin").is_file():
            hint = "`adapter_model.bin` can run code when read; load it where you trust it and save it again"
        raise InputError(Fault("no-adapter", f"no `{ADAPTER_WEIGHTS}`", file=str(folder), hint=hint))
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        message = f"`{ADAPTER_WEIGHTS}` is not readable: {error}"
        raise InputError(Fault("unreadable-tensors", message, file=str(path))) from error
    if not tensors:
        message = f"`{ADAPTER_WEIGHTS}` holds no tensors"
        hint = "such files come out of a save that filtered every key away; save the adapter again"
        raise InputError(Fault("empty-adapter", message, file=str(path), hint=hint))
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        message = f"not readable as JSON: {error}"
        raise InputError(Fault("unreadable-json", message, file=str(path))) from error
    if not isinstance(document, dict):
        raise InputError(Fault("unreadable-json", "holds no JSON object", file=str(path)))
    return document


def _kind_faults(config: Mapping[str, Any], file: str) -> Iterator[Fault]:
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        message = f"`peft_type` is `{kind}`"
        yield Fault("adapter-kind", message, file=file, key="peft_type", accepted="LORA")
    for key in _UNSUPPORTED:
        if config.get(key):
            message = f"`{key}` is set; an adapter of this kind cannot be merged"
            yield Fault("adapter-kind", message, file=file, key=key)
    init = str(config.get("init_lora_weights", "")).lower()
    if init.startswith(_MOVES_BASE):
        message = f"`init_lora_weights` is `{init}`, which moved the base's weights before training"
        hint = "save it with peft's `path_initial_model_for_weight_conversion`, which makes plain LoRA of it"
        yield Fault("adapter-kind", message, file=file, key="init_lora_weights", hint=hint)
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), int | float):
            message = f"`{key}` is `{config.get(key)}`"
            yield Fault("adapter-config", message, file=file, key=key, accepted="a number")
