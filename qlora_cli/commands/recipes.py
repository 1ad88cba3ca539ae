"""`qlora recipes`: list, show and copy the recipes that ship with the package."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from qlora_cli.commands.options import DebugOption, JsonOption, QuietOption
from qlora_cli.commands.registry import Group
from qlora_cli.console import Console

app = typer.Typer(cls=Group, rich_markup_mode=None, add_completion=False)


def _complete_name(incomplete: str) -> list[tuple[str, str]]:
    from qlora_cli import shipped

    return [(name, shipped.describe(path)) for name, path in shipped.recipe_paths().items()]


NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a shipped recipe.", autocompletion=_complete_name)
]


@app.callback(invoke_without_command=True)
def recipes(ctx: typer.Context) -> None:
    """Recipes that ship with the package.

    Each is a complete run: `qlora train --config NAME`.
    """
    if ctx.invoked_subcommand is None:
        Console().out(ctx.get_help())


@app.command("list")
def list_(json: JsonOption = False, quiet: QuietOption = False, debug: DebugOption = False) -> None:
    """List the shipped recipes: name and what each is for."""
    from qlora_cli import shipped

    console = Console(quiet=quiet, json=json)
    found = {name: shipped.describe(path) for name, path in shipped.recipe_paths().items()}
    if json:
        console.out_json([{"name": name, "description": text} for name, text in found.items()])
        return
    width = max(map(len, found), default=0)
    for name, text in found.items():
        console.out(f"{name:<{width}}  {text}".rstrip())


@app.command()
def show(name: NameArgument, quiet: QuietOption = False, debug: DebugOption = False) -> None:
    """Print a shipped recipe as it stands."""
    from qlora_cli.config.copy import shipped_recipe

    Console(quiet=quiet).out(shipped_recipe(name).read_text(encoding="utf-8").rstrip("\n"))


@app.command()
def copy(
    name: NameArgument,
    dest: Annotated[
        Path | None, typer.Argument(metavar="DEST", help="File or folder to write; default: ./NAME.yaml.")
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Copy a shipped recipe, its parts and paths written out, so that it runs from anywhere.

    A file that is there is never overwritten.

    Example: qlora recipes copy smollm2_135m my.yaml && qlora train --config my.yaml
    """
    from qlora_cli.config.copy import copy_recipe

    console = Console(quiet=quiet, json=json)
    written = copy_recipe(name, dest)
    if json:
        console.out_json({"path": str(written)})
    console.say(f"wrote {written}; run it with `qlora train --config {shlex.quote(str(written))}`")
