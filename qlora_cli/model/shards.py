"""Writes safetensors shards one tensor at a time, so that a model of any size needs memory for one tensor.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header with
dtype, shape and byte range of each tensor, then the bytes. All of the header is known from the plan before a
value is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # what transformers and the hub split at for files that load piecewise

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def plan_shards(tensors: Sequence[Planned], max_bytes: int = SHARD_BYTES) -> dict[str, list[Planned]]:
    """Spread tensors over files, in order; a tensor larger than `max_bytes` gets a file of its own.

    Args:
        tensors: All tensors of the model.
        max_bytes: Bytes of values in one file.

    Returns:
        Tensors by file name; `model.safetensors` when there is one file. Within a file wider dtypes come
        first, so that every tensor starts at a multiple of its item size.
    """
    groups: list[list[Planned]] = [[]]
    used = 0
    for tensor in tensors:
        if groups[-1] and used + tensor.num_bytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += tensor.num_bytes
    ordered = [sorted(group, key=lambda tensor: -tensor.dtype.itemsize) for group in groups]
    if len(ordered) == 1:
        return {"model.safetensors": ordered[0]}
    return {f"model-{i:05d}-of-{len(ordered):05d}.safetensors": group for i, group in enumerate(ordered, 1)}


def write_shards(
    folder: Path,
    shards: dict[str, list[Planned]],
    value_of: Callable[[str], Tensor],
    on_shard: Callable[[int, int, str], None] | None = None,
) -> None:
    """Write every shard, and the index where there is more than one.

    Args:
        folder: An existing folder.
        shards: As planned.
        value_of: Computes a tensor by name, with the dtype and shape that was planned; called once for each.
        on_shard: Called with (shards done, shards in all, file name) after each shard.
    """
    for done, (file_name, tensors) in enumerate(shards.items(), 1):
        with (folder / file_name).open("wb") as file:
            file.write(_header(tensors))
            for planned in tensors:
                value = value_of(planned.name).detach().to("cpu").contiguous()
                assert (value.dtype, tuple(value.shape)) == (planned.dtype, planned.shape), planned.name
                file.write(value.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        if on_shard is not None:
            on_shard(done, len(shards), file_name)
    if len(shards) > 1:
        weight_map = {tensor.name: file_name for file_name, group in shards.items() for tensor in group}
        total = sum(tensor.num_bytes for group in shards.values() for tensor in group)
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(document, indent=2) + "\n", "utf-8")


def _header(tensors: Sequence[Planned]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the values start 8-byte aligned
    return len(text).to_bytes(8, "little") + text


def shard_files(folder: Path) -> Iterator[Path]:
    """The safetensors files of a whole model folder: those of its index, else `model.safetensors`."""
    index = folder / INDEX
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        yield from (folder / name for name in dict.fromkeys(weight_map.values()))
    else:
        yield folder / "model.safetensors"
