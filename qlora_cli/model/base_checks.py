"""What can be wrong with a base before its weights are read, each as a fault in words a user can act on.

A base is a folder in the layout of `save_pretrained` (config.json and safetensors) or an id on the hub. The
libraries underneath report most of these faults as a long `OSError` or a traceback, some not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from qlora_cli.errors import Fault, InputError
from qlora_cli.model.shards import INDEX
from qlora_cli.run_folder import ADAPTER_CONFIG

KEY = "model.name_or_path"
ACCEPTED = "a folder with config.json and safetensors weights, or a hub id"
WEIGHTS = "model.safetensors"


def is_local(name_or_path: str) -> bool:
    """Whether a base means a folder rather than a hub id.

    Args:
        name_or_path: As the recipe gives it.
    """
    return name_or_path.startswith((".", "/", "~")) or Path(name_or_path).exists()


def check_folder(name_or_path: str) -> Path:
    """Check that a folder holds a model config.

    Args:
        name_or_path: A path.

    Returns:
        The folder.

    Raises:
        InputError: If it is missing, an adapter, a GGUF, or has no readable config.json.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.exists():
        raise _wrong("base-not-found", f"the base `{name_or_path}` does not exist", accepted=ACCEPTED)
    if folder.suffix == ".gguf" or (folder.is_dir() and _has_only_gguf(folder)):
        hint = "name the safetensors model that the GGUF was made from"
        raise _wrong(
            "base-is-gguf", f"the base `{name_or_path}` is a GGUF, which holds no trainable layout", hint=hint
        )
    if not folder.is_dir():
        raise _wrong(
            "base-not-found", f"the base `{name_or_path}` is a file, not a folder", accepted=ACCEPTED
        )
    path = folder / "config.json"
    if not path.is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            raise _is_adapter(name_or_path, folder)
        raise _wrong("base-not-found", f"the base `{name_or_path}` has no `config.json`", accepted=ACCEPTED)
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            Fault("unreadable-json", f"not readable as JSON: {error}", file=str(path))
        ) from error
    if not isinstance(document, dict):
        raise InputError(Fault("unreadable-json", "holds no JSON object", file=str(path)))
    return folder


