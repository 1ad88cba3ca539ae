"""Sources → everything training needs of the data, with every fault of every row found in one go.

Rows are read, shaped, rendered and tokenized in chunks, so a tokenizer can use all cores and a large file
never stands in memory as Python objects. Nothing is raised for a bad row: the caller raises `InputError`
with the faults of a split, and `data check` lists them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from typing import Any

from qlora_cli.data.examples import Detected, Example, detect_format, to_example
from qlora_cli.data.rendering import Renderer
from qlora_cli.data.report import DataReport, SourceReport
from qlora_cli.data.rows import Conversations, TokenizedRows
from qlora_cli.data.sources import Source, read_rows
from qlora_cli.data.templates import (
    IGNORED,
    LOSS_ON,
    Noted,
    Tokenized,
    check_tokenizer,
    starts_as_generated,
    tokenize_all,
)
from qlora_cli.errors import Fault

OVERLONG = ("error", "drop", "truncate")
MAX_FAULTS = 1000  # of one source; a file of another kind has one in every row

_PROBED = 8  # rows of a source whose generation prompt is compared with what is trained
_CHUNK = 1000  # rows; enough for a tokenizer's threads, little in memory


@dataclass(frozen=True, slots=True)
class Split:
    """The examples of training or of validation.

    Attributes:
        examples: Ids and labels.
        conversations: The same examples as messages, index by index.
        report: What became of each row.
        faults: What is wrong, in file order; with any of them nothing may be trained.
        warnings: What should be said.
    """

    examples: TokenizedRows
    conversations: Conversations
    report: DataReport
    faults: tuple[Fault, ...] = ()
    warnings: tuple[Fault, ...] = ()


def prepare(
    sources: Sequence[Source], tokenizer: Any, *, loss_on: str, max_seq_len: int, overlong: str
) -> Split:
    """Read and tokenize sources.

    Args:
        sources: Files in the order of the recipe, which is the order of the examples.
        tokenizer: A fast tokenizer with a chat template.
        loss_on: `assistant` (every answer), `last_assistant` (the last one), `all` (every token).
        max_seq_len: Tokens of the longest example that is allowed.
        overlong: What becomes of a longer one: `error` (a fault), `drop`, or `truncate` (keep its first
            `max_seq_len` tokens, and drop it where no supervised token is among them).

    Returns:
        The examples with all faults; the caller decides what a fault stops.

    Raises:
        ValueError: If `loss_on` or `overlong` is none of the values above.
    """
    if loss_on not in LOSS_ON or overlong not in OVERLONG:
        raise ValueError(f"loss_on is one of {LOSS_ON}, overlong one of {OVERLONG}")
    reports = tuple(SourceReport(source.label, str(source.path)) for source in sources)
    report = DataReport(reports, loss_on, max_seq_len, overlong)
    faults = check_tokenizer(tokenizer)
    examples, conversations = TokenizedRows(), Conversations()
    if not faults:
        maker = _Maker(Renderer(tokenizer), report)
        for source, source_report in zip(sources, reports, strict=True):
            found: list[Fault] = []
            for example, tokens in maker.examples(source, source_report, found):
                conversations.append(example)
                examples.append(tokens)
            faults += sorted(found, key=_row_of)
    if not faults and not len(examples):
        text = "no row is left to train on" if sources else "no source is given"
        faults.append(Fault("no-rows-left", text, file=reports[0].path if reports else None))
    return Split(examples, conversations, report, tuple(faults), tuple(report.warnings()))


def split_fraction(split: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """Take a part of the examples out for validation.

    Which ones depends on their content and the seed alone, not on their order. Equal conversations
    stay together, so no validation row is also trained.

    Args:
        split: All examples.
        fraction: Share that is taken out, 0 to 1 (not included). 0 takes none; else at least one
            conversation is taken, and no more than the share where that is possible.
        seed: Another seed takes others.

    Returns:
        Training and validation. Where nothing is left to train on, training has a fault.

    Raises:
        ValueError: If `fraction` is not in [0, 1).
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction is 0 to 1 (not included), not {fraction}")
    groups: dict[bytes, list[int]] = {}
    for index, example in enumerate(split.conversations):
        groups.setdefault(conversation_key(example), []).append(index)
    order = sorted(groups, key=lambda key: sha256(seed.to_bytes(16, "little", signed=True) + key).digest())
    wanted = max(1, round(fraction * len(split.examples)))
    taken: set[int] = set()
    for key in order if fraction else ():
        if len(taken) + len(groups[key]) <= wanted:
            taken.update(groups[key])
    if fraction and groups and not taken:
        taken.update(groups[min(order, key=lambda key: len(groups[key]))])
    kept = [index for index in range(len(split.examples)) if index not in taken]
    training = _select(split, kept)
    validation = replace(_select(split, sorted(taken)), faults=(), warnings=())  # training carries them
    origins = tuple(example.origin for example in validation.conversations)
    training = replace(training, report=replace(training.report, held_out=origins))
    if fraction and not kept:
        message = f"`data.validation.fraction` {fraction} leaves nothing to train on"
        hint = "add rows, or leave `data.validation` out"
        fault = Fault("nothing-to-split", message, key="data.validation.fraction", hint=hint)
        training = replace(training, faults=(*training.faults, fault))
    return training, validation


