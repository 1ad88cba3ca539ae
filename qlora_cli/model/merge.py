"""Folds an adapter into its base, and proves the folder it wrote before that appears.

Every check that needs no weight comes before the first byte is written; the comparison of logits comes before
the folder takes its name. So there is either a proved merge under that name, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qlora_cli.errors import Fault, InputError, RunError
from qlora_cli.model.adapter import Adapter, align, read_adapter
from qlora_cli.model.base_choice import BASES, BaseChoice, choose_base
from qlora_cli.model.base_files import BaseFiles, open_base
from qlora_cli.model.fit import Fit, fit
from qlora_cli.model.fold import Fold
from qlora_cli.model.load import DTYPES
from qlora_cli.model.merged_folder import (
    appearing,
    check_output,
    check_tokenizer,
    copy_companions,
    find_tokenizer,
    merged_config,
    versions,
    write_card,
)
from qlora_cli.model.shards import plan_shards, write_shards
from qlora_cli.model.verify import EFFECT_EXACT, LogitComparison, compare_logits
from qlora_cli.run_folder import ADAPTER_WEIGHTS, sha256

OUTPUT_DTYPES: Mapping[str, torch.dtype | None] = {"auto": None, **DTYPES}  # None: as the base stores it

MAX_NEW_TOKENS = 64  # added or trained on their own, that the proof looks at

# Compared where the caller has no prompts from the validation data: prose, a question, code, numbers.
BUILT_IN_PROMPTS = (
    "The river rises in the hills and runs for two hundred miles before it reaches the sea.",
    "What is the capital of France, and which river runs through it?",
    "def area(width: float, height: float) -> float:\n    return width * height\n",
    "Turn this into a record: Anna bought 12 apples on 3 May 2021 for 4.80 euros.",
)


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What `merge` did.

    Attributes:
        output: The merged folder.
        base: `nf4`, `fp4` or `original`.
        base_reason: Why that base.
        base_model: Folder or hub id of the base.
        dtype: Dtype that most of the merged weights have.
        tensors: Number of tensors in the merged model.
        changed_tensors: Number that differ from the base as chosen.
        untied: Tensors that the base shared and the merged model stores apart.
        notes: What a person should know, one sentence each.
        comparison: The proof.
    """

    output: Path
    base: str
    base_reason: str
    base_model: str
    dtype: str
    tensors: int
    changed_tensors: int
    untied: tuple[str, ...]
    notes: tuple[str, ...]
    comparison: LogitComparison

    def as_json(self) -> dict[str, Any]:
        """The document that `qlora merge --json` prints."""
        return {
            "output": str(self.output),
            "base": self.base,
            "base_reason": self.base_reason,
            "base_model": self.base_model,
            "dtype": self.dtype,
            "tensors": self.tensors,
            "changed_tensors": self.changed_tensors,
            "untied": list(self.untied),
            "notes": list(self.notes),
            **self.comparison.as_json(),
        }


