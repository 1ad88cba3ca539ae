"""Recipe files: reading, finding by name, and merging what `include` lists.

Parts are merged first, in the order listed, and later ones win; mappings merge key by key, lists and
single values are replaced. A part that is reached twice is read once. Every file that can be read is
read, so that the faults of all of them come out together. This module must not know the schema.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from qlora_cli import shipped
from qlora_cli.config.nodes import Entry, Items, Mapping, Mark, Node, Scalar, parse
from qlora_cli.errors import Fault

MAX_BYTES = 1 << 20  # a recipe has some hundred lines; this is no recipe
MAX_INCLUDE_LEVELS = 32


@dataclass(slots=True)
class Merged:
    """One recipe with its parts folded in."""

    root: Mapping
    faults: list[Fault] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # as shown, in the order read; the recipe first
    is_complete: bool = (
        True  # False where a file could not be read, so that keys may be missing for that reason
    )


def merge(under: Mapping, over: Mapping, keeps_marks: bool = False) -> Mapping:
    """Lay one mapping over another.

    Args:
        under: What gives way.
        over: What wins.
        keeps_marks: Sections that both have keep the place they have in `under`, else in `over`.
    """
    entries = dict(under.entries)
    for name, entry in over.entries.items():
        below = entries.get(name)
        if below is not None and isinstance(below.node, Mapping) and isinstance(entry.node, Mapping):
            mark = below.mark if keeps_marks else entry.mark
            entry = Entry(mark, merge(below.node, entry.node, keeps_marks))
        entries[name] = entry
    return Mapping(under.mark if keeps_marks else over.mark, entries)


def find(config: str) -> tuple[Path, str] | Fault:
    """The file that `--config` means.

    Args:
        config: A path, or the name of a shipped recipe.

    Returns:
        The file and the name to show for it, or why there is none.
    """
    path = Path(os.path.expanduser(config))
    if os.path.isfile(path) or (os.path.exists(path) and not os.path.isdir(path)):
        return path, config
    named = shipped.find_recipe(config)
    if named is not None:
        return named, _shown(named)
    if os.path.isdir(path):
        hint = f"its recipe is `{path / 'recipe.yaml'}`" if os.path.isfile(path / "recipe.yaml") else None
        return Fault("recipe-missing", f"`{config}` is a folder, not a recipe", config, hint=hint)
    return Fault("recipe-missing", f"there is no recipe `{config}`", config, hint=_near_recipe(path))


def load(path: Path, shown: str) -> Merged:
    """Read a recipe and everything it includes."""
    reader = _Reader()
    root = reader.read(path, shown, None, [])
    return Merged(root or Mapping(Mark(shown, 1, 1)), reader.faults, reader.files, reader.is_complete)


class _Reader:
    """Reads files once each; `chain` is the way from the recipe to the file at hand."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.files: list[str] = []
        self.is_complete = True
        self.done: dict[str, Mapping | None] = {}

    def read(
        self, path: Path, shown: str, named_at: Mark | None, chain: list[tuple[str, str]]
    ) -> Mapping | None:
        """A file with its parts merged in, None where it cannot be read; `named_at` is its `include` item."""
        identity = os.path.realpath(path)
        if identity in self.done:
            return self.done[identity]
        self.files.append(shown)
        before = len(self.faults)
        root = self._parse(path, shown, named_at)
        merged = None
        if root is not None:
            merged = self._with_parts(root, path.parent, shown, [*chain, (identity, shown)])
        self.is_complete &= root is not None and all(f.code in _HARMLESS for f in self.faults[before:])
        self.done[identity] = merged
        return merged

    def _parse(self, path: Path, shown: str, named_at: Mark | None) -> Mapping | None:
        """The root mapping of one file."""
        text = read_text(path, shown)
        if isinstance(text, Fault):
            self.faults.append(text if named_at is None else _at(text, named_at))
            return None
        root, faults = parse(text, shown, Path(os.path.abspath(path)).parent)
        self.faults += faults
        if root is None and not faults:
            self.faults.append(Fault("empty-recipe", "the file holds no keys", shown, 1, 1,
                                     hint="`qlora recipes copy NAME` writes one to start from"))  # fmt: skip
        elif root is not None and not isinstance(root, Mapping):
            what = "a list" if isinstance(root, Items) else "a single value"
            mark = root.mark
            self.faults.append(Fault("not-a-mapping", f"a recipe is a mapping of sections, this is {what}",
                                     *mark.where, hint="begin with `model:`"))  # fmt: skip
        return root if isinstance(root, Mapping) else None

    def _with_parts(self, root: Mapping, folder: Path, shown: str, chain: list[tuple[str, str]]) -> Mapping:
        """A root mapping laid over the parts that it includes."""
        own = Mapping(root.mark, {name: entry for name, entry in root.entries.items() if name != "include"})
        below = Mapping(root.mark)
        if "include" in root.entries:
            for item in self._items(root.entries["include"].node):
                part = self._part(item, folder, shown, chain)
                if part is not None:
                    below = merge(below, part)
        return merge(below, own)

    def _items(self, node: Node) -> list[Scalar]:
        """The files that `include` lists."""
        listed = node.items if isinstance(node, Items) else [node]
        files = []
        for item in listed:
            mark = item.mark
            if not isinstance(item, Scalar):
                self.faults.append(Fault("wrong-type", "`include` takes paths only", *mark.where,
                                         "include", "a path or a list of paths"))  # fmt: skip
            elif item.text or not item.plain:
                files.append(item)
        return files

    def _part(self, item: Scalar, folder: Path, shown: str, chain: list[tuple[str, str]]) -> Mapping | None:
        """One included file, None where it is missing or already on the way here."""
        named = Path(os.path.expanduser(item.text))
        path, name = folder / named, os.path.normpath(os.path.join(os.path.dirname(shown), named))
        if not os.path.exists(path):
            part = shipped.find_part(item.text)
            if part is None:
                self.is_complete = False
                self.faults.append(_missing_part(item))
                return None
            path, name = part, _shown(part)
        identity = os.path.realpath(path)
        on_chain = [link for link, _ in chain]
        where = item.mark.where
        if identity in on_chain:
            names = [link_name for _, link_name in chain[on_chain.index(identity) :]]
            cycle = " -> ".join([*names, names[0]])
            self.faults.append(Fault("include-cycle", f"include cycle: {cycle}", *where, "include",
                                     hint="a part never includes what includes it"))  # fmt: skip
            return None
        if len(chain) >= MAX_INCLUDE_LEVELS:
            self.faults.append(
                Fault("too-deep", f"includes nest deeper than {MAX_INCLUDE_LEVELS} files", *where)
            )
            return None
        return self.read(path, name, item.mark, chain)