def conversation_key(example: Example) -> bytes:
    """A digest that equal conversations share: messages and tools, whatever the spacing of their JSON.

    Args:
        example: The conversation.
    """
    content = [example.messages, example.tools]
    return sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).digest()


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the examples of sources under one set of rules."""

    renderer: Renderer
    rules: DataReport

    def examples(
        self, source: Source, report: SourceReport, faults: list[Fault]
    ) -> Iterator[tuple[Example, Tokenized]]:
        """The examples of one source, in order; fills its report and the faults."""
        conversations = self._conversations(source, report, faults)
        while chunk := list(islice(conversations, _CHUNK)):
            by_row = {example.origin.row: example for example in chunk}
            for noted in tokenize_all(chunk, self.renderer, self.rules.loss_on, faults):
                tokens = self._fit(noted, report, faults)
                if tokens is not None:
                    example = by_row[tokens.origin.row]
                    if report.num_used < _PROBED and not starts_as_generated(example, tokens, self.renderer):
                        report.note("prompt-differs", tokens.origin.row)
                    _count(tokens, report)
                    yield example, tokens
            if len(faults) > MAX_FAULTS:
                break
        if len(faults) > MAX_FAULTS:
            faults.sort(key=_row_of)
            del faults[MAX_FAULTS:]
            message = f"has more than {MAX_FAULTS:,} faults; the rest is not listed"
            faults.append(Fault("too-many-faults", message, file=report.path, line=faults[-1].line))

    def _conversations(self, source: Source, report: SourceReport, faults: list[Fault]) -> Iterator[Example]:
        """The rows of a source that can be shaped into a conversation."""
        detected: Detected | None = None
        unread: list[Fault] = []
        for row in read_rows(source, unread):
            report.num_read += 1
            if detected is None:
                detected = detect_format(row, source.format, faults)
                if detected is None:
                    continue
                report.format, report.reason = detected.format, detected.reason
            example = to_example(row, detected.format, faults, report.name)
            if example is not None:
                yield example
            if len(faults) + len(unread) > MAX_FAULTS:
                break
        report.num_read += sum(fault.line is not None for fault in unread)  # one fault a row
        faults += unread

    def _fit(self, noted: Noted, report: SourceReport, faults: list[Fault]) -> Tokenized | None:
        """Apply `max_seq_len` to an example and note what is to be said about it."""
        tokens, row = noted.example, noted.example.origin.row
        limit = self.rules.max_seq_len
        if len(tokens.input_ids) > limit and self.rules.overlong == "error":
            message = f"has {len(tokens.input_ids)} tokens, `data.max_seq_len` is {limit}"
            hint = "raise `data.max_seq_len`, or set `data.overlong` to drop or truncate"
            faults.append(tokens.origin.fault("overlong", message, hint=hint))
            return None
        if len(tokens.input_ids) > limit and self.rules.overlong == "drop":
            report.note("overlong-dropped", row)
            return None
        if len(tokens.input_ids) > limit:
            tokens = replace(tokens, input_ids=tokens.input_ids[:limit], labels=tokens.labels[:limit])
            if all(label == IGNORED for label in tokens.labels):
                report.note("truncated-to-nothing", row)
                return None
            report.note("overlong-truncated", row)
        for code in noted.notes:
            report.note(code, row)
        return tokens


def _row_of(fault: Fault) -> int:
    """Sorts faults in file order; those of the whole file come first."""
    return fault.line or 0


def _count(tokens: Tokenized, report: SourceReport) -> None:
    """Add an example to the numbers of its source."""
    report.num_used += 1
    report.num_tokens += len(tokens.input_ids)
    report.num_supervised += tokens.num_supervised
    report.longest = max(report.longest, len(tokens.input_ids))


def _select(split: Split, indices: Sequence[int]) -> Split:
    """A part of a split, its report counting what is used of it."""
    examples = split.examples.select(indices)
    reports = tuple(
        replace(report, num_used=0, num_tokens=0, num_supervised=0, longest=0)
        for report in split.report.sources
    )
    first = {(report.path, report.name): report for report in reversed(reports)}  # a file may be listed twice
    for tokens in examples:
        _count(tokens, first[tokens.origin.file, tokens.source])
    report = replace(split.report, sources=reports)
    return replace(split, examples=examples, conversations=split.conversations.select(indices), report=report)
