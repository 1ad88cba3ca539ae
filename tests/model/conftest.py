"""Adapters made by hand, so that no test depends on how peft or the trainer would write one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes an adapter folder for a base folder and returns it."""

    def make(
        base: Path,
        ranks: Mapping[str, int] | None = None,
        *,
        name: str = "adapter",
        tensors: Mapping[str, Any] | None = None,
        key_of: Callable[[str], str] = lambda key: f"base_model.model.{key}",
        record: Mapping[str, Any] | None = None,
        spread: float = 0.3,
        **config: Any,
    ) -> Path:
        """Write random pairs of the given ranks, and other tensors as they are.

        Args:
            base: The base's folder.
            ranks: Rank by module path; default: rank 4 on every q_proj.
            name: Name of the folder.
            tensors: More tensors, by key without the prefix.
            key_of: Makes a key of the file from one without prefix.
            record: Content of `qlora.json`.
            spread: Standard deviation of both halves.
            config: What differs in `adapter_config.json`.
        """
        import torch
        from safetensors.torch import load_file, save_file

        weights = load_file(base / "model.safetensors")
        if ranks is None:
            ranks = {key.removesuffix(".weight"): 4 for key in weights if key.endswith("q_proj.weight")}
        generator = torch.Generator().manual_seed(0)
        made: dict[str, torch.Tensor] = {}
        for module, rank in ranks.items():
            rows, columns = weights[f"{module}.weight"].shape
            made[f"{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * spread
            made[f"{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * spread
        made |= dict(tensors or {})
        folder = tmp_path / name
        folder.mkdir()
        save_file({key_of(key): value for key, value in made.items()}, folder / "adapter_model.safetensors")
        document = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base),
            "bias": "none",
            "r": 4,
            "lora_alpha": 8,
            "lora_dropout": 0.0,
            "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
            **config,
        }
        (folder / "adapter_config.json").write_text(json.dumps(document), "utf-8")
        if record is not None:
            (folder / "qlora.json").write_text(json.dumps(record), "utf-8")
        return folder

    return make