# Faults after which a file's keys are all known all the same.
_HARMLESS = frozenset({"yaml-tag"})


def read_text(path: Path, shown: str) -> str | Fault:
    """The text of a recipe file without byte order mark, or why it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Fault("recipe-missing", f"there is no file `{shown}`", shown)
    except IsADirectoryError:
        return Fault("recipe-unreadable", f"`{shown}` is a folder", shown)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return Fault("recipe-unreadable", f"cannot read `{shown}`: {reason.lower()}", shown)
    if len(data) > MAX_BYTES:
        return Fault("too-large", f"larger than {MAX_BYTES >> 20} MiB, so this is no recipe", shown)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Fault("not-utf8", "the text is UTF-16, not UTF-8", shown, 1, 1, hint="save the file as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
        lines = before.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return Fault("not-utf8", f"byte 0x{data[error.start]:02x} is not UTF-8", shown, len(lines),
                     len(lines[-1]) + 1, hint="save the file as UTF-8")  # fmt: skip


def _at(fault: Fault, mark: Mark) -> Fault:
    """A file's fault, shown where an `include` names the file unless it has a line of its own."""
    if fault.line is not None:
        return fault
    code = "include-missing" if fault.code == "recipe-missing" else fault.code
    return Fault(code, fault.message, *mark.where, "include", hint=fault.hint)


def _missing_part(item: Scalar) -> Fault:
    """The fault of an include that names nothing."""
    names = [*shipped.part_paths(), *shipped.recipe_paths()]
    stem = item.text.removesuffix(".yaml")
    near = get_close_matches(stem, names, 1) or [n for n in names if n.rpartition("/")[2] == Path(stem).name]
    hint = (
        f"did you mean the shipped part `{near[0]}`?" if near else "a path counts from the file that names it"
    )
    mark = item.mark
    return Fault("include-missing", f"there is no file `{item.text}`", *mark.where, "include",
                 hint=hint)  # fmt: skip


def _near_recipe(path: Path) -> str:
    """The hint for a recipe that is not there: a shipped one, or a file beside, of a similar name."""
    shipped_near = get_close_matches(path.stem, shipped.recipe_paths(), 1)
    if shipped_near:
        return f"did you mean the shipped recipe `{shipped_near[0]}`?"
    try:
        beside = [name for name in os.listdir(path.parent) if name.endswith((".yaml", ".yml"))]
    except (OSError, ValueError):
        beside = []
    near = get_close_matches(path.name, beside, 1)
    if near:
        return f"did you mean `{path.parent / near[0]}`?"
    return "give a path, or a name that `qlora recipes list` shows"


def _shown(path: Path) -> str:
    """A shipped file's path, short where it lies below the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