def merge(
    adapter_dir: Path,
    output: Path,
    *,
    base: str = "auto",
    base_path: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    prompts: Sequence[Sequence[int]] = (),
    trust_remote_code: bool = False,
    on_shard: Callable[[int, int, str], None] | None = None,
) -> MergeReport:
    """Merge an adapter into its base and prove the result.

    Args:
        adapter_dir: A folder in PEFT format.
        output: The folder to write; it must not exist, or be empty.
        base: `auto`: what the adapter was trained on by its own record, `original` where it has none; `nf4`:
            the base's weights through 4 bits; `original`: as they are stored.
        base_path: Folder or hub id of the base; None: the one that the adapter names.
        dtype: `auto` (each tensor keeps its own), `fp32`, `bf16` or `fp16`.
        device: Where to compute, e.g. `cpu` or `cuda`.
        prompts: Token ids to compare logits on; empty: built-in texts.
        trust_remote_code: Whether code that comes with the base may run.
        on_shard: Called with (shards written, shards in all, file name).

    Returns:
        What was done, and the proof.

    Raises:
        InputError: If adapter, base and options do not go together; nothing was written.
        RunError: If nothing would change, the disk is full, or the proof does not hold; no folder is left.
    """
    _check_options(base, dtype)
    adapter = read_adapter(adapter_dir)
    files = _open(adapter, base_path, trust_remote_code)
    adapter = align(adapter, files.shapes)
    choice = choose_base(base, adapter, files)
    fitting = fit(adapter, files)
    if adapter.is_without_effect:
        raise RunError(_nothing_changed(adapter, "every `lora_B` of the adapter is zero"))
    tokenizer = find_tokenizer(adapter.folder, files.folder)
    check_tokenizer(tokenizer, _rows(files, fitting), trust_remote_code)
    fold = Fold(adapter, files, fitting, choice.quantization, OUTPUT_DTYPES[dtype], device)
    check_output(output, sum(tensor.num_bytes for tensor in fold.plan()))
    out_dtype = OUTPUT_DTYPES[dtype] or files.dtype
    with appearing(output) as folder:
        _write(folder, adapter, files, fitting, fold, out_dtype, on_shard)
        comparison = compare_logits(
            adapter,
            files,
            folder,
            quantization=choice.quantization,
            dtype=out_dtype,
            prompts=[
                *(prompts or _built_in(folder, trust_remote_code)),
                *_new_tokens(adapter, files, fitting),
            ],
            device=device,
            trust_remote_code=trust_remote_code,
        )
        _require(comparison, output, out_dtype)
        report = _report(output, choice, files, fitting, fold, out_dtype, comparison)
        _write_card(folder, report, adapter)
    return report


def _write(
    folder: Path,
    adapter: Adapter,
    files: BaseFiles,
    fitting: Fit,
    fold: Fold,
    dtype: torch.dtype,
    on_shard: Callable[[int, int, str], None] | None,
) -> None:
    """Write everything but the card."""
    write_shards(folder, plan_shards(fold.plan()), fold.value, on_shard)
    if not fold.changed:
        raise RunError(_nothing_changed(adapter, f"the change is below the precision of {_name(dtype)}"))
    config = merged_config(files, dtype, _rows(files, fitting), _is_tied(files, fitting))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    copy_companions(folder, adapter.folder, files)


def _report(
    output: Path,
    choice: BaseChoice,
    files: BaseFiles,
    fitting: Fit,
    fold: Fold,
    dtype: torch.dtype,
    comparison: LogitComparison,
) -> MergeReport:
    return MergeReport(
        output=output,
        base=choice.name,
        base_reason=choice.reason,
        base_model=files.name,
        dtype=_name(dtype),
        tensors=len(fitting.shapes),
        changed_tensors=len(fold.changed),
        untied=fitting.untied,
        notes=tuple(_notes(fold, fitting, dtype, comparison)),
        comparison=comparison,
    )


def _check_options(base: str, dtype: str) -> None:
    faults = [
        Fault("unknown-value", f"`{option}` is `{value}`", key=option, accepted=", ".join(accepted))
        for option, value, accepted in (("--base", base, BASES), ("--dtype", dtype, tuple(OUTPUT_DTYPES)))
        if value not in accepted
    ]
    if faults:
        raise InputError(faults)


def _open(adapter: Adapter, base_path: str | None, trust_remote_code: bool) -> BaseFiles:
    name = base_path or adapter.base_name
    if name is None:
        message = "the adapter does not say which base it was trained on"
        raise InputError(
            Fault("base-not-found", message, file=str(adapter.folder), hint="`--base-path FOLDER` names it")
        )
    return open_base(name, None if base_path else adapter.revision, trust_remote_code)


def _rows(files: BaseFiles, fitting: Fit) -> int:
    """Rows of the embedding in the merged model, which may store it under the name it is tied to."""
    name = files.layout.embedding
    return fitting.shapes[name if name in fitting.shapes else files.ties[name]][0]


