"""One key of an adapter file -> which module it belongs to and what it is there; pure, knows no tensor.

Peft writes `base_model.model.MODULE.lora_A.weight`. Other tools, and other ways of saving, leave the prefix
away, keep the adapter's name in the middle (`lora_A.default.weight`), or keep the names of wrappers around
the model (`_orig_mod`, FSDP, checkpointing). The grammar of what may stand after MODULE is peft's:
`tuners/lora`, `ModulesToSaveWrapper` and `TrainableTokensWrapper` in `utils/other.py` (peft 0.21).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

# Names that tools drop from the front of a path or put there once too often.
_OPTIONAL_HEADS = frozenset({"model", "module", "language_model", "transformer"})

# peft.utils.other.EMBEDDING_LAYER_NAMES, and the names of the same two layers in GPT-2, GPT-NeoX and kin:
# stored with the adapter without being asked for when the vocabulary was resized.
_EMBEDDING_NAMES = frozenset({"embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings"})

Role = Literal[
    "lora_A",  # (rank, in)
    "lora_B",  # (out, rank)
    "lora_B_bias",  # (out,), lora_bias=True
    "embedding_A",  # (rank, num_embeddings)
    "embedding_B",  # (embedding_dim, rank)
    "magnitude",  # (out,), DoRA
    "rows",  # (num_tokens, embedding_dim), trainable_token_indices
    "trained",  # replaces the base's tensor: modules_to_save, bias
    "stored",  # the base's own tensor below an adapter, stored because it was resized
]

_PATTERNS: tuple[tuple[re.Pattern[str], Role], ...] = (
    (re.compile(r"(?P<module>.+)\.lora_A(?:\.(?P<name>[^.]+))?\.(?P<parameter>weight)"), "lora_A"),
    (re.compile(r"(?P<module>.+)\.lora_B(?:\.(?P<name>[^.]+))?\.(?P<parameter>weight)"), "lora_B"),
    (re.compile(r"(?P<module>.+)\.lora_B(?:\.(?P<name>[^.]+))?\.(?P<parameter>bias)"), "lora_B_bias"),
    (re.compile(r"(?P<module>.+)\.lora_embedding_A(?:\.(?P<name>[^.]+))?"), "embedding_A"),
    (re.compile(r"(?P<module>.+)\.lora_embedding_B(?:\.(?P<name>[^.]+))?"), "embedding_B"),
    (re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.(?P<name>[^.]+))??(?:\.weight)?"), "magnitude"),
    (re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(?:\.(?P<name>[^.]+))?"), "rows"),
    (re.compile(r"(?P<module>.+)\.token_adapter\.base_layer\.(?P<parameter>weight)"), "stored"),
    (re.compile(r"(?P<module>.+)\.original_module\.(?P<parameter>.+)"), "stored"),
    (re.compile(r"(?P<module>.+)\.base_layer\.(?P<parameter>weight)"), "stored"),
    (re.compile(r"(?P<module>.+)\.base_layer\.(?P<parameter>bias)"), "trained"),
    (re.compile(r"(?P<module>.+)\.(?P<parameter>[^.]+)"), "trained"),
)
_SUFFIX: Mapping[Role, str] = {
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "lora_B_bias": "lora_B.bias",
    "embedding_A": "lora_embedding_A",
    "embedding_B": "lora_embedding_B",
    "magnitude": "lora_magnitude_vector",
    "rows": "token_adapter.trainable_tokens_delta",
}


@dataclass(frozen=True, slots=True)
class Key:
    """What a key of the adapter file says.

    Attributes:
        text: The key as it stands in the file.
        module: Path of the module inside the base model, e.g. `model.layers.0.self_attn.q_proj`.
        role: What the tensor is to that module.
        parameter: Name of the base's parameter below `module` that it concerns: `weight` or `bias`.
        adapter_name: Name between role and parameter, e.g. `default`, or None.
        below: `base_layer.` or the like where the key names the layer inside a wrapper, else empty.
    """

    text: str
    module: str
    role: Role
    parameter: str
    adapter_name: str | None
    below: str = ""

    @property
    def tensor(self) -> str:
        """Name of the base's tensor that is concerned."""
        return f"{self.module}.{self.parameter}"

    @property
    def canonical(self) -> str:
        """The key as peft itself writes it."""
        suffix = _SUFFIX.get(self.role, f"{self.below}{self.parameter}")
        return f"{PREFIX}{self.module}.{suffix}"


