"""The commands of `qlora`, and groups that import a command's module only when the command is used.

For `qlora --help` the first line of each command's docstring is read from its source, unimported, so that it
is written once. This module must not import a command.
"""

from __future__ import annotations

import ast
import importlib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from qlora_cli.errors import Fault, InputError


class Command(NamedTuple):
    """Where a command lives.

    Attributes:
        module: Its module in `qlora_cli.commands`.
        function: The function that is the command, or the callback of a group.
        app: The Typer app of a group, None for a single command.
    """

    module: str
    function: str
    app: str | None = None


COMMANDS = {
    "train": Command("train", "train"),
    "eval": Command("eval", "evaluate"),
    "merge": Command("merge", "merge"),
    "generate": Command("generate", "generate"),
    "recipes": Command("recipes", "recipes", app="app"),
}


class Group(TyperGroup):
    """A group in which an unknown command is an error of ours, with the nearest name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first argument names.

        Raises:
            InputError: If there is none.
        """
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, known, 1)
            path = ctx.command_path
            hint = f"did you mean `{path} {near[0]}`?" if near else f"`{path} --help` lists the commands"
            raise InputError(Fault("usage", f"there is no command `{path} {name}`", None, None, None, None,
                                   ", ".join(known), hint))  # fmt: skip
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """The group of all commands; a command's module is imported when it is run or asked for its help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The parser of a command, None where there is none of that name."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line(name)) for name in COMMANDS])


def help_line(name: str) -> str:
    """The first line of a command's docstring, read from its source; empty where there is no source."""
    command = COMMANDS[name]
    try:
        source = Path(__file__).with_name(f"{command.module}.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == command.function:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def load_command(name: str) -> Any:
    """Import a command's module and make its parser."""
    command = COMMANDS[name]
    module = importlib.import_module(f"qlora_cli.commands.{command.module}")
    if command.app is not None:
        return typer.main.get_command(getattr(module, command.app))
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(name)(getattr(module, command.function))
    return typer.main.get_command(single)
