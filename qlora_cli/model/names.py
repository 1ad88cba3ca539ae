"""Names of a model's linear layers, found on the meta device from its config: no weight is allocated."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qlora_cli.model.quiet import quiet

_PEFT_PREFIX = "base_model.model."
_PEFT_SUFFIX = ".base_layer"


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model of a config without memory for its weights.

    Args:
        config: Config of a causal language model; left as it is.

    Returns:
        The model with every tensor on the meta device. No random number is drawn.
    """
    is_agreed = type(config).__module__.startswith("transformers_modules")  # its code was run for the config
    state = torch.get_rng_state()
    try:
        with quiet(), torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), trust_remote_code=is_agreed
            )
    finally:
        torch.set_rng_state(state)
    return model


def linear_names(config_or_model: PreTrainedConfig | nn.Module) -> list[str]:
    """Names of the linear layers that an adapter can be attached to: all but the output head.

    Args:
        config_or_model: The config of a base, or the base itself.

    Returns:
        Full names, in module order.
    """
    model = config_or_model if isinstance(config_or_model, nn.Module) else empty_model(config_or_model)
    heads = head_names(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name not in heads
    ]


def head_names(model: nn.Module) -> list[str]:
    """Full names of the module that turns hidden states into logits; empty where the model has none.

    Args:
        model: A causal language model.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return [name for name, module in model.named_modules() if head is not None and module is head]


def match_names(
    names: Sequence[str], wanted: Iterable[str], *, with_parents: bool = False
) -> tuple[list[str], list[str]]:
    """Choose modules by full name or by its end, at a dot.

    Args:
        names: Full names.
        wanted: What to look for: `q_proj`, `self_attn.q_proj`, or a full name.
        with_parents: Whether the name of a parent stands for all below it.

    Returns:
        The names that match, in the order of `names`, and what matches none of them.
    """
    wanted = list(wanted)
    hits = {
        want: {
            name
            for name in names
            if name == want or name.endswith(f".{want}") or (with_parents and f".{want}." in f".{name}")
        }
        for want in wanted
    }
    chosen = set().union(*hits.values())
    return [name for name in names if name in chosen], [want for want in wanted if not hits[want]]


def base_name(name: str) -> str:
    """The name that a module has in the base, from its name in a model with an adapter.

    Args:
        name: A module name; one of a base comes back as it is.
    """
    return name.removeprefix(_PEFT_PREFIX).removesuffix(_PEFT_SUFFIX)
