"""Proves a merge: logits of the merged folder against the base with the adapter beside it.

The reference side shares no arithmetic with the merge: peft computes `W x + scaling * B (A x)`, unmerged, on
a base that transformers loaded. Both run in fp32, one after the other, one prompt at a time; logits of the
first are kept.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from qlora_cli.errors import Fault, RunError
from qlora_cli.model.adapter import Adapter
from qlora_cli.model.base_files import BaseFiles
from qlora_cli.model.fold import Quantization
from qlora_cli.model.load import QuantizationSpec, load_base
from qlora_cli.model.nf4 import linear4bit_layers
from qlora_cli.model.quiet import quiet

EFFECT_EXACT = 0.02  # an effect that is closer to 1 is whole
MAX_POSITIONS = 512  # of all prompts together; 0.25 GiB of logits with a vocabulary of 128 k

# Relative error of rounding to nearest is at most 2**-p with p significant bits. fp32 stands for the
# accumulation order as well: peft sums `W x` and `B A x` apart, the merged model sums once.
_ROUNDING = {
    torch.float64: 2.0**-20,
    torch.float32: 2.0**-20,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
_ATTENTION = "eager"  # every architecture has it, and both sides do the same
_SAFETY = 8.0
_EFFECT = {False: 0.1, True: EFFECT_EXACT}  # by whether the dtype is wider than 16 bits
_TAIL = 12.0  # largest of positions * vocabulary errors, in standard deviations


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far the logits may lie apart for the output dtype; each field bounds the figure of its name.

    Attributes:
        max_abs_diff: Of any logit.
        mean_kl: Nats per token.
        median_kl: Nats per token.
        effect: How far `effect_ratio` may lie from 1.
    """

    max_abs_diff: float
    mean_kl: float
    median_kl: float
    effect: float


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """Merged model against base + adapter.

    Attributes:
        max_abs_diff: Largest difference of a logit.
        mean_kl: KL divergence of the merged from the reference distribution, nats per token.
        median_kl: The same at the median position.
        top1_agreement: Share of positions where both give the same next token, 0..1.
        effect_ratio: Slope of (merged - base) on (base + adapter - base) over all logits: 1 where the adapter
            has its full effect, 2 where it was added twice, 0 where it was lost. Rounding does not move it.
        adapter_kl: KL divergence of the base without adapter from the reference: the size of the effect.
        positions: Number of positions compared.
        worst_prompt: Index of the prompt with the largest KL divergence.
        worst_kl: Its KL divergence, nats per token.
        tolerance: What was allowed.
    """

    max_abs_diff: float
    mean_kl: float
    median_kl: float
    top1_agreement: float
    effect_ratio: float
    adapter_kl: float
    positions: int
    worst_prompt: int
    worst_kl: float
    tolerance: Tolerance

    @property
    def failures(self) -> list[str]:
        """What is beyond the tolerance, in words."""
        rows = [
            ("largest logit difference", self.max_abs_diff, self.tolerance.max_abs_diff),
            ("mean KL divergence", self.mean_kl, self.tolerance.mean_kl),
            ("median KL divergence", self.median_kl, self.tolerance.median_kl),
            ("the adapter's effect differs from 1 by", abs(self.effect_ratio - 1), self.tolerance.effect),
        ]
        return [f"{what} {value:.3g}, allowed {most:.3g}" for what, value, most in rows if not value <= most]

    @property
    def holds(self) -> bool:
        """Whether the merge is proved."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """All figures, and whether they hold."""
        return {**asdict(self), "holds": self.holds}


def compare_logits(
    adapter: Adapter,
    base: BaseFiles,
    merged: Path,
    *,
    quantization: Quantization | None,
    dtype: torch.dtype,
    prompts: Sequence[Sequence[int]],
    device: str,
    trust_remote_code: bool = False,
) -> LogitComparison:
    """Compare a merged folder with base + adapter.

    Args:
        adapter: Aligned to the base.
        base: The base's files.
        merged: The merged folder.
        quantization: How the base is quantised on the reference side; None for its weights as stored.
        dtype: Dtype of the merged weights, which sets the tolerance.
        prompts: Token ids; shortened so that all have `MAX_POSITIONS` together.
        device: Where to compute.
        trust_remote_code: Whether code that comes with the model may run.

    Returns:
        The comparison; it does not raise when the tolerance is exceeded.

    Raises:
        RunError: If peft does not take every tensor of the adapter.
    """
    rows = shorten(prompts, MAX_POSITIONS)
    reference, without = _reference_logits(adapter, base, quantization, rows, device, trust_remote_code)
    gc.collect()  # the reference model, which peft ties into cycles, goes before the merged one comes
    model = _load_merged(merged, device, trust_remote_code)
    return compare(_logits(model, rows, device), reference, without, dtype)


def compare(
    found: Iterable[Tensor],
    reference: Sequence[Tensor],
    without: Sequence[Tensor],
    dtype: torch.dtype,
) -> LogitComparison:
    """Compare logits, and say what difference the rounding to `dtype` explains.

    Tolerance. Rounding a weight to nearest gives it a relative error of at most u (bf16: 2**-8), independent
    from weight to weight, so a linear layer's output has a relative error of about u. A residual stream
    averages the errors of its layers rather than adding them up: logits with spread s are off by about `u *
    s` (1.4 to 2.5 times that was measured, with 2 layers and with 30). Allowed are 8 times as much, `sigma =
    8 * u * s`. For Gaussian errors of that size the KL divergence is `sigma**2 / 2`, and no logit is off by
    more than 12 sigma.

    The median position must keep to that. Where an adapter is so strong that attention saturates, single
    positions amplify rounding without bound; for the mean and the largest difference, 1 % of the adapter's
    own KL divergence and half of its largest effect are therefore allowed too.

    All that cannot see a wrong factor on a faint adapter, whose whole effect is below the rounding of bf16.
    So the effect is measured as a slope, from which independent errors average out: it may be off by 0.02,
    plus three times the noise-to-effect ratio over the square root of the number of positions. In 16 bits it
    may be off by 0.1: a base that is stored in bf16 lies on the grid that the sum is rounded to, so changes
    below half a step are lost every time, not on average (3.6 % of the effect of a short training).

    Args:
        found: Merged, a (length, vocabulary) fp32 tensor per prompt; each is taken once and not kept.
        reference: Base + adapter.
        without: Base alone; fewer columns where rows were added to the vocabulary.
        dtype: What the merged weights were rounded to.

    Returns:
        The comparison.
    """
    parts = [_measure(f, r, w) for f, r, w in zip(found, reference, without, strict=True)]
    kl = torch.cat([part.kl for part in parts])
    means = [float(part.kl.mean()) for part in parts]
    worst = max(range(len(means)), key=lambda index: means[index])
    adapter_kl = float(torch.cat([part.adapter_kl for part in parts]).mean())
    energy = sum(part.energy for part in parts)
    spread = math.sqrt(sum(part.variance * len(part.kl) for part in parts) / len(kl))
    sigma = _SAFETY * _ROUNDING[dtype] * spread
    ratio = math.sqrt(sum(part.noise for part in parts) / energy) if energy else math.inf
    return LogitComparison(
        max_abs_diff=float(torch.tensor([part.max_abs_diff for part in parts]).max()),  # a nan stays one
        mean_kl=float(kl.mean()),
        median_kl=float(kl.median()),
        top1_agreement=sum(part.agreeing for part in parts) / len(kl),
        effect_ratio=sum(part.overlap for part in parts) / energy if energy else math.nan,
        adapter_kl=adapter_kl,
        positions=len(kl),
        worst_prompt=worst,
        worst_kl=means[worst],
        tolerance=Tolerance(
            max_abs_diff=max(_TAIL * sigma, 0.5 * max(part.max_effect for part in parts)),
            mean_kl=max(sigma**2 / 2, 0.01 * adapter_kl),
            median_kl=sigma**2 / 2,
            effect=_EFFECT[dtype.itemsize > 2] + 3 * ratio / math.sqrt(len(kl)),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """What is kept of one prompt: (length,) KL divergences, and sums over all its logits."""

    kl: Tensor
    adapter_kl: Tensor
    agreeing: int
    max_abs_diff: float
    max_effect: float
    energy: float  # of the adapter's effect, squared
    overlap: float  # product of the effect found with the effect wanted
    noise: float  # difference of merged and reference, squared
    variance: float  # of the reference's logits around the mean of their position


def _measure(found: Tensor, reference: Tensor, without: Tensor) -> _Measured:
    width = without.shape[-1]  # tokens that the base has
    effect, noise = reference[:, :width] - without, found[:, :width] - reference[:, :width]
    return _Measured(
        kl=_kl(reference, found),
        adapter_kl=_kl(reference[:, :width], without),
        agreeing=int((found.argmax(-1) == reference.argmax(-1)).sum()),
        max_abs_diff=float((found - reference).abs().max()),
        max_effect=float(effect.abs().max()),
        energy=_inner(effect, effect),
        overlap=_inner(effect + noise, effect),
        noise=_inner(noise, noise),
        variance=float((reference - reference.mean(dim=-1, keepdim=True)).square().mean()),
    )


def _inner(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))


def shorten(prompts: Sequence[Sequence[int]], max_positions: int) -> list[list[int]]:
    """Cut the longest prompts until all have at most `max_positions` tokens together; empty ones go."""
    rows = [list(prompt) for prompt in prompts if len(prompt)]
    limit = max((len(row) for row in rows), default=0)
    while limit > 1 and sum(min(len(row), limit) for row in rows) > max_positions:
        limit -= 1
    return [row[:limit] for row in rows][:max_positions]


def _kl(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) per position, nats; computed in fp64 so that 1e-9 is not noise."""
    log_p, log_q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _reference_logits(
    adapter: Adapter,
    base: BaseFiles,
    quantization: Quantization | None,
    prompts: Sequence[Sequence[int]],
    device: str,
    trust_remote_code: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of base + adapter, and of the base alone, by peft."""
    model = _load_base(base.folder, quantization, device, trust_remote_code)
    tensors = adapter.canonical()
    embedding = adapter.full.get(base.layout.embedding, adapter.stored.get(base.layout.embedding))
    if embedding is not None and embedding.shape[0] != base.shapes[base.layout.embedding][0]:
        model.resize_token_embeddings(embedding.shape[0], mean_resizing=False)
    config = LoraConfig.from_pretrained(str(adapter.folder), inference_mode=True)
    with quiet(), warnings.catch_warnings():
        # peft warns of tied weights where the adapter changes one of two; the merged folder stores both
        warnings.simplefilter("ignore", UserWarning)
        with_adapter = get_peft_model(model, config)
    outcome = set_peft_model_state_dict(with_adapter, tensors)
    missing = [key for key in outcome.missing_keys if ".lora_" in key or ".modules_to_save." in key]
    if outcome.unexpected_keys or missing:
        keys = ", ".join(f"`{key}`" for key in [*outcome.unexpected_keys, *missing])
        message = f"peft does not take these tensors, so the merge cannot be checked: {keys}"
        raise RunError(Fault("not-verified", message, file=str(adapter.folder)))
    with_adapter.eval()
    reference = list(_logits(with_adapter, prompts, device))
    num_tokens = base.shapes[base.layout.embedding][0]  # rows that were added have no effect to compare
    with with_adapter.disable_adapter():
        without = [logits[:, :num_tokens] for logits in _logits(with_adapter, prompts, device)]
    return reference, without


def _load_base(
    folder: Path, quantization: Quantization | None, device: str, trust_remote_code: bool
) -> PreTrainedModel:
    """The base as training loads it, its values then computed with in fp32."""
    spec = QuantizationSpec("none", double_quant=False, compute_dtype="fp32")
    if quantization is not None:
        how = quantization
        spec = QuantizationSpec(how.scheme, how.double_quant, how.compute_dtype, how.skip_modules)
    model = load_base(str(folder), None, spec, _ATTENTION, device, trust_remote_code)
    for _, layer in linear4bit_layers(model):
        layer.compute_dtype = torch.float32
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model


def _load_merged(folder: Path, device: str, trust_remote_code: bool) -> PreTrainedModel:
    """The merged folder as its users load it, in fp32."""
    with quiet():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=_ATTENTION,
            device_map={"": device},
            trust_remote_code=trust_remote_code,
        )
    return model.eval()


def _logits(model: nn.Module, prompts: Sequence[Sequence[int]], device: str) -> Iterator[Tensor]:
    """Logits of each prompt, (length, vocabulary) fp32 on the CPU; one at a time: nothing is padded."""
    for prompt in prompts:
        with torch.no_grad():
            logits: Tensor = model(input_ids=torch.tensor([list(prompt)], device=device)).logits[0]
        yield logits.float().cpu()
