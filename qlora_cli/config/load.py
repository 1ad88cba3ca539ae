"""A recipe file and `--set` options → a frozen `Recipe`, or every fault at once in file order.

The way: files are read and merged (`files`), overrides laid over (`overrides`), values typed by the schema
(`convert`), rules between keys applied (`rules`), and what depends on other keys is filled in here. Positions
stay at hand, so that a fault found later (a target module that matches nothing) can point at its line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qlora_cli.config import files, overrides, paths, rules
from qlora_cli.config.convert import Draft, convert
from qlora_cli.config.dump import dump_recipe
from qlora_cli.config.nodes import Items, Mapping, Mark, Node
from qlora_cli.config.schema import Optimizer, Recipe
from qlora_cli.errors import Fault, InputError

__all__ = ["LoadedRecipe", "dump_recipe", "load_recipe"]


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe together with where each key of it was written.

    Attributes:
        recipe: Every value, defaults included, paths absolute.
        path: The recipe file.
        notes: What the reader decided and a person should know, one sentence each.
    """

    recipe: Recipe
    path: Path
    notes: tuple[str, ...]
    _root: Mapping

    def mark(self, key: str) -> Mark:
        """Where the value of a dotted key stands, or its nearest ancestor that was written."""
        return _mark(self._root, key)

    def fault(
        self, code: str, key: str, message: str, accepted: str | None = None, hint: str | None = None
    ) -> Fault:
        """A fault about a key, with the position filled in.

        Args:
            code: Stable code, listed in `docs/errors.md`.
            key: Dotted key, list items by index: `data.train.0.path`.
            message: What is wrong, with the value found.
            accepted: Every accepted value, or the type and range.
            hint: What to write instead.
        """
        return Fault(code, message, *self.mark(key).where, key, accepted, hint)

    def located(self, fault: Fault) -> Fault:
        """The same fault at the place of its key, where it names a key and no file."""
        if fault.key is None or fault.file is not None:
            return fault
        file, line, column = self.mark(fault.key).where
        return replace(fault, file=file, line=line, column=column)


def load_recipe(config: str | Path, sets: Sequence[str] = (), *, check_files: bool = True) -> LoadedRecipe:
    """Read a recipe.

    Args:
        config: A path, or the name of a shipped recipe.
        sets: `key=value` texts of `--set`, later ones win.
        check_files: Whether data files, model and adapter folders that are named have to exist; false for a
            command that reads a run's recipe only to learn how it was made.

    Raises:
        InputError: With every fault of the recipe, its parts and the overrides, in file order.
    """
    found = files.find(str(config))
    if isinstance(found, Fault):
        raise InputError(found)
    path, shown = found
    here = Path.cwd()
    merged = files.load(path, shown)
    over, override_faults = overrides.read(sets, here)
    root, notes = overrides.apply(merged.root, over)
    draft = convert(root, Recipe, here)
    _place_model(draft)
    faults = [*merged.faults, *override_faults, *draft.faults]
    if not merged.is_complete or override_faults:
        # a missing key may stand in what was not read
        faults = [fault for fault in faults if fault.code != "missing-key"]
    faults += rules.check(_keys(draft, root), check_files)
    if faults:
        raise InputError(_in_order(faults, merged.files))
    _fill(draft.values, here / "runs" / Path(shown).stem)
    return LoadedRecipe(Recipe.model_validate(draft.values), path, tuple(notes), root)


def _keys(draft: Draft, root: Mapping) -> rules.Keys:
    """The draft as rules see it."""

    def fault(
        code: str, key: str, message: str, accepted: str | None = None, hint: str | None = None
    ) -> Fault:
        return Fault(code, message, *_mark(root, key).where, key, accepted, hint)

    def place(key: str) -> str:
        mark = _mark(root, key)
        return mark.file if mark.line is None else f"{mark.file}:{mark.line}:{mark.column}"

    return rules.Keys(draft.values, frozenset(draft.bad_keys), fault, place)


def _place_model(draft: Draft) -> None:
    """Make a model folder's path absolute; a hub id stays."""
    model = draft.values.get("model")
    if isinstance(model, dict) and "model.name_or_path" in draft.folders and "name_or_path" in model:
        folder = draft.folders["model.name_or_path"]
        model["name_or_path"] = paths.model_place(model["name_or_path"], folder)


def _mark(root: Mapping, key: str) -> Mark:
    """Where the value of a dotted key stands, or its nearest ancestor."""
    mark: Mark = root.mark
    node: Node = root
    for name in key.split("."):
        if isinstance(node, Mapping) and name in node.entries:
            entry = node.entries[name]
            node = entry.node
            mark = entry.mark if isinstance(node, Mapping) else node.mark
        elif isinstance(node, Items) and name.isdigit() and int(name) < len(node.items):
            node = node.items[int(name)]
            mark = node.mark
        else:
            break
    return mark


def _in_order(faults: list[Fault], shown: list[str]) -> list[Fault]:
    """Faults by file, then by position; those of `--set` last."""

    def position(fault: Fault) -> tuple[int, int, int]:
        file = shown.index(fault.file) if fault.file in shown else len(shown)
        return file, fault.line or 0, fault.column or 0

    return sorted(faults, key=position)


def _fill(values: dict[str, Any], output_dir: Path) -> None:
    """Write what was left out and depends on other keys or on the file's name."""
    if values.get("output_dir") is None:
        values["output_dir"] = output_dir
    optimizer = values.setdefault("optimizer", {})
    bits = optimizer.get("state_bits")
    if "name" not in optimizer and bits is not None:
        optimizer["name"] = f"paged_adamw_{bits}bit"
    name = optimizer.get("name", Optimizer.model_fields["name"].default)
    optimizer["state_bits"] = bits or rules.bits_of(name) or 8
    train = values.setdefault("train", {})
    if train.get("epochs") is None and train.get("max_steps") is None:
        train["epochs"] = 1.0
    data = values["data"]
    for sources in (data["train"], data.get("validation")):
        if isinstance(sources, tuple):
            _fill_sources(sources, data.get("format", "auto"))


def _fill_sources(sources: tuple[dict[str, Any], ...], format_: str) -> None:
    """Give each source its format and a name of its own."""
    taken = {source["name"] for source in sources if source.get("name") is not None}
    for source in sources:
        if source.get("format") is None:
            source["format"] = format_
        if source.get("name") is None:
            stem = source["path"].stem.encode("utf-8", "backslashreplace").decode("utf-8")
            name = next(
                n for n in [stem, *(f"{stem}-{i}" for i in range(2, len(sources) + 2))] if n not in taken
            )
            taken.add(name)
            source["name"] = name
