"""Options that several commands share, declared once so that they read the same everywhere.

Use them as annotations: `def train(config: ConfigOption, set_: SetOption = None, ...)`. This module must not
import anything heavy, since every `--help` imports it.
"""

from __future__ import annotations

from typing import Annotated

import typer


def _complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Names of shipped recipes; paths are completed by the shell."""
    from qlora_cli import shipped

    return [(name, shipped.describe(path)) for name, path in shipped.recipe_paths().items()]


def _complete_key(incomplete: str) -> list[str]:
    """Dotted keys with `=`, and the values of a key that takes words."""
    from qlora_cli.config.names import all_keys

    key, equals, _ = incomplete.partition("=")
    if equals:
        kind = all_keys().get(key)
        return [f"{key}={word}" for word in kind.words] if kind is not None else []
    return [f"{name}=" for name, kind in all_keys().items() if "*" not in name and kind.section is None]


ConfigOption = Annotated[
    str,
    typer.Option(
        "--config",
        "-c",
        metavar="RECIPE",
        help="Recipe file, or the name of a shipped recipe (`qlora recipes list`).",
        autocompletion=_complete_recipe,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key of the recipe, e.g. `--set lora.rank=8`; any number of times.",
        autocompletion=_complete_key,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write the result to stdout as JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no tables; warnings stay.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run folder, one of its checkpoints, or an adapter folder (PEFT)."),
]
