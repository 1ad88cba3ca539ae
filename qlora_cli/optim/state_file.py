"""`optimizer.safetensors`: all state of one optimizer on disk, keyed by parameter name.

Written and read one parameter at a time, so a checkpoint of a large state needs no second copy of it in
memory. The metadata says what wrote it; learning rate and the other scalars are the recipe's and not in it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_cli.optim.pages import BLOCK
from qlora_cli.optim.state_io import AREAS, MOMENTS, Moments, check_sizes

FORMAT = 1
KEY = "qlora_paged_adamw"


def write_file(
    path: Path,
    header: Mapping[str, Any],
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    bits: Sequence[int],
    read: Callable[[int], Moments],
) -> None:
    """Write `optimizer.safetensors` parameter by parameter, beside the target, then rename.

    Args:
        path: The file.
        header: What stands in its metadata under `qlora_paged_adamw`.
        names: Names of the parameters to write.
        shapes: Their shapes.
        bits: Their formats.
        read: Gives the state of the n-th of them; only one is held at a time.
    """
    index: dict[str, Any] = {"__metadata__": {KEY: json.dumps(header), "format": "pt"}}
    offset = 0
    for name, shape, form in zip(names, shapes, bits, strict=True):
        for area in AREAS[form]:
            dims = list(shape) if area in MOMENTS else [-(-math.prod(shape) // BLOCK)]
            dtype = "U8" if form == 8 and area in MOMENTS else "F32"
            length = math.prod(dims) * (1 if dtype == "U8" else 4)
            index[f"{name}.{area}"] = {
                "dtype": dtype,
                "shape": dims,
                "data_offsets": [offset, offset + length],
            }
            offset += length
    head = json.dumps(index, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for number, form in enumerate(bits):
            moments = read(number)
            for area in AREAS[form]:
                file.write(moments.tensors[area].numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class StateFile:
    """An `optimizer.safetensors` opened for reading; nothing is read before it is asked for."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its header.

        Args:
            path: The file.

        Raises:
            ValueError: If it is no safetensors file, was not written by this optimizer, or has a format this
                version does not know.
        """
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            file: Any = safe_open(str(path), framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file ({error})") from error
        self._file = file
        text = (file.metadata() or {}).get(KEY)
        if text is None:
            raise ValueError(f"{path} holds no state of PagedAdamW; its metadata has no {KEY}")
        self.header: dict[str, Any] = json.loads(text)
        if self.header.get("format") != FORMAT or self.header.get("block") != BLOCK:
            found = f"format {self.header.get('format')}, blocks of {self.header.get('block')}"
            raise ValueError(f"{path} has {found}; this version reads format {FORMAT}, blocks of {BLOCK}")
        self.steps: dict[str, int] = self.header["steps"]
        self._keys = set(file.keys())

    def check(self, numels: Mapping[str, int]) -> dict[str, int]:
        """Check that the file holds exactly these parameters.

        Args:
            numels: Elements by name.

        Returns:
            The format of each parameter's state.

        Raises:
            ValueError: Naming what is missing, not expected, or of another size.
        """
        lacking = [name for name in numels if name not in self.steps]
        surplus = [name for name in self.steps if name not in numels]
        for what, names in (("does not hold", lacking), ("also holds", surplus)):
            if names:
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                raise ValueError(f"{self.path} {what} the state of {shown}")
        found: dict[str, int] = {}
        for name, numel in numels.items():
            bits = 8 if f"{name}.absmax1" in self._keys else 32
            shapes: dict[str, list[int]] = {}
            for area in AREAS[bits]:
                if f"{name}.{area}" not in self._keys:
                    raise ValueError(f"{self.path}: {name} has no {area}")
                part = self._file.get_slice(f"{name}.{area}")
                expected = "U8" if bits == 8 and area in MOMENTS else "F32"
                if part.get_dtype() != expected:
                    raise ValueError(f"{self.path}: {name}.{area} is {part.get_dtype()}, expected {expected}")
                shapes[area] = part.get_shape()
            check_sizes(shapes, bits, numel, f"{self.path}: {name}")
            found[name] = bits
        return found

    def read(self, name: str, bits: int) -> Moments:
        """Read the state of one parameter.

        Args:
            name: Its name.
            bits: What `check` found.

        Returns:
            Its state.
        """
        tensors = {area: self._file.get_tensor(f"{name}.{area}").reshape(-1) for area in AREAS[bits]}
        return Moments(bits, int(self.steps[name]), tensors)
