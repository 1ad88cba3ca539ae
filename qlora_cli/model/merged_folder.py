"""What of a merged folder is not weights: config, tokenizer, generation config, card; and its atomic birth.

The folder is filled beside its final name and renamed, so that what stands under the name is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qlora_cli.errors import Fault, InputError, RunError
from qlora_cli.model.base_files import BaseFiles
from qlora_cli.run_folder import flush

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_TOKENIZER_FILES = (
    *_TOKENIZERS,
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_TEMPLATE_FOLDER = "additional_chat_templates"
_SPARE_BYTES = 64 << 20  # config, tokenizer, card, and what the file system keeps for itself


def check_output(output: Path, num_bytes: int) -> None:
    """Refuse an output that is taken, and one for which there is no room.

    Args:
        output: The folder to be written.
        num_bytes: Bytes of the weights that will go into it.

    Raises:
        InputError: If there is a file of that name or a folder that is not empty.
        RunError: If the file system has too little space left, or the place cannot be written.
    """
    if (
        output.is_symlink()
        or (output.exists() and not output.is_dir())
        or (output.is_dir() and any(output.iterdir()))
    ):
        message = f"`{output}` exists and is not an empty folder; nothing was overwritten"
        hint = "choose another name with `--output`"
        raise InputError(Fault("output-exists", message, file=str(output), hint=hint))
    existing = next(parent for parent in output.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise RunError(
            Fault("not-writable", f"`{existing}` is not a folder that can be written", file=str(output))
        )
    free = shutil.disk_usage(existing).free
    if free < num_bytes + _SPARE_BYTES:
        message = f"no space: the merged model takes {_mib(num_bytes)} MiB and {_mib(free)} MiB are free"
        raise RunError(
            Fault("no-space", message, file=str(output), hint="`--output` on another disk has the space")
        )


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // (1 << 20)):,}"


@contextmanager
def appearing(output: Path) -> Iterator[Path]:
    """Fill a folder that takes its name only when the block is left without an exception.

    Args:
        output: Final name; nothing or an empty folder is there.

    Yields:
        An empty folder beside it. What a crash left there before is removed.
    """
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            flush(path)
        if output.is_dir():
            output.rmdir()
        partial.rename(output)
        flush(output.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        message = f"could not be written: {error.strerror or error}"
        raise RunError(Fault("not-writable", message, file=str(output))) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def merged_config(base: BaseFiles, dtype: torch.dtype, num_tokens: int, tied: bool | None) -> dict[str, Any]:
    """The merged model's `config.json`.

    Args:
        base: The base's files.
        dtype: Dtype of the merged weights.
        num_tokens: Rows of the merged embedding.
        tied: Whether embedding and head share their values; None: no head, leave the config alone.

    Returns:
        The base's config, without a quantisation, with dtype, vocabulary size and tie as they are now.
    """
    config: dict[str, Any] = json.loads(json.dumps(base.config))
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    for part in {id(p): p for p in (config, text)}.values():
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = str(dtype).removeprefix("torch.")
        if tied is not None and "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = tied
    if not {"dtype", "torch_dtype"} & set(config):
        config["dtype"] = str(dtype).removeprefix("torch.")
    if tied is not None and "tie_word_embeddings" not in text:
        config["tie_word_embeddings"] = tied
    if num_tokens != base.shapes[base.layout.embedding][0]:
        text["vocab_size"] = num_tokens
    return config


def find_tokenizer(adapter_folder: Path, base_folder: Path) -> Path:
    """The folder whose tokenizer belongs to the merged model: the adapter's where it has one.

    Raises:
        InputError: If neither has one.
    """
    for folder in (adapter_folder, base_folder):
        if any((folder / name).is_file() for name in _TOKENIZERS):
            return folder
    message = "neither the adapter's folder nor the base's has a tokenizer"
    hint = "save the tokenizer that was trained with into the adapter's folder"
    raise InputError(Fault("no-tokenizer", message, file=str(adapter_folder), hint=hint))


def copy_companions(output: Path, adapter_folder: Path, base: BaseFiles) -> None:
    """Copy tokenizer, chat template, generation config, licences and model code.

    The chat template is the adapter's wherever it has one: it is what was trained with.
    """
    source = find_tokenizer(adapter_folder, base.folder)
    for name in _TOKENIZER_FILES:
        _copy(source / name, output)
    for folder in (source, adapter_folder):
        for name in _TEMPLATES:
            _copy(folder / name, output)
    if not _has_template(output):
        for name in _TEMPLATES:
            _copy(base.folder / name, output)
    if (source / _TEMPLATE_FOLDER).is_dir():
        shutil.copytree(source / _TEMPLATE_FOLDER, output / _TEMPLATE_FOLDER)
    own = adapter_folder / "generation_config.json"
    _copy(own if own.is_file() else base.folder / "generation_config.json", output)
    for pattern in ("LICENSE*", "NOTICE*", "*.py"):
        for path in sorted(base.folder.glob(pattern)):
            _copy(path, output)


def _copy(path: Path, folder: Path) -> None:
    if path.is_file():
        shutil.copyfile(path, folder / path.name)


def _has_template(folder: Path) -> bool:
    """Whether a chat template stands in a file of its own or in the tokenizer's config."""
    if any((folder / name).is_file() for name in _TEMPLATES):
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(json.loads(path.read_text("utf-8")).get("chat_template"))


def check_tokenizer(folder: Path, num_tokens: int, trust_remote_code: bool) -> None:
    """Load the tokenizer and compare it with the embedding.

    Args:
        folder: Where its files are.
        num_tokens: Rows of the merged embedding.
        trust_remote_code: Whether code that comes with it may run.

    Raises:
        InputError: If it does not load, or has a token without a row.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        highest = max(tokenizer.get_vocab().values(), default=-1)
    except (OSError, ValueError, KeyError, ImportError) as error:
        message = f"the tokenizer does not load: {str(error).splitlines()[0]}"
        raise InputError(Fault("no-tokenizer", message, file=str(folder))) from error
    if highest >= num_tokens:
        message = f"the tokenizer's highest token is {highest} but the embedding has {num_tokens} rows"
        hint = "tokens were added without saving the embedding; name it and the head in `modules_to_save`"
        raise InputError(Fault("tokenizer-mismatch", message, file=str(folder), hint=hint))


def write_card(folder: Path, base_name: str, base_id: str | None, facts: Sequence[tuple[str, str]]) -> None:
    """Write README.md: where the model comes from and how the merge was checked.

    Args:
        folder: The merged folder.
        base_name: What to call the base in the text.
        base_id: The base's hub id, or None where it is a folder.
        facts: Rows of the table: what, value.
    """
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    front += [f"base_model: {base_id}"] if base_id else []
    front += ["tags: [lora, qlora]", "---"]
    rows = [f"| {what} | {value} |" for what, value in facts]
    body = [
        f"# {base_name}, fine-tuned",
        "",
        "A LoRA adapter merged into its base model by `qlora merge`. It loads with",
        "`AutoModelForCausalLM.from_pretrained`; tokenizer and template are those it was trained with.",
        "",
        "| | |",
        "|---|---|",
        *rows,
    ]
    (folder / "README.md").write_text("\n".join([*front, "", *body, ""]), "utf-8")


def versions(names: Sequence[str]) -> Mapping[str, str]:
    """Installed versions of packages, for the card."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
