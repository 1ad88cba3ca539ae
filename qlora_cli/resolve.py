"""Every `auto` of a recipe turned into a choice with its reason, from the recipe and the facts of the device.

Pure: what a given card would get is answered without that card. The choices are printed once and recorded in
run.json.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from qlora_cli.config.schema import Recipe

if TYPE_CHECKING:
    from qlora_cli.device import DeviceFacts


@dataclass(frozen=True)
class Choice:
    """A value and why it was chosen."""

    value: str
    reason: str


@dataclass(frozen=True)
class Choices:
    """What the `auto` keys of a recipe became.

    Attributes:
        compute_dtype: `fp32` or `bf16`; the dtype of matmuls and of the unquantised weights.
        attention: `sdpa` or `eager`.
        activation_checkpointing: `none` or `full`.
    """

    compute_dtype: Choice
    attention: Choice
    activation_checkpointing: Choice

    def as_json(self) -> dict[str, dict[str, str]]:
        """Key to value and reason, for run.json."""
        return asdict(self)


def resolve(recipe: Recipe, device: DeviceFacts) -> Choices:
    """Choose what the recipe leaves to `auto`.

    Args:
        recipe: Complete recipe.
        device: Facts of the device that will train.

    Returns:
        A choice for each such key; a value that the recipe gives is kept, with that as its reason.
    """
    return Choices(
        compute_dtype=_given(recipe.model.quantization.compute_dtype) or _compute_dtype(device),
        attention=_given(recipe.model.attention)
        or Choice("sdpa", "scaled dot product attention picks the fastest kernel the device has"),
        activation_checkpointing=_given(recipe.train.activation_checkpointing)
        or _activation_checkpointing(device),
    )


def _given(value: str) -> Choice | None:
    return None if value == "auto" else Choice(value, "the recipe says so")


def _compute_dtype(device: DeviceFacts) -> Choice:
    if device.kind == "cpu":
        return Choice("fp32", "bf16 matmuls are slower than fp32 on most CPUs")
    if device.bf16_is_fast:
        return Choice("bf16", f"{device.name} has bf16 matrix units")
    return Choice("fp32", f"{device.name} has no fast bf16; fp16 would need loss scaling")


def _activation_checkpointing(device: DeviceFacts) -> Choice:
    if device.kind == "cpu":
        return Choice(
            "none", "host memory holds the activations of small models, and recomputing costs a third"
        )
    return Choice("full", "the safe choice on a GPU: each layer keeps only its input")
