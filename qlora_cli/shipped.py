"""Where the recipes and parts that ship with the package lie, found by name.

A wheel carries them as `qlora_cli/shipped/{recipes,configs}`, a checkout beside the package; either way the
two are siblings, so a recipe's `include: [../configs/...]` resolves. This module must not know what a recipe
holds.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped_folder() -> Path:
    """The folder that holds `recipes` and `configs`."""
    inside = _PACKAGE / "shipped"
    return inside if inside.is_dir() else _PACKAGE.parent


def recipe_paths() -> dict[str, Path]:
    """Name → file of every shipped recipe, in order of name."""
    return {path.stem: path for path in sorted((shipped_folder() / "recipes").glob("*.yaml"))}


def part_paths() -> dict[str, Path]:
    """Name (`paging/on_host`) → file of every shipped part, in order of name."""
    root = shipped_folder() / "configs"
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def find_recipe(name: str) -> Path | None:
    """The shipped recipe of that name, with or without `.yaml`; None where there is none."""
    return recipe_paths().get(name.removesuffix(".yaml"))


def find_part(name: str) -> Path | None:
    """The shipped part or recipe that an `include` names, None where there is none."""
    stem = name.removesuffix(".yaml")
    return part_paths().get(stem.removeprefix("configs/")) or find_recipe(stem.removeprefix("recipes/"))


def describe(path: Path) -> str:
    """The first comment line of a recipe: what it is for; empty where the file does not begin with one."""
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""
