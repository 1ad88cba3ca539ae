"""Whether an adapter fits a base, before a weight is read: shapes, rows of the vocabulary, ties."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from qlora_cli.errors import Fault, InputError
from qlora_cli.model.adapter import Adapter, Pair
from qlora_cli.model.base_files import BaseFiles


@dataclass(frozen=True)
class Fit:
    """How the tensors of adapter and base come together.

    Attributes:
        shapes: Shape of every tensor that the merged model stores, by name, in the base's order.
        changes_of: Stored tensor -> the name whose changes apply to it, where it stays tied to another.
        untied: Names that shared a tensor in the base and have their own in the merged model.
    """

    shapes: Mapping[str, tuple[int, ...]]
    changes_of: Mapping[str, str]
    untied: tuple[str, ...]


def fit(adapter: Adapter, base: BaseFiles) -> Fit:
    """Check every shape and decide what is tied.

    Args:
        adapter: Aligned to the base.
        base: The base's files.

    Returns:
        What the merged model will store.

    Raises:
        InputError: With every tensor that does not fit.
    """
    faults = [*_whole_faults(adapter, base), *_pair_faults(adapter, base), *_row_faults(adapter, base)]
    if faults:
        raise InputError(faults)
    untied, changes_of = _decide_ties(adapter, base)
    shapes = {name: _merged_shape(adapter, base, changes_of.get(name, name)) for name in base.tensors}
    shapes |= {name: _merged_shape(adapter, base, name) for name in untied}
    _check_vocabulary(adapter, base, shapes)
    return Fit(shapes, changes_of, untied)


def below(adapter: Adapter, base: BaseFiles, name: str) -> str | None:
    """Name under which the adapter stores the base's own values of a tensor, or None where it does not."""
    return next((n for n in (name, base.ties.get(name)) if n is not None and n in adapter.stored), None)


def _base_shape(adapter: Adapter, base: BaseFiles, name: str) -> tuple[int, ...]:
    own = below(adapter, base, name)
    return tuple(adapter.stored[own].shape) if own is not None else base.shapes[name]


def _merged_shape(adapter: Adapter, base: BaseFiles, name: str) -> tuple[int, ...]:
    return tuple(adapter.full[name].shape) if name in adapter.full else _base_shape(adapter, base, name)


def _decide_ties(adapter: Adapter, base: BaseFiles) -> tuple[tuple[str, ...], dict[str, str]]:
    """Of two tied tensors peft leaves the one that is not adapted as it was, so that they part.

    Not so where `ensure_weight_tying` is set, or only rows of the embedding were trained: then both change
    alike (`set_additional_trainable_modules`, peft 0.21).
    """
    untied = []
    changes_of: dict[str, str] = {}
    for name, source in base.ties.items():
        own, other = _changes(adapter, name), _changes(adapter, source)
        if not own and not other:
            continue
        follows = adapter.config.get("ensure_weight_tying") or (other == {"rows"} and own <= {"rows"})
        same = own == other == {"full"} and torch.equal(adapter.full[name], adapter.full[source])
        if follows or same:
            changes_of[source] = source if other else name
        else:
            untied.append(name)
    return tuple(untied), changes_of


def _changes(adapter: Adapter, name: str) -> set[str]:
    kinds = {"full": adapter.full, "rows": adapter.rows}
    found = {kind for kind, tensors in kinds.items() if name in tensors}
    return found | ({"pair"} if name.removesuffix(".weight") in adapter.pairs else set())


def _mismatch(adapter: Adapter, name: str, found: Sequence[int], wanted: Sequence[int]) -> Fault:
    return Fault(
        "shape-mismatch",
        f"`{name}` has shape {list(found)} in the adapter and {list(wanted)} in the base",
        file=str(adapter.folder),
        hint="is this the base that the adapter was trained on? `--base-path FOLDER` names another",
    )


def _whole_faults(adapter: Adapter, base: BaseFiles) -> Iterator[Fault]:
    resizable = {base.layout.embedding, base.layout.head}
    for name, tensor in [*adapter.stored.items(), *adapter.full.items()]:
        if name not in base.shapes:
            yield Fault("unmatched-tensors", f"the base has no tensor `{name}`", file=str(adapter.folder))
            continue
        found, wanted = list(tensor.shape), list(base.shapes[name])
        if found != wanted and not (name in resizable and found[1:] == wanted[1:]):
            yield _mismatch(adapter, name, found, wanted)


def _pair_faults(adapter: Adapter, base: BaseFiles) -> Iterator[Fault]:
    for module, pair in adapter.pairs.items():
        name = f"{module}.weight"
        if name not in base.shapes:
            yield Fault("unmatched-tensors", f"the base has no tensor `{name}`", file=str(adapter.folder))
            continue
        wanted = _base_shape(adapter, base, name)
        change = _change_shape(pair, is_transposed=module in base.layout.transposed)
        if change != wanted:
            yield _mismatch(adapter, name, change, wanted)
        elif pair.magnitude is not None and pair.magnitude.numel() != pair.b.shape[0]:
            yield _mismatch(
                adapter, f"{module}.lora_magnitude_vector", pair.magnitude.shape, pair.b.shape[:1]
            )
        if pair.bias is not None and base.shapes.get(f"{module}.bias") != tuple(pair.bias.shape):
            message = f"`{module}` has a LoRA bias, and no bias of that shape in the base to add it to"
            yield Fault("unmatched-tensors", message, file=str(adapter.folder))


def _change_shape(pair: Pair, is_transposed: bool) -> tuple[int, ...]:
    shape = (pair.b.shape[0], pair.a.shape[1])
    return shape[::-1] if pair.is_embedding or is_transposed else shape


def _row_faults(adapter: Adapter, base: BaseFiles) -> Iterator[Fault]:
    for name, rows in adapter.rows.items():
        if name not in base.shapes:
            yield Fault("unmatched-tensors", f"the base has no tensor `{name}`", file=str(adapter.folder))
            continue
        count, width = _base_shape(adapter, base, name)
        if rows.values.shape[1] != width:
            yield _mismatch(adapter, name, rows.values.shape, (len(rows.indices), width))
        if max(rows.indices, default=0) >= count:
            message = f"token {max(rows.indices)} was trained but `{name}` has {count} rows"
            yield Fault("shape-mismatch", message, file=str(adapter.folder))


def _check_vocabulary(adapter: Adapter, base: BaseFiles, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Embedding and head must have as many rows as each other."""
    names = [name for name in (base.layout.embedding, base.layout.head) if name is not None]
    rows = {name: shapes[at][0] for name in names if (at := _stored_name(base, shapes, name)) is not None}
    if len(set(rows.values())) > 1:
        counts = " and ".join(f"`{name}` {count} rows" for name, count in rows.items())
        hint = "the vocabulary was resized; name both in `modules_to_save`, so that both are saved"
        raise InputError(
            Fault(
                "shape-mismatch", f"merged, they would differ: {counts}", file=str(adapter.folder), hint=hint
            )
        )


def _stored_name(base: BaseFiles, shapes: Mapping[str, tuple[int, ...]], name: str) -> str | None:
    return next((n for n in (name, base.ties.get(name)) if n in shapes), None)
