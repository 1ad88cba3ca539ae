from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qlora_cli.model.shards import DTYPES, INDEX, Planned, plan_shards, shard_files, write_shards


def planned(tensors: dict[str, torch.Tensor]) -> list[Planned]:
    return [Planned(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}.{shape}": torch.full(shape, index % 2).to(dtype)
        for index, dtype in enumerate(DTYPES.values())
        for shape in ((), (3,), (2, 5), (0, 4))
    }
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    write_shards(tmp_path, plan_shards(planned(tensors)), tensors.__getitem__)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].double(), tensor.double()), name
    assert list(shard_files(tmp_path)) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("max_bytes", [1, 100, 400, 1000])
def test_no_file_holds_more_than_asked_unless_it_holds_one_tensor(tmp_path: Path, max_bytes: int) -> None:
    tensors = {f"t{i}": torch.full((i + 1, 10), float(i)) for i in range(8)}
    shards = plan_shards(planned(tensors), max_bytes)
    for group in shards.values():
        assert len(group) == 1 or sum(tensor.num_bytes for tensor in group) <= max_bytes
    assert [tensor.name for group in shards.values() for tensor in group] == list(tensors)
    told: list[tuple[int, int, str]] = []
    write_shards(tmp_path, shards, tensors.__getitem__, lambda *args: told.append(args))
    assert [done for done, _, _ in told] == list(range(1, len(shards) + 1))
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert {path.name for path in shard_files(tmp_path)} == {name for _, _, name in told}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    alive: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name
            alive.append(name)

        def __del__(self) -> None:
            alive.remove(self.name)

    most = 0

    def value_of(name: str) -> torch.Tensor:
        nonlocal most
        tensor = torch.zeros(4)
        tensor.counted = Counted(name)
        most = max(most, len(alive))
        return tensor

    names = [f"t{i}" for i in range(5)]
    shards = plan_shards([Planned(name, torch.float32, (4,)) for name in names])
    write_shards(tmp_path, shards, value_of)
    assert most <= 2  # the one being computed, and the last one until its name is bound anew