def parse_keys(texts: Collection[str]) -> list[Key]:
    """Read every key of an adapter file; whether `trained` is allowed for it is `is_expected`'s question."""
    first = [_parse(text, frozenset({"default"})) for text in texts]
    names = frozenset(key.adapter_name for key in first if key.adapter_name) | {"default"}
    return [_parse(text, names) for text in texts]


def _parse(text: str, names: frozenset[str]) -> Key:
    path = _WRAPPERS.sub("", text).rpartition(PREFIX)[2]
    for name in names:
        path = path.replace(f".modules_to_save.{name}.", ".")
    path = path.replace(".modules_to_save.", ".")
    for pattern, role in _PATTERNS:
        if match := pattern.fullmatch(path):
            groups = match.groupdict()
            below = next((b for b in ("token_adapter.base_layer.", "base_layer.") if f".{b}" in path), "")
            return Key(
                text, groups["module"], role, groups.get("parameter") or "weight", groups.get("name"), below
            )
    return Key(text, path, "trained", "", None)


def is_expected(key: Key, config: Mapping[str, Any]) -> bool:
    """Whether the adapter's own config accounts for this tensor.

    A `trained` tensor must come from `modules_to_save`, from `bias`, or be an embedding, which peft stores
    unasked when the vocabulary was resized.
    """
    if "lora_" in key.module or key.module.endswith(".base_layer") or not key.parameter:
        return False
    if key.role != "trained":
        return True
    if key.parameter == "bias" and config.get("bias", "none") != "none":
        return True
    if is_saved(key.module, config):
        return True
    return key.parameter == "weight" and key.module.rpartition(".")[2] in _EMBEDDING_NAMES


def is_saved(module: str, config: Mapping[str, Any]) -> bool:
    """Whether `modules_to_save` names this module or one around it (peft, `_set_trainable`)."""
    saved = tuple(config.get("modules_to_save") or ())
    parts = module.split(".")
    return bool(saved) and any(".".join(parts[: end + 1]).endswith(saved) for end in range(len(parts)))


def pattern_value(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of `rank_pattern` or `alpha_pattern` for a module.

    Peft's rule (`get_pattern_key`): the first pattern, in order, that matches the whole path or its end after
    a dot.
    """
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def is_target(module: str, config: Mapping[str, Any]) -> bool:
    """Whether peft would put a LoRA pair on this module (`check_target_module_exists`)."""
    excluded = config.get("exclude_modules") or ()
    if isinstance(excluded, str):
        if re.fullmatch(excluded, module):
            return False
    elif _names(excluded, module):
        return False
    if any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in config.get("modules_to_save") or ()):
        return False
    targets = config.get("target_modules") or ()
    if isinstance(targets, str):
        return targets != "all-linear" and re.fullmatch(targets, module) is not None
    return _names(targets, module) and _in_layers(module, config)


def _names(names: Iterable[str], module: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _in_layers(module: str, config: Mapping[str, Any]) -> bool:
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    wanted = [layers] if isinstance(layers, int) else layers
    patterns = config.get("layers_pattern") or r"[^.]*"
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if match := re.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", module):
            return int(match["index"]) in wanted
    return False


def locate(module: str, modules: Collection[str]) -> str | None:
    """Find the base's module that an adapter's module path means.

    Args:
        module: Path as the adapter file has it.
        modules: Paths of all modules of the base.

    Returns:
        The same path where the base has it; else the only one that differs by leading `model.` and the like;
        None where there is none or more than one.
    """
    if module in modules:
        return module
    parts = module.split(".")
    for start in range(1, len(parts)):
        if parts[start - 1] not in _OPTIONAL_HEADS:
            break
        if (shorter := ".".join(parts[start:])) in modules:
            return shorter
    longer = [
        name
        for name in modules
        if name.endswith(f".{module}") and set(name[: -len(module) - 1].split(".")) <= _OPTIONAL_HEADS
    ]
    return longer[0] if len(longer) == 1 else None
