"""Write docs/recipe.md from the recipe's schema; `--check` fails where the file is not what would be written.

Names, types, ranges, defaults and explanations come from `qlora_cli.config.schema` alone, so the page cannot
say something else than what the program accepts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from qlora_cli.config.kinds import Kind, fields_of, filled_with
from qlora_cli.config.schema import Recipe

TARGET = Path(__file__).resolve().parent.parent / "docs" / "recipe.md"
HEAD = """# Recipe

This page is made from `qlora_cli/config/schema.py` by `make docs`; edit the docstrings there.

A recipe is one YAML file. Only `model.name_or_path` and `data.train` are required. An unknown key,
a key given twice, a value of another type or out of range, and keys that exclude each other stop
the command with exit 2 before anything is read or written, all faults at once with
`file:line:column`.

- **Numbers** may be written `0.0001`, `1e-4`, `1E-4` or `.5`. A quoted value is text.
- **Words** such as `off` and `none` are words where the table below has them, booleans nowhere else
  than at keys that take `true` or `false`.
- **Relative paths** count from the file that names them, after `--set` from the current folder.
  `output_dir` always counts from the current folder. `~` is the home folder.
- **`include:`** names one file or a list. Parts are merged first, later ones win over earlier ones
  and the recipe wins over its parts: mappings key by key, lists and single values as a whole. A
  name that is no file may be a part that ships with the package, such as `paging/on_host`.
- **`--set KEY=VALUE`** overrides one key, any number of times, and is typed like the file. Lists
  and mappings are set as a whole: `--set 'data.train=[{path: x.jsonl}]'`. Where the recipe has
  `train.epochs` and `--set` gives `train.max_steps` (or the other way round) the command line wins,
  and says so.
- **YAML**: anchors and aliases work; merge keys (`<<`), tags (`!!int`) and several documents in a
  file are refused.

`recipe.yaml` in a run folder is the same recipe with every default written out and paths made
absolute.
"""
TAIL = """
## Keys that exclude each other

- `train.epochs` and `train.max_steps`: one of the two; without both, one epoch.
- `optimizer.state_bits` other than the one an optimizer's name says.
- `optimizer.paging.backend: resident` with `optimizer.paging.vram_budget_mib` other than `auto`.
- `schedule.decay_ratio` without `schedule.name: wsd`; with it, `warmup_ratio + decay_ratio` above 1.
- `train.eval_every_steps` with neither `data.validation` nor `train.sample_prompts`.
- `model.quantization.skip_modules` with `model.quantization.scheme: none`.
- Two sources of one list with the same `name`.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    simple = {n: f for n, f in Recipe.model_fields.items() if fields_of(Recipe)[n].section is None}
    lines += ["## At the top", "", *_table(Recipe, simple)]
    for name, kind in fields_of(Recipe).items():
        if kind.section is not None:
            lines += _section(name, kind.section)
    return "\n".join(lines) + "\n" + TAIL


def _section(key: str, section: type[BaseModel]) -> list[str]:
    """A heading, the section's own keys, then its inner sections."""
    own, inner = {}, []
    for name, field in section.model_fields.items():
        kind = fields_of(section)[name]
        inner += _inner(f"{key}.{name}", kind)
        if kind.section is None or kind.item is not None:
            own[name] = field
    lines = ["", f"## {key}", "", (section.__doc__ or "").strip(), "", *_table(section, own)]
    for inner_key, inner_section in inner:
        lines += _section(inner_key, inner_section)
    return lines


def _inner(key: str, kind: Kind) -> list[tuple[str, type[BaseModel]]]:
    """Sections below a key with their headings: a mapping, or the items of a list."""
    is_both = kind.section is not None and kind.item is not None
    found = [(f"{key} as a mapping" if is_both else key, kind.section)] if kind.section is not None else []
    if kind.item is not None and kind.item.section is not None:
        found.append((f"{key}, each item", kind.item.section))
    return found


def _table(section: type[BaseModel], fields: dict[str, FieldInfo]) -> list[str]:
    """One row a key."""
    lines = ["| key | accepted | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        accepted = fields_of(section)[name].describe()
        cells = [f"`{name}`", accepted, _default(field), field.description or ""]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _default(field: FieldInfo) -> str:
    """The default as a recipe would write it."""
    if filled_with(field):
        return filled_with(field)
    value = field.get_default()
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it; returns the exit code."""
    text = page()
    if arguments == ["--check"]:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET.name} is not what the schema says; run `make docs`", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