def check_weights(folder: Path) -> None:
    """Check that every weight file of a base is there and whole; only headers are read.

    Args:
        folder: The base.

    Raises:
        InputError: With every file that is missing, cut short or not safetensors.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if index.is_file():
        try:
            named: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"not readable as an index of shards: {error}"
            raise InputError(Fault("unreadable-json", message, file=str(index))) from error
        shards = {
            name: {t for t, file in named.items() if file == name} for name in sorted(set(named.values()))
        }
    elif single.is_file():
        shards = {WEIGHTS: set()}
    else:
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        message = f"the base `{folder}` has no safetensors weights"
        hint = None
        if pickled:
            message += f", only `{pickled[0]}`, which can run code when read"
            hint = "load it in transformers where you trust it and save it again with `save_pretrained`"
        raise _wrong("no-safetensors", message, accepted=ACCEPTED, hint=hint)
    faults = [fault for name, tensors in shards.items() if (fault := _shard_fault(folder / name, tensors))]
    if faults:
        raise InputError(faults)


def _shard_fault(path: Path, tensors: set[str]) -> Fault | None:
    """What is wrong with one weight file; `tensors` must be in it."""
    hint = "copy or download the model again"
    if not path.is_file():
        return Fault(
            "base-incomplete", "the index names this file, which is not there", file=str(path), hint=hint
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            absent = sorted(tensors - set(file.keys()))
    except (SafetensorError, OSError) as error:
        message = f"not readable as safetensors, so it is cut short or damaged: {error}"
        return Fault("unreadable-tensors", message, file=str(path), hint=hint)
    if not absent:
        return None
    message = f"lacks {len(absent)} tensors that the index places in it, `{absent[0]}` first"
    return Fault("base-incomplete", message, file=str(path), hint=hint)


@contextmanager
def reading_hub(name_or_path: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub client raises in the block into an `InputError` that says what happened.

    Args:
        name_or_path: What is read.
        revision: Branch, tag or commit, None for the default branch.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if is_local(name_or_path):
            raise
        raise InputError(_hub_fault(name_or_path, revision, error)) from error


def _hub_fault(name: str, revision: str | None, error: BaseException) -> Fault:
    """Say in words which of the hub client's errors stands at the root of `error`."""
    kinds = set()
    cause: BaseException | None = error
    while cause is not None:
        kinds |= {kind.__name__ for kind in type(cause).__mro__}
        cause = cause.__cause__ or cause.__context__
    nowhere = f"the base `{name}` is no folder here"
    if "GatedRepoError" in kinds:
        hint = "accept its terms on its page, then `hf auth login`"
        return Fault("base-gated", f"the base `{name}` is gated on the hub", key=KEY, hint=hint)
    if "RevisionNotFoundError" in kinds:
        message = f"the base `{name}` has no revision `{revision}` on the hub"
        return Fault(
            "revision-not-found", message, key="model.revision", accepted="a branch, a tag or a commit"
        )
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        hint = "a private model needs `hf auth login`"
        return Fault(
            "base-not-found", f"{nowhere} and no model on the hub", key=KEY, accepted=ACCEPTED, hint=hint
        )
    if kinds & {
        "OfflineModeIsEnabled",
        "LocalEntryNotFoundError",
        "ConnectionError",
        "ConnectError",
        "Timeout",
    }:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
        reason = (
            "the hub is not asked, since HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        )
        message = f"{nowhere} and not in the hub's cache, and {reason}"
        return Fault("hub-unreachable", message, key=KEY, accepted=ACCEPTED)
    if "EntryNotFoundError" in kinds:
        message = f"the base `{name}` has no `config.json` on the hub"
        return Fault("base-not-found", message, key=KEY, accepted=ACCEPTED)
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return Fault("base-unreadable", f"the base `{name}` cannot be read: {first}", key=KEY, accepted=ACCEPTED)


def check_architecture(name_or_path: str, document: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Check that transformers knows the kind of model, or may run the code that comes with it.

    Args:
        name_or_path: The base.
        document: Its config.json.
        trust_remote_code: Whether that code may run.

    Raises:
        InputError: If it does not.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = document.get("model_type")
    if kind in CONFIG_MAPPING_NAMES or (document.get("auto_map") and trust_remote_code):
        return
    if document.get("auto_map"):
        message = (
            f"the base `{name_or_path}` is a `{kind}` model and comes with its own code, which was not run"
        )
        hint = "read that code, then set `model: {trust_remote_code: true}`"
        raise InputError(Fault("needs-remote-code", message, key="model.trust_remote_code", hint=hint))
    if not kind:
        raise _wrong("unknown-architecture", f"the config.json of `{name_or_path}` names no `model_type`")
    import transformers

    known = f"which transformers {transformers.__version__} does not know"
    message = f"the base `{name_or_path}` is a `{kind}` model, {known}"
    raise _wrong("unknown-architecture", message, hint="a newer transformers may know it")


def check_quantization(
    name_or_path: str, document: Mapping[str, Any], scheme: str, double_quant: bool
) -> bool:
    """Check a base that is stored quantised: bitsandbytes' 4-bit is loaded as it is, anything else refused.

    Args:
        name_or_path: The base.
        document: Its config.json.
        scheme: `nf4`, `fp4` or `none`, as the recipe asks.
        double_quant: As the recipe asks.

    Returns:
        Whether the base is stored in 4-bit.

    Raises:
        InputError: If it is quantised in another way than the recipe says.
    """
    stored = document.get("quantization_config")
    if not stored:
        return False
    is_4bit = bool(stored.get("load_in_4bit") or stored.get("_load_in_4bit"))
    method = stored.get("quant_method") or ("bitsandbytes" if is_4bit else "an unnamed method")
    if method != "bitsandbytes" or not is_4bit:
        kind = "bitsandbytes 8-bit" if method == "bitsandbytes" else f"`{method}`"
        hint = "name the original in 16 or 32 bits; it is quantised while it is loaded"
        message = f"the base `{name_or_path}` is stored quantised with {kind}"
        raise _wrong(
            "base-is-quantised", message, accepted="16- or 32-bit weights, or bitsandbytes 4-bit", hint=hint
        )
    found = (stored.get("bnb_4bit_quant_type", "fp4"), bool(stored.get("bnb_4bit_use_double_quant", False)))
    if found == (scheme, double_quant):
        return True
    message = (
        f"the base `{name_or_path}` is stored in 4-bit as {found[0]}, double_quant {str(found[1]).lower()};"
        f" the recipe asks for {scheme}, double_quant {str(double_quant).lower()}"
    )
    hint = f"write `quantization: {{scheme: {found[0]}, double_quant: {str(found[1]).lower()}}}`"
    raise InputError(Fault("base-is-quantised", message, key="model.quantization", hint=hint))


def _has_only_gguf(folder: Path) -> bool:
    return not (folder / "config.json").is_file() and any(folder.glob("*.gguf"))


def _is_adapter(name_or_path: str, folder: Path) -> InputError:
    """The fault of an adapter given as a base, naming the adapter's own base where it says so."""
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    own = f" `{base}`" if base else " its base"
    hint = f"name{own} here, and the adapter under `lora: {{continue_from: ...}}` to train it further"
    message = f"the base `{name_or_path}` is an adapter, not a model"
    return _wrong("base-is-adapter", message, accepted=ACCEPTED, hint=hint)


def _wrong(code: str, message: str, accepted: str | None = None, hint: str | None = None) -> InputError:
    return InputError(Fault(code, message, key=KEY, accepted=accepted, hint=hint))
