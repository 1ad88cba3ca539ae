"""What each tensor of a merged model is: the base as trained on plus the adapter's change, rounded once.

`W' = W + scaling * B A` in fp32, where `W` is the stored weight or, for a module that was trained in 4 bits,
the value that its 4-bit codes stand for. Reads one tensor of the base at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qlora_cli.errors import Fault, RunError
from qlora_cli.model.adapter import Adapter, Pair
from qlora_cli.model.base_files import BaseFiles
from qlora_cli.model.fit import Fit, below
from qlora_cli.model.load import DTYPES
from qlora_cli.model.nf4 import BLOCK_SIZE
from qlora_cli.model.shards import Planned


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the base was loaded for training, in 4 bits.

    Attributes:
        scheme: `nf4` or `fp4`.
        double_quant: Whether absmax was quantised itself.
        modules: Modules whose weight was quantised.
        skip_modules: Names that were kept out of it, as the loader was told.
        compute_dtype: `fp32`, `bf16` or `fp16`: every weight was cast to it first (`load_base`).
    """

    scheme: str
    double_quant: bool
    modules: frozenset[str]
    skip_modules: tuple[str, ...] = ()
    compute_dtype: str = "fp32"


def dequantised(weight: Tensor, quantization: Quantization, device: str) -> Tensor:
    """What a weight is worth once it was quantised to 4 bits: bitsandbytes' own codes, absmax and nesting.

    A `Linear4bit` computes with its codes dequantised in the compute dtype, whatever dtype it was quantised
    from (`gemm_4bit`, bitsandbytes 0.50). Here they are dequantised in fp32, so that the sum with the adapter
    is rounded once, to the output dtype, instead of twice.

    Args:
        weight: (out, in) as it was loaded.
        quantization: As the adapter was trained.
        device: Where to quantise.

    Returns:
        (out, in) fp32 on `device`.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(
        weight.to(device).contiguous(),
        blocksize=BLOCK_SIZE,
        compress_statistics=quantization.double_quant,
        quant_type=quantization.scheme,
    )
    state.dtype = torch.float32
    values: Tensor = dequantize_4bit(codes, state)
    return values


def add_pair(weight: Tensor, pair: Pair) -> Tensor:
    """Fold a low-rank change into a weight.

    Args:
        weight: fp32, (out, in), or (num_embeddings, embedding_dim) for an embedding.
        pair: The change.

    Returns:
        `weight + scaling * b @ a`; with DoRA each row (of an embedding: each column) is brought to its
        magnitude. Shape and dtype as `weight`.
    """
    change = pair.scaling * (pair.b.to(weight) @ pair.a.to(weight))
    merged = weight + (change.T if pair.is_embedding else change)
    if pair.magnitude is None:
        return merged
    dim = 0 if pair.is_embedding else 1
    length: Tensor = torch.linalg.vector_norm(merged, dim=dim, keepdim=True)
    return merged * (pair.magnitude.to(weight).reshape(length.shape) / length)


class Fold:
    """Computes the tensors of the merged model, one by one, and remembers what became of them.

    Attributes:
        changed: Names of the tensors computed so far that differ from the base as chosen, in the output
            dtype.
        swallowed: Names of adapted tensors that the output dtype rounded back to the base.
    """

    def __init__(
        self,
        adapter: Adapter,
        base: BaseFiles,
        fit: Fit,
        quantization: Quantization | None,
        dtype: torch.dtype | None,
        device: str,
    ) -> None:
        """Take the parts; nothing is read yet.

        Args:
            adapter: Aligned to the base.
            base: The base's files.
            fit: How the two come together.
            quantization: How the base was quantised in training; None for its weights as stored.
            dtype: Output dtype of floating-point tensors; None keeps each tensor's own.
            device: Where to compute.
        """
        self._adapter = adapter
        self._base = base
        self._fit = fit
        self._quantization = quantization
        self._dtype = dtype
        self._device = device
        self.changed: list[str] = []
        self.swallowed: list[str] = []

    def plan(self) -> list[Planned]:
        """Every tensor of the merged model with its dtype and shape, in the base's order."""
        return [Planned(name, self._out_dtype(name), shape) for name, shape in self._fit.shapes.items()]

    def value(self, name: str) -> Tensor:
        """Compute one tensor of the merged model.

        Args:
            name: One of the planned names.

        Returns:
            Its values, with the dtype and shape that was planned.

        Raises:
            RunError: If a value is not finite in the output dtype, while the base's are.
        """
        base = self._base_value(name)
        merged = self._apply(name, base)
        out_dtype = self._out_dtype(name)
        out = merged.to(out_dtype)
        if out_dtype.is_floating_point and not torch.isfinite(out).all() and torch.isfinite(base).all():
            kind = str(out_dtype).removeprefix("torch.")
            message = f"`{name}` has values beyond the range of {kind} after the merge"
            raise RunError(
                Fault("not-finite", message, hint="`--dtype bf16` and `--dtype fp32` have the range")
            )
        if merged is not base:
            is_same_shape = base.shape == merged.shape
            if not is_same_shape or not torch.equal(base.to(out_dtype), out):
                self.changed.append(name)
            elif not torch.equal(base, merged):
                self.swallowed.append(name)
        return out

    def _base_value(self, name: str) -> Tensor:
        """The base's tensor as chosen: as stored, or as it was loaded for training."""
        own = below(self._adapter, self._base, name)
        stored = self._adapter.stored[own] if own is not None else self._base.read(name)
        stored = stored.to(self._device)
        module, _, parameter = name.rpartition(".")
        quantization = self._quantization
        if quantization is None:
            return stored
        if stored.is_floating_point():
            stored = stored.to(DTYPES[quantization.compute_dtype])
        if parameter != "weight" or module not in quantization.modules:
            return stored
        if module in self._base.layout.transposed:  # transformers quantises the (out, in) form of a Conv1D
            return dequantised(stored.T, quantization, self._device).T
        return dequantised(stored, quantization, self._device)

    def _apply(self, name: str, base: Tensor) -> Tensor:
        """The merged tensor in fp32, or `base` itself where the adapter does not concern it."""
        key = self._fit.changes_of.get(name, name)
        module, _, parameter = key.rpartition(".")
        merged = base
        if key in self._adapter.full:
            merged = self._adapter.full[key].to(self._device, torch.float32)
        pair = self._adapter.pairs.get(module)
        if pair is not None and parameter == "weight":
            weight = merged.to(torch.float32)
            is_transposed = module in self._base.layout.transposed
            merged = add_pair(weight.T, pair).T if is_transposed else add_pair(weight, pair)
        elif pair is not None and parameter == "bias" and pair.bias is not None:
            merged = merged.to(torch.float32) + pair.scaling * pair.bias.to(self._device, torch.float32)
        if key in self._adapter.rows:
            rows = self._adapter.rows[key]
            index = torch.tensor(rows.indices, device=self._device)
            merged = merged.to(torch.float32).index_copy(
                0, index, rows.values.to(self._device, torch.float32)
            )
        return merged

    def _out_dtype(self, name: str) -> torch.dtype:
        stored = self._base.tensors[self._base.ties.get(name, name)].dtype
        return self._dtype if self._dtype is not None and stored.is_floating_point else stored
