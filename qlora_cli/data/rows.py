"""Examples held in flat arrays: a sequence of a million short rows in some hundred MB instead of GBs.

A `Tokenized` or `Example` of Python objects costs 28 bytes a token and more; here a token costs four bytes
and one for its label. Both classes make the object anew at each access, so what they return may be changed.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import overload

from qlora_cli.data.examples import Example
from qlora_cli.data.sources import Origin
from qlora_cli.data.templates import IGNORED, Tokenized


class _Places:
    """File, row and source of each example, names stored once."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], int] = {}
        self._name_of = array("i")
        self._rows = array("q")

    def append(self, origin: Origin, source: str) -> None:
        """Add the place of one more example."""
        self._name_of.append(self._names.setdefault((origin.file, source), len(self._names)))
        self._rows.append(origin.row)

    def __getitem__(self, index: int) -> tuple[Origin, str]:
        file, source = list(self._names)[self._name_of[index]]
        return Origin(file, self._rows[index]), source

    def __len__(self) -> int:
        return len(self._rows)


class TokenizedRows(Sequence[Tokenized]):
    """Tokenized examples, appended once and read in any order."""

    def __init__(self, examples: Iterable[Tokenized] = ()) -> None:
        """Hold the examples.

        Args:
            examples: What to start with.
        """
        self._ids = array("i")
        self._is_supervised = bytearray()
        self._ends = array("q", [0])
        self._places = _Places()
        for example in examples:
            self.append(example)

    def append(self, example: Tokenized) -> None:
        """Add an example.

        Args:
            example: Its labels are -100 or equal to the id at the same place.
        """
        self._ids.extend(example.input_ids)
        self._is_supervised.extend(label != IGNORED for label in example.labels)
        self._ends.append(len(self._ids))
        self._places.append(example.origin, example.source)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each example."""
        return [end - start for start, end in pairwise(self._ends)]

    @property
    def num_supervised(self) -> int:
        """Supervised tokens of all examples together."""
        return self._is_supervised.count(1)

    def select(self, indices: Iterable[int]) -> TokenizedRows:
        """Copy some of the examples.

        Args:
            indices: Which, in the order wanted.
        """
        return TokenizedRows(self[index] for index in indices)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Tokenized: ...
    @overload
    def __getitem__(self, index: slice) -> TokenizedRows: ...
    def __getitem__(self, index: int | slice) -> Tokenized | TokenizedRows:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        index = range(len(self))[index]
        start, end = self._ends[index], self._ends[index + 1]
        ids = self._ids[start:end].tolist()
        flags = self._is_supervised[start:end]
        labels = [token if flag else IGNORED for token, flag in zip(ids, flags, strict=True)]
        return Tokenized(ids, labels, *self._places[index])

    def __iter__(self) -> Iterator[Tokenized]:
        return (self[index] for index in range(len(self)))


class Conversations(Sequence[Example]):
    """Examples as one text of JSON each, parsed when they are read."""

    def __init__(self, examples: Iterable[Example] = ()) -> None:
        """Hold the examples.

        Args:
            examples: What to start with.
        """
        self._texts: list[bytes] = []
        self._places = _Places()
        for example in examples:
            self.append(example)

    def append(self, example: Example) -> None:
        """Add an example."""
        content = [example.messages, example.trained, example.tools]
        self._texts.append(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode())
        self._places.append(example.origin, example.source)

    def select(self, indices: Iterable[int]) -> Conversations:
        """Copy some of the examples.

        Args:
            indices: Which, in the order wanted.
        """
        return Conversations(self[index] for index in indices)

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Conversations: ...
    def __getitem__(self, index: int | slice) -> Example | Conversations:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        index = range(len(self))[index]
        messages, trained, tools = json.loads(self._texts[index])
        return Example(messages, tuple(trained), tools, *self._places[index])

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))
