"""LoRA on a frozen base through peft: which layers, from which seed, and its folder on disk.

The adapter is always fp32. The folder is PEFT's format, loaded by plain `PeftModel.from_pretrained`, and its
bytes depend on nothing but the adapter: peft writes its sets in hash order and a model card, this does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qlora_cli.errors import Fault, InputError
from qlora_cli.model.adapter import align, read_adapter
from qlora_cli.model.names import linear_names, match_names
from qlora_cli.model.nf4 import linear4bit_layers
from qlora_cli.model.quiet import quiet
from qlora_cli.run_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, RECORD

from peft import (  # isort: skip - after nf4, which imports bitsandbytes without its download
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)

ALL_LINEAR = "all-linear"

__all__ = [
    "LoraSpec",
    "PeftModel",
    "TargetError",
    "attach",
    "enable_checkpointing",
    "linear_names",
    "load_trainable",
    "match_targets",
    "save_adapter",
]


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """What is attached to a base.

    Attributes:
        rank: Inner dimension, at least 1.
        alpha: Numerator of the scaling, above 0.
        dropout: Share of the inputs dropped in training, 0 to 1.
        target_modules: `all-linear`, names as in `match_targets`, or one regular expression.
        variant: `lora` (scaling alpha / rank) or `rslora` (alpha / sqrt(rank)).
        init: `default` (A uniform by Kaiming's rule) or `gaussian`; B is zero in both.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    variant: str = "lora"
    init: str = "default"


class TargetError(ValueError):
    """Target modules that match no linear layer.

    Attributes:
        unmatched: The names, or the expression.
        available: Last parts of the names of all linear layers, sorted.
    """

    def __init__(self, unmatched: Sequence[str], available: Sequence[str]) -> None:
        """Keep both lists."""
        self.unmatched, self.available = list(unmatched), list(available)
        super().__init__(f"no linear layer matches {', '.join(unmatched)}; there are {', '.join(available)}")


def match_targets(names: Sequence[str], target_modules: str | Sequence[str]) -> list[str]:
    """Choose the linear layers that get an adapter.

    Args:
        names: Full names of all linear layers, from `linear_names`.
        target_modules: `all-linear`; a list whose entries are a full name or its end at a dot (`q_proj`,
            `self_attn.q_proj`); or one regular expression that must match a whole name.

    Returns:
        Full names, in the order of `names`.

    Raises:
        TargetError: If the expression or any entry of the list matches nothing.
    """
    available = sorted({name.rpartition(".")[2] for name in names})
    if target_modules == ALL_LINEAR:
        return list(names)
    if isinstance(target_modules, str):
        try:
            matched = [name for name in names if re.fullmatch(target_modules, name)]
        except re.error:
            matched = []
        unmatched = [] if matched else [target_modules]
    else:
        matched, unmatched = match_names(names, target_modules)
    if unmatched:
        raise TargetError(unmatched, available)
    return matched


def attach(base: PreTrainedModel, spec: LoraSpec, seed: int) -> PeftModel:
    """Attach a fresh adapter to a base.

    Args:
        base: Frozen, from `load_base`; its layers are replaced in place.
        spec: The adapter.
        seed: The same seed gives the same adapter, whatever random numbers were drawn before.

    Returns:
        The model in training mode; its only parameters with a gradient are the adapter's, fp32.

    Raises:
        TargetError: If `target_modules` matches nothing.
    """
    names = linear_names(base)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=_targets(names, spec.target_modules),
        use_rslora=spec.variant == "rslora",
        init_lora_weights="gaussian" if spec.init == "gaussian" else True,
        task_type="CAUSAL_LM",
    )
    return _with_adapter(base, config, seed)


