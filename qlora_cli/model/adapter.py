"""Reads a LoRA adapter in PEFT format, whoever wrote it, and says for every tensor what it does to the base.

Nothing is dropped: a tensor that is not understood, a pair without its other half, a rank that is not the
config's and a kind of adapter that is not plain weights on a plain base are faults, all of them reported at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qlora_cli.errors import Fault, InputError
from qlora_cli.model.adapter_file import read_config, read_record, read_tensors
from qlora_cli.model.adapter_keys import (
    Key,
    Role,
    is_expected,
    is_saved,
    is_target,
    locate,
    parse_keys,
    pattern_value,
)
from qlora_cli.run_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS


@dataclass(frozen=True, slots=True)
class Pair:
    """The low-rank change of one module: `scaling * b @ a`.

    Attributes:
        a: (rank, in_features); for an embedding (rank, num_embeddings).
        b: (out_features, rank); for an embedding (embedding_dim, rank).
        scaling: alpha / rank, with rsLoRA alpha / sqrt(rank).
        magnitude: (out_features,) length of each row after the change (DoRA), or None.
        bias: (out_features,) change of the bias before scaling (`lora_bias`), or None.
        is_embedding: Whether the change is transposed: an embedding's weight is (num_embeddings,
            embedding_dim).
    """

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None
    bias: Tensor | None = None
    is_embedding: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of an embedding that were trained; they replace the base's."""

    indices: tuple[int, ...]
    values: Tensor  # (len(indices), embedding_dim)