def _is_tied(files: BaseFiles, fitting: Fit) -> bool | None:
    head = files.layout.head
    if head is None:
        return None
    pair = {head, files.layout.embedding}
    return any({name, source} == pair and name not in fitting.untied for name, source in files.ties.items())


def _nothing_changed(adapter: Adapter, why: str) -> Fault:
    message = f"nothing was changed: {why}"
    return Fault("nothing-changed", message, file=str(adapter.folder / ADAPTER_WEIGHTS))


def _built_in(folder: Path, trust_remote_code: bool) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return [list(tokenizer(text)["input_ids"]) for text in BUILT_IN_PROMPTS]


def _new_tokens(adapter: Adapter, files: BaseFiles, fitting: Fit) -> list[list[int]]:
    """A prompt of the tokens that were added or trained on their own; other prompts need not have them."""
    tokens = set(range(files.shapes[files.layout.embedding][0], _rows(files, fitting)))
    tokens |= {index for rows in adapter.rows.values() for index in rows.indices}
    return [sorted(tokens)[:MAX_NEW_TOKENS]] if tokens else []


def _require(comparison: LogitComparison, output: Path, dtype: torch.dtype) -> None:
    if comparison.holds:
        return
    message = f"the merged model is not base + adapter: {'; '.join(comparison.failures)}"
    where = f"worst on prompt {comparison.worst_prompt + 1} with KL {comparison.worst_kl:.3g}"
    hint = "`--dtype fp32` keeps what 16 bits round away" if dtype.itemsize == 2 else None
    raise RunError(
        Fault("merge-not-proved", f"{message} ({where}); no folder was written", file=str(output), hint=hint)
    )


def _notes(fold: Fold, fitting: Fit, dtype: torch.dtype, comparison: LogitComparison) -> list[str]:
    notes = []
    lost = 1 - comparison.effect_ratio
    if EFFECT_EXACT < lost <= comparison.tolerance.effect and dtype.itemsize == 2:
        kept = "`--dtype fp32` keeps all of it"
        notes.append(f"rounding to {_name(dtype)} lost {lost:.1%} of the adapter's effect; {kept}")
    if fold.swallowed:
        notes.append(
            f"{len(fold.swallowed)} adapted tensors are unchanged in {_name(dtype)}: their change is below "
            "its precision; `--dtype fp32` keeps it"
        )
    if fitting.untied:
        notes.append(
            f"stored on its own, since only one of two tied tensors was trained: {', '.join(fitting.untied)}"
        )
    return notes


def _write_card(folder: Path, report: MergeReport, adapter: Adapter) -> None:
    is_folder = Path(report.base_model).expanduser().is_dir()
    name = Path(report.base_model).name if is_folder else report.base_model
    revision = f" at revision {adapter.revision}" if adapter.revision and not is_folder else ""
    proof = report.comparison
    facts = [
        ("base model", f"`{name}`{revision}"),
        ("weights of the base", f"{report.base}; {report.base_reason}"),
        ("adapter", f"LoRA, rank {adapter.config['r']}, alpha {adapter.config['lora_alpha']}"),
        (f"sha256 of `{ADAPTER_WEIGHTS}`", f"`{sha256(adapter.folder / ADAPTER_WEIGHTS)}`"),
        ("changed tensors", f"{report.changed_tensors} of {report.tensors}"),
        ("dtype", report.dtype),
        ("logits against base + adapter, both in fp32", f"largest difference {proof.max_abs_diff:.3g}"),
        (
            "mean KL divergence",
            f"{proof.mean_kl:.3g} nats a token (the adapter's own effect: {proof.adapter_kl:.3g})",
        ),
        ("same next token", f"{proof.top1_agreement:.2%} of {proof.positions} positions"),
        ("made with", ", ".join(f"{n} {v}" for n, v in versions(("qlora", "transformers", "torch")).items())),
    ]
    write_card(folder, name, None if is_folder else report.base_model, facts)


def _name(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