def load_trainable(base: PreTrainedModel, adapter_dir: Path) -> PeftModel:
    """Attach an adapter from its folder, ready to be trained further.

    Args:
        base: Frozen, from `load_base`; its layers are replaced in place.
        adapter_dir: A folder in PEFT format, whichever tool wrote it.

    Returns:
        The model in training mode; its only parameters with a gradient are the adapter's, fp32.

    Raises:
        InputError: If the folder holds no LoRA adapter, or one that does not fit the base: every tensor of
            the file must find its place, and every place must be filled.
    """
    adapter = align(read_adapter(adapter_dir), _weight_shapes(base))
    own = {"inference_mode": False, "base_model_name_or_path": None, "revision": None}
    stored = dict(adapter.config) | own
    model = _with_adapter(base, LoraConfig.from_peft_type(**stored), seed=0)
    expected = {name: tensor.shape for name, tensor in _adapter_tensors(model).items()}
    found = adapter.canonical()
    faults = [
        _mismatch(adapter_dir, name, found.get(name), expected.get(name))
        for name in sorted(expected.keys() | found.keys())
        if name not in expected or name not in found or found[name].shape != expected[name]
    ]
    if faults:
        raise InputError(faults)
    set_peft_model_state_dict(model, found)
    return model


def enable_checkpointing(model: nn.Module) -> None:
    """Recompute each layer in the backward pass instead of keeping its activations.

    The non-reentrant form finds the adapter's parameters inside a layer by itself, so the input of the first
    layer needs no gradient, and none is computed down to the frozen embedding.

    Args:
        model: From `attach` or `load_trainable`.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    with quiet():
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def save_adapter(
    model: PeftModel, folder: Path, tokenizer: PreTrainedTokenizerBase, record: Mapping[str, Any]
) -> None:
    """Write the adapter in PEFT format, with the tokenizer and chat template it was trained with.

    Args:
        model: From `attach` or `load_trainable`.
        folder: Exists; files of these names in it are replaced.
        tokenizer: As it was trained with.
        record: Content of `qlora.json`: the base and how it was quantised, and how the adapter was trained.
    """
    config = model.peft_config["default"].to_dict()
    config |= {
        "inference_mode": True,  # what a folder says; a loader that trains sets its own
        "base_model_name_or_path": model.get_base_model().config.name_or_path,
        "revision": (record.get("base") or {}).get("revision"),
        "target_modules": _plain(config["target_modules"]),
    }
    _write_json(folder / ADAPTER_CONFIG, config)
    save_file(_adapter_tensors(model), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    tokenizer.save_pretrained(str(folder))
    _write_json(folder / RECORD, record)


def _targets(names: Sequence[str], target_modules: str | tuple[str, ...]) -> str | list[str]:
    """The shortest form for adapter_config.json that means exactly the layers matched."""
    matched = match_targets(names, target_modules)
    if target_modules != ALL_LINEAR:
        return target_modules if isinstance(target_modules, str) else list(target_modules)
    ends = sorted({name.rpartition(".")[2] for name in matched})
    return ends if match_names(names, ends)[0] == matched else matched


def _with_adapter(base: PreTrainedModel, config: LoraConfig, seed: int) -> PeftModel:
    """Let peft replace the layers, with random numbers of our own (drawn on the CPU) and none of others'."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        with quiet():
            model = get_peft_model(base, config)
    finally:
        torch.set_rng_state(state)
    wrong = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32]
    assert not wrong, f"peft keeps adapters in fp32, but not {wrong[:3]}"
    return model.train()


def _adapter_tensors(model: PeftModel) -> dict[str, Tensor]:
    """The adapter's tensors under the names that peft writes, on the CPU."""
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(state.items())}


def _weight_shapes(base: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by name; of a 4-bit weight the shape that its codes stand for."""
    shapes = {name: tuple(p.shape) for name, p in base.named_parameters(remove_duplicate=False)}
    layers = dict(linear4bit_layers(base)).items()
    return shapes | {f"{name}.weight": (layer.out_features, layer.in_features) for name, layer in layers}


def _mismatch(folder: Path, name: str, found: Tensor | None, expected: Sequence[int] | None) -> Fault:
    path = str(folder / ADAPTER_WEIGHTS)
    if found is None:
        return Fault("missing-tensors", f"`{name}` is missing", file=path)
    if expected is None:
        return Fault("unmatched-tensors", f"`{name}` has no place in the base", file=path)
    message = f"`{name}` has shape {list(found.shape)}, the base needs {list(expected)}"
    return Fault("shape-mismatch", message, file=path)


def _plain(targets: str | Sequence[str] | set[str] | None) -> str | list[str] | None:
    return targets if targets is None or isinstance(targets, str) else sorted(targets)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, set) else str(value)

    text = json.dumps(document, indent=2, sort_keys=True, default=plain, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
