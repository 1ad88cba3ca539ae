"""`qlora generate`: a model to talk to, whether RUN is an adapter or a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qlora_cli.data.templates import chat_ids
from qlora_cli.device import DeviceFacts, probe
from qlora_cli.errors import Fault, InputError
from qlora_cli.generate import generate
from qlora_cli.model.adapter import Adapter, read_adapter
from qlora_cli.model.load import QuantizationSpec, load_base, load_tokenizer
from qlora_cli.model.lora import load_trainable
from qlora_cli.run_folder import ADAPTER_CONFIG, find_run


def answer(run: str, prompt: str, system: str | None, *, use_base: bool, max_new_tokens: int) -> str:
    """Answer one prompt.

    Args:
        run: A run, checkpoint or adapter folder, or the folder of a whole model.
        prompt: What the user says.
        system: A system message before it, or None.
        use_base: Leave the adapter out.
        max_new_tokens: Longest answer.

    Returns:
        The answer as text, without special tokens.

    Raises:
        InputError: If RUN names nothing that can answer.
    """
    model, tokenizer = _load(run, probe(), use_base)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    ids = chat_ids(messages, tokenizer)
    return generate(model, tokenizer, [ids], max_new_tokens=max_new_tokens, batch_size=1)[0]


def _load(run: str, device: DeviceFacts, use_base: bool) -> tuple[Any, Any]:
    folder = Path(run).expanduser()
    if (folder / "config.json").is_file() and not (folder / ADAPTER_CONFIG).is_file():
        model = load_base(str(folder), None, _whole(device), "sdpa", device.torch_device, False)
        return model, load_tokenizer(str(folder), None, None, False)
    adapter = read_adapter(find_run(run).adapter)
    if adapter.base_name is None:
        raise InputError(
            Fault("no-base", "the adapter does not say what its base is", file=str(adapter.folder))
        )
    model = load_base(
        adapter.base_name, adapter.revision, _as_trained(adapter, device), "sdpa", device.torch_device, False
    )
    if not use_base:
        model = load_trainable(model, adapter.folder)
    return model, load_tokenizer(_tokenizer_place(adapter), None, None, False)


def _whole(device: DeviceFacts) -> QuantizationSpec:
    """A model as it is stored."""
    return QuantizationSpec("none", False, "bf16" if device.bf16_is_fast else "fp32")


def _as_trained(adapter: Adapter, device: DeviceFacts) -> QuantizationSpec:
    """The base as the adapter's record says it was trained on; unquantised where there is no record."""
    record = (adapter.record or {}).get("quantization")
    if not record:
        return _whole(device)
    return QuantizationSpec(
        record["scheme"], record["double_quant"], _whole(device).compute_dtype, tuple(record["skip_modules"])
    )


def _tokenizer_place(adapter: Adapter) -> str:
    """The adapter's folder where it holds a tokenizer, else its base."""
    has_one = (adapter.folder / "tokenizer_config.json").is_file()
    return str(adapter.folder) if has_one else str(adapter.base_name)
