"""The base model as files: where its tensors lie, which are tied, which are stored transposed.

What the files alone do not say (ties, the kind of each layer, which layers a quantised load replaces) comes
from the model built on the meta device from its config, so that it is the same as what transformers would
load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from qlora_cli.errors import Fault, InputError
from qlora_cli.model.base_checks import check_folder, check_weights, is_local, reading_hub
from qlora_cli.model.load import read_model_config
from qlora_cli.model.names import empty_model, linear_names
from qlora_cli.model.quiet import quiet
from qlora_cli.model.shards import DTYPES, shard_files

_WANTED = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "README.md",
]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the base as it lies on disk."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """What the architecture says about the tensors.

    Attributes:
        ties: Tensor name -> the name it shares its values with, as the config asks for it.
        embedding: Tensor of the input embedding.
        head: Tensor of the output head, or None.
        transposed: Modules whose weight is stored (in, out): GPT-2's Conv1D.
        linears: Modules that a quantised load replaces by default.
    """

    ties: Mapping[str, str]
    embedding: str
    head: str | None
    transposed: frozenset[str]
    linears: tuple[str, ...]


@dataclass(frozen=True)
class BaseFiles:
    """A base model on disk.

    Attributes:
        folder: Where its files are.
        name: What the user calls it: the folder or the hub id.
        config: Its `config.json`.
        tensors: Every stored tensor by name, in file order.
        ties: Tensor names that have no file of their own -> the stored tensor they equal.
        layout: What the architecture says.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    ties: Mapping[str, str]
    layout: Layout

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point dtype that most of the values are stored in."""
        counts: dict[torch.dtype, int] = {}
        for stored in self.tensors.values():
            if stored.dtype.is_floating_point:
                counts[stored.dtype] = counts.get(stored.dtype, 0) + torch.Size(stored.shape).numel()
        return max(counts, key=lambda dtype: counts[dtype])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, tied ones under each of their names."""
        own = {name: stored.shape for name, stored in self.tensors.items()}
        return own | {name: own[source] for name, source in self.ties.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor; a tied name gives the tensor it is tied to."""
        name = self.ties.get(name, name)
        with safe_open(self.tensors[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def open_base(name: str, revision: str | None, trust_remote_code: bool) -> BaseFiles:
    """Find a base model and list its tensors.

    Args:
        name: A folder, or a hub id.
        revision: Branch, tag or commit on the hub; None for the default branch.
        trust_remote_code: Whether code that comes with the model may run.

    Returns:
        The base; no weight was read except to compare two tied tensors that are both stored.

    Raises:
        InputError: If the base is not there, is an adapter, is quantised, has no safetensors weights, or a
            file of it is missing or unreadable.
    """
    folder = _find(name, revision)
    config = _read_config(folder)
    tensors = _list_tensors(folder)
    layout = _read_layout(folder, trust_remote_code)
    base = BaseFiles(folder, name, config, tensors, {}, layout)
    ties = {}
    for target, source in layout.ties.items():
        if target in tensors and source in tensors:
            # transformers ties two stored tensors only where they are equal (`tie_weights`)
            if torch.equal(base.read(target), base.read(source)):
                ties[target] = source
        elif source in tensors:
            ties[target] = source
        elif target in tensors:
            ties[source] = target
    stored = {tensor: at for tensor, at in tensors.items() if tensor not in ties}
    return BaseFiles(folder, name, config, stored, ties, layout)


def _find(name: str, revision: str | None) -> Path:
    if is_local(name):
        folder = Path(name).expanduser()
        if not folder.is_dir():
            hint = "`--base-path FOLDER` says where the base is now"
            raise InputError(Fault("base-not-found", f"the base `{name}` is no folder here", hint=hint))
        return folder
    with quiet(), reading_hub(name, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=_WANTED))


def _read_config(folder: Path) -> dict[str, Any]:
    check_folder(str(folder))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise InputError(
            Fault(
                "base-is-quantised",
                f"the base is stored quantised ({method}); merging needs its 16- or 32-bit weights",
                file=str(folder / "config.json"),
                hint="`--base-path FOLDER` names the original",
            )
        )
    return config


def _list_tensors(folder: Path) -> dict[str, Stored]:
    check_weights(folder)
    tensors: dict[str, Stored] = {}
    for path in shard_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no iterator
                piece = file.get_slice(name)
                tensors[name] = Stored(path, DTYPES[piece.get_dtype()], tuple(piece.get_shape()))
    return tensors


def _read_layout(folder: Path, trust_remote_code: bool) -> Layout:
    model = empty_model(read_model_config(str(folder), None, trust_remote_code))
    names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
    head = model.get_output_embeddings()
    return Layout(
        ties=dict(model.all_tied_weights_keys),
        embedding=f"{names[model.get_input_embeddings()]}.weight",
        head=f"{names[head]}.weight" if head is not None else None,
        transposed=frozenset(name for name, module in model.named_modules() if isinstance(module, Conv1D)),
        linears=tuple(linear_names(model)),
    )
