"""A base model from a folder or the hub: its config, its tokenizer, its weights in 4 bits.

Everything goes through transformers and bitsandbytes; this module adds what they leave open: the dtype of
what is not quantised (the compute dtype, nothing is upcast), weights that are missing (an error, not random
numbers), 4-bit layers that an evaluation cannot change, and faults in words.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qlora_cli.errors import Fault, InputError
from qlora_cli.model.base_checks import (
    KEY,
    check_architecture,
    check_folder,
    check_quantization,
    check_weights,
    is_local,
    reading_hub,
)
from qlora_cli.model.names import base_name, empty_model, head_names, linear_names, match_names
from qlora_cli.model.nf4 import keep_training_layout, linear4bit_layers
from qlora_cli.model.quiet import quiet

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """How a base is held in memory.

    Attributes:
        scheme: `nf4`, `fp4`, or `none` for weights in the compute dtype.
        double_quant: Whether the absmax values are quantised as well.
        compute_dtype: `fp32`, `bf16` or `fp16`: dtype of the matmuls and of what is not quantised.
        skip_modules: Names of modules that stay in the compute dtype: a full name, its end, or a parent.
            The output head always stays.
    """

    scheme: str
    double_quant: bool
    compute_dtype: str
    skip_modules: tuple[str, ...] = ()


def read_model_config(name_or_path: str, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the config of a base, without its weights.

    Args:
        name_or_path: A folder or a hub id.
        revision: Branch, tag or commit on the hub; None for the default branch.
        trust_remote_code: Whether code that comes with the model may run.

    Returns:
        The transformers config of a causal language model.

    Raises:
        InputError: If there is no such base, or it is nothing that can be trained here.
    """
    if is_local(name_or_path):
        name_or_path = str(check_folder(name_or_path))
    with quiet(), reading_hub(name_or_path, revision):
        document, _ = PreTrainedConfig.get_config_dict(name_or_path, revision=revision)
        check_architecture(name_or_path, document, trust_remote_code)
    try:
        with quiet():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                name_or_path, revision=revision, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # what a config class raises on values it does not like has no common type
        message = f"the config.json of `{name_or_path}` is not a valid `{document.get('model_type')}` config"
        raise InputError(Fault("invalid-config", f"{message}: {_first_line(error)}", key=KEY)) from error
    if type(config) not in AutoModelForCausalLM._model_mapping and not document.get("auto_map"):
        message = f"the base `{name_or_path}` is a `{config.model_type}` model, which does not continue text"
        raise InputError(Fault("not-a-causal-lm", message, key=KEY, accepted="a causal language model"))
    return config