@dataclass(frozen=True)
class Adapter:
    """An adapter, each tensor with its meaning.

    Attributes:
        folder: Where it was read from.
        config: `adapter_config.json` as it stands.
        record: `qlora.json`, how it was trained, or None where another tool wrote the adapter.
        tensors: Every tensor of the file by its parsed key.
        pairs: Low-rank changes by module path.
        full: Trained tensors that replace the base's, by the base's tensor name.
        stored: The base's own tensors as they were below the adapter, stored because they were resized.
        rows: Rows that replace the base's, by the base's tensor name.
    """

    folder: Path
    config: Mapping[str, Any]
    record: Mapping[str, Any] | None
    tensors: Mapping[Key, Tensor] = field(repr=False)
    pairs: Mapping[str, Pair] = field(repr=False)
    full: Mapping[str, Tensor] = field(repr=False)
    stored: Mapping[str, Tensor] = field(repr=False)
    rows: Mapping[str, Rows] = field(repr=False)

    @property
    def base_name(self) -> str | None:
        """Folder or hub id of the base it was trained on, as far as it is recorded."""
        recorded = (self.record or {}).get("base", {}).get("name_or_path")
        return recorded or self.config.get("base_model_name_or_path") or None

    @property
    def revision(self) -> str | None:
        """Revision of the base on the hub, as far as it is recorded."""
        return (self.record or {}).get("base", {}).get("revision") or self.config.get("revision")

    @property
    def is_without_effect(self) -> bool:
        """Whether every change is zero, so that merging would return the base under a new name."""
        if self.full or self.stored or self.rows:
            return False
        return all(
            pair.magnitude is None
            and not pair.b.any().item()
            and (pair.bias is None or not pair.bias.any().item())
            for pair in self.pairs.values()
        )

    def canonical(self) -> dict[str, Tensor]:
        """The tensors under the keys that peft itself writes, each once."""
        trained = {key.tensor for key in self.tensors if key.role == "trained"}
        return {
            key.canonical: tensor
            for key, tensor in self.tensors.items()
            if not (key.role == "stored" and not key.below and key.tensor in trained)
        }


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter folder in PEFT format.

    Args:
        folder: Holds `adapter_config.json`, `adapter_model.safetensors` and, where we wrote it, `qlora.json`.

    Returns:
        The adapter; module paths are those of the file until `align` has seen the base.

    Raises:
        InputError: If a file is missing, unreadable or empty, the kind of adapter is not supported, or any
            tensor is not understood, incomplete, not finite, or of another rank than the config says.
    """
    config, record, loaded = read_config(folder), read_record(folder), read_tensors(folder)
    tensors = {key: loaded[key.text] for key in parse_keys(list(loaded))}
    faults = _file_faults(tensors, config, str(folder / ADAPTER_WEIGHTS))
    if faults:
        raise InputError(faults)
    return _sorted(folder, config, record, tensors, is_aligned=False)


def align(adapter: Adapter, shapes: Mapping[str, Sequence[int]]) -> Adapter:
    """Give every module the path that the base has for it, and check that the adapter is whole.

    Args:
        adapter: As read from its folder.
        shapes: Shape of every tensor of the base by name, tied ones under each of their names.

    Returns:
        The adapter with the base's paths; `rank_pattern` and `alpha_pattern` are applied to those.

    Raises:
        InputError: If a module is not in the base, or one that `target_modules` or `modules_to_save` names
            has no tensors.
    """
    modules = {name.rpartition(".")[0] for name in shapes}
    tensors: dict[Key, Tensor] = {}
    lost: list[str] = []
    for key, tensor in adapter.tensors.items():
        module = locate(key.module, modules)
        if module is None:
            lost.append(key.text)
        else:
            tensors[replace(key, module=module)] = tensor
    path = str(adapter.folder / ADAPTER_WEIGHTS)
    if lost:
        raise InputError(
            Fault(
                "unmatched-tensors",
                f"{_count(lost, 'adapter tensor')} match no module of the base: {_listed(lost)}",
                file=path,
                hint="is this the base that the adapter was trained on? `--base-path FOLDER` names another",
            )
        )
    aligned = _sorted(adapter.folder, adapter.config, adapter.record, tensors, is_aligned=True)
    matrices = sorted(
        n.removesuffix(".weight") for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2
    )
    absent = [m for m in matrices if is_target(m, adapter.config) and m not in aligned.pairs]
    absent += [m for m in matrices if is_saved(m, adapter.config) and f"{m}.weight" not in aligned.full]
    if absent:
        raise InputError(
            Fault(
                "missing-tensors",
                f"`{ADAPTER_CONFIG}` names {_count(absent, 'module')} without tensors: {_listed(absent)}",
                file=path,
                hint="the file is incomplete; save the adapter again",
            )
        )
    return aligned


def _file_faults(tensors: Mapping[Key, Tensor], config: Mapping[str, Any], path: str) -> list[Fault]:
    """What is wrong with the tensors one by one."""
    strange = [key.text for key in tensors if not is_expected(key, config)]
    broken = [key.text for key, tensor in tensors.items() if not _is_finite(tensor)]
    names = sorted({key.adapter_name for key in tensors if key.adapter_name})
    faults = []
    if strange:
        message = f"{_count(strange, 'tensor')} not understood: {_listed(strange)}"
        faults.append(Fault("unknown-tensors", message, file=path))
    if broken:
        message = f"{_count(broken, 'tensor')} with values that are not finite: {_listed(broken)}"
        faults.append(Fault("not-finite", message, file=path))
    if len(names) > 1:
        faults.append(Fault("several-adapters", f"holds several adapters: {', '.join(names)}", file=path))
    return faults


def _sorted(
    folder: Path,
    config: Mapping[str, Any],
    record: Mapping[str, Any] | None,
    tensors: Mapping[Key, Tensor],
    is_aligned: bool,
) -> Adapter:
    """Sort tensors into pairs, whole tensors and rows; ranks count only once the paths are the base's."""
    found: list[str] = []
    adapter = Adapter(
        folder,
        config,
        record,
        dict(tensors),
        _pairs(tensors, config, is_aligned, found.append),
        _whole("trained", tensors, found.append),
        _whole("stored", tensors, found.append),
        _rows(tensors, config, found.append),
    )
    if found:
        path = str(folder / ADAPTER_WEIGHTS)
        raise InputError([Fault("adapter-tensors", message, file=path) for message in found])
    return adapter


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _pairs(
    tensors: Mapping[Key, Tensor], config: Mapping[str, Any], is_aligned: bool, fault: Callable[[str], None]
) -> dict[str, Pair]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.role not in ("trained", "stored", "rows"):
            parts.setdefault(key.module, {})[key.role] = tensor
    pairs = {}
    for module, found in parts.items():
        is_embedding = "embedding_A" in found or "embedding_B" in found
        a = found.get("embedding_A" if is_embedding else "lora_A")
        b = found.get("embedding_B" if is_embedding else "lora_B")
        if a is None or b is None:
            fault(f"`{module}` has {', '.join(sorted(found))} but lacks lora_{'A' if a is None else 'B'}")
            continue
        rank = pattern_value(config.get("rank_pattern") or {}, module, config["r"])
        if not is_aligned:
            rank = a.shape[0]
        if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == rank:
            shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            fault(f"`{module}` has {shapes}, which is not rank {rank} as `{ADAPTER_CONFIG}` says")
            continue
        if config.get("use_dora") and "magnitude" not in found:
            fault(f"`{module}` has no `lora_magnitude_vector` though `use_dora` is set")
            continue
        scaling = _scaling(config, module, rank)
        pairs[module] = Pair(a, b, scaling, found.get("magnitude"), found.get("lora_B_bias"), is_embedding)
    return pairs


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """What `b @ a` is multiplied with; peft, `LoraLayer.update_layer`."""
    alpha = pattern_value(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _whole(role: Role, tensors: Mapping[Key, Tensor], fault: Callable[[str], None]) -> dict[str, Tensor]:
    """The tensors of one role by the base's name; the same tensor under two keys must be equal."""
    chosen: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key.role == role and not torch.equal(chosen.setdefault(key.tensor, tensor), tensor):
            fault(f"`{key.tensor}` is stored twice with different values")
    return chosen


def _rows(
    tensors: Mapping[Key, Tensor], config: Mapping[str, Any], fault: Callable[[str], None]
) -> dict[str, Rows]:
    rows = {}
    for key, values in tensors.items():
        if key.role != "rows":
            continue
        listed = config.get("trainable_token_indices") or ()
        if isinstance(listed, Mapping):
            own = [ids for name, ids in listed.items() if key.module.endswith(name)]
            # a head tied to the embedding stores the embedding's rows without being listed itself
            listed = own[0] if own else next(iter(listed.values()), ())
        if values.ndim != 2 or values.shape[0] != len(listed):
            named = f"{len(listed)} tokens in `trainable_token_indices`"
            fault(f"`{key.text}` has shape {list(values.shape)} for {named}")
            continue
        rows[key.tensor] = Rows(tuple(int(index) for index in listed), values)
    return rows


def _count(items: Collection[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _listed(items: Collection[str]) -> str:
    return ", ".join(f"`{item}`" for item in items)
