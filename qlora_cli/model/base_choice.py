"""Which weights an adapter is added to: the base as stored, or what its 4-bit codes stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_cli.errors import Fault, InputError
from qlora_cli.model.adapter import Adapter
from qlora_cli.model.base_files import BaseFiles
from qlora_cli.model.fold import Quantization
from qlora_cli.model.load import DTYPES
from qlora_cli.run_folder import RECORD

BASES = ("auto", "nf4", "original")
_SCHEMES = ("nf4", "fp4", "none")


@dataclass(frozen=True, slots=True)
class BaseChoice:
    """Which weights of the base the adapter is added to.

    Attributes:
        name: `nf4`, `fp4` or `original`.
        reason: Why, for the report; one line.
        quantization: How they are quantised; None for `original`.
    """

    name: str
    reason: str
    quantization: Quantization | None


def choose_base(asked: str, adapter: Adapter, base: BaseFiles) -> BaseChoice:
    """Resolve `auto`, and find out which modules are quantised and how.

    Args:
        asked: `auto`, `nf4` or `original`.
        adapter: The adapter with its record, if it has one.
        base: The base's files.

    Returns:
        The choice with its reason.

    Raises:
        InputError: If the record cannot be read, or names modules that the base does not have.
    """
    record = _quantization_record(adapter)
    trained_on = record.get("scheme", "none")
    if asked == "original":
        return BaseChoice("original", "asked for with `--base original`", None)
    if asked == "nf4":
        return BaseChoice("nf4", "asked for with `--base nf4`", _quantization("nf4", record, base))
    if not record:
        return BaseChoice(
            "original", f"the adapter has no record (`{RECORD}`) of what it was trained on", None
        )
    if trained_on == "none":
        return BaseChoice("original", "the adapter's record says that its base was not quantised", None)
    double = " with double quantisation" if record.get("double_quant", True) else ""
    reason = f"the adapter's record says that it was trained on {trained_on}{double}"
    return BaseChoice(trained_on, reason, _quantization(trained_on, record, base))


def _quantization_record(adapter: Adapter) -> Mapping[str, Any]:
    record = (adapter.record or {}).get("quantization") or {}
    path = str(adapter.folder / RECORD)
    known = isinstance(record, dict) and record.get("scheme", "none") in _SCHEMES
    if not known or record.get("compute_dtype", "fp32") not in DTYPES:
        message = "`quantization` is not a record of how the base was loaded"
        accepted = f"`scheme` of {', '.join(_SCHEMES)} and `compute_dtype` of {', '.join(DTYPES)}"
        raise InputError(
            Fault("unreadable-record", message, file=path, key="quantization", accepted=accepted)
        )
    return record


def _quantization(scheme: str, record: Mapping[str, Any], base: BaseFiles) -> Quantization:
    """By the record where it is of a quantised base, else as transformers loads this architecture."""
    recorded = record.get("quantized_modules") or ()
    modules = frozenset(recorded or base.layout.linears)
    absent = sorted(module for module in modules if f"{module}.weight" not in base.tensors)
    if absent:
        names = ", ".join(f"`{module}`" for module in absent)
        message = f"the base has no weight for these modules, which are recorded as quantised: {names}"
        hint = "is this the base that the adapter was trained on? `--base-path FOLDER` names another"
        raise InputError(Fault("unmatched-tensors", message, file=str(base.folder), hint=hint))
    return Quantization(
        scheme=scheme,
        double_quant=bool(record.get("double_quant", True)),
        modules=modules,
        skip_modules=tuple(record.get("skip_modules") or ()),
        compute_dtype=record.get("compute_dtype", "fp32"),
    )