def load_tokenizer(
    name_or_path: str, revision: str | None, chat_template: str | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a base or of an adapter folder.

    Args:
        name_or_path: A folder or a hub id.
        revision: Branch, tag or commit on the hub; None for the default branch.
        chat_template: Text of a template that replaces the tokenizer's own, or None.
        trust_remote_code: Whether code that comes with the tokenizer may run.

    Returns:
        The tokenizer. A missing pad token is the eos token, or the unknown token: padding is told from
        content by its place, never by its id.

    Raises:
        InputError: If there is no tokenizer, or it cannot be read.
    """
    try:
        with quiet(), reading_hub(name_or_path, revision):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(Path(name_or_path).expanduser()) if is_local(name_or_path) else name_or_path,
                revision=revision,
                trust_remote_code=trust_remote_code,
            )
    except InputError:
        raise
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception from Rust
        message = f"the tokenizer of `{name_or_path}` cannot be read: {_first_line(error)}"
        raise InputError(
            Fault("unreadable-tokenizer", message, key=KEY, accepted="a folder with tokenizer.json")
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def load_base(
    name_or_path: str,
    revision: str | None,
    quantization: QuantizationSpec,
    attention: str,
    device: str,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Load a base with its linear layers quantised and everything frozen.

    Args:
        name_or_path: A folder or a hub id.
        revision: Branch, tag or commit on the hub; None for the default branch.
        quantization: How it is held in memory.
        attention: `sdpa` or `eager`.
        device: Where to, as torch names it.
        trust_remote_code: Whether code that comes with the model may run.

    Returns:
        The model in eval mode, without gradients. Each weight goes to the device and is quantised as it is
        read, so that at no time more than one of them is held in full.

    Raises:
        InputError: If the base cannot be read, lacks weights, is quantised in another way, or has no module
            that `skip_modules` names.
    """
    config = read_model_config(name_or_path, revision, trust_remote_code)
    if is_local(name_or_path):
        name_or_path = str(Path(name_or_path).expanduser())
        check_weights(Path(name_or_path))
    dtype = DTYPES[quantization.compute_dtype]
    settings = _quantization_settings(name_or_path, config, quantization, dtype)
    try:
        with quiet(), reading_hub(name_or_path, revision):
            model, report = AutoModelForCausalLM.from_pretrained(
                name_or_path,
                revision=revision,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                device_map={"": device},
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                **settings,
            )
    except (ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        code = "attention-not-available" if "attention" in str(error) else "base-unreadable"
        message = f"the base `{name_or_path}` cannot be loaded: {_first_line(error)}"
        raise InputError(Fault(code, message, key=KEY)) from error
    _check_report(name_or_path, model, report)
    keep_training_layout(model)
    base: PreTrainedModel = model.requires_grad_(False).eval()
    return base


def quantized_module_names(model: nn.Module) -> list[str]:
    """Names of the modules whose weights are held in 4 bits.

    Args:
        model: A base, or a base with an adapter.

    Returns:
        Names as in the base, in module order.
    """
    return [base_name(name) for name, _ in linear4bit_layers(model)]


def _quantization_settings(
    name_or_path: str, config: PreTrainedConfig, spec: QuantizationSpec, dtype: torch.dtype
) -> dict[str, Any]:
    """Keywords that make transformers quantise while it loads; for a stored 4-bit base the config is."""
    if check_quantization(name_or_path, config.to_dict(), spec.scheme, spec.double_quant):
        stored = copy.deepcopy(config.quantization_config)
        stored = stored if isinstance(stored, dict) else stored.to_dict()
        config.quantization_config = stored | {"bnb_4bit_compute_dtype": str(dtype).removeprefix("torch.")}
        return {}
    if spec.scheme == "none":
        return {}
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=spec.scheme,
            bnb_4bit_use_double_quant=spec.double_quant,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=_skipped(config, spec.skip_modules),
        )
    }


def _skipped(config: PreTrainedConfig, skip_modules: tuple[str, ...]) -> list[str] | None:
    """Full names of the modules to leave alone, None where transformers' own choice (the head) is all."""
    if not skip_modules:
        return None
    model = empty_model(config)
    names = linear_names(model)
    matched, unmatched = match_names(names, skip_modules, with_parents=True)
    if unmatched:
        listed = ", ".join(f"`{name}`" for name in unmatched)
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
        message = f"`skip_modules`: {listed} matches no linear layer of the base"
        raise InputError(
            Fault("skip-not-found", message, key="model.quantization.skip_modules", accepted=ends)
        )
    return head_names(model) + matched


def _check_report(name_or_path: str, model: nn.Module, report: dict[str, Any]) -> None:
    """Refuse a base of which a tensor is missing or of another shape.

    transformers goes on with random numbers for the first, and with whatever was quantised for the second.
    """
    shapes = [str(key[0]) for key in report.get("mismatched_keys") or ()]
    shapes += [
        f"{name}.weight"
        for name, layer in linear4bit_layers(model)
        if (state := getattr(layer.weight, "quant_state", None)) is not None
        and tuple(state.shape) != (layer.out_features, layer.in_features)
    ]
    wrong = {"lacks": sorted(report.get("missing_keys") or ()), "has in another shape": sorted(shapes)}
    for what, names in wrong.items():
        if names:
            message = (
                f"the base `{name_or_path}` {what} {len(names)} tensors of its config, `{names[0]}` first"
            )
            hint = "config.json and weights are not of the same model, or a file is missing"
            raise InputError(Fault("base-incomplete", message, key=KEY, hint=hint))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
