"""The commands of `qlora`, and groups that import a command's module only when the command is used.

One line of help for each command stands here, so that `qlora --help` imports none of them. This module must
not import a command.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from qlora_cli.errors import Fault, InputError


class Command(NamedTuple):
    """Where a command lives; `target` is a function, or a Typer app for a group."""

    module: str
    target: str
    help: str


COMMANDS = {
    "train": Command("train", "train", "Train a LoRA adapter on a 4-bit base."),
    "eval": Command(
        "eval", "evaluate", "Measure a run: loss, perplexity and right answers of base and adapter."
    ),
    "merge": Command("merge", "merge", "Fold the adapter into the base and prove the result."),
    "generate": Command("generate", "generate", "Answer prompts with a run's adapter, or with the base."),
    "recipes": Command("recipes", "app", "Recipes that ship with the package."),
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
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


def load_command(name: str) -> Any:
    """Import a command's module and make its parser."""
    command = COMMANDS[name]
    target = getattr(importlib.import_module(f"qlora_cli.commands.{command.module}"), command.target)
    if isinstance(target, typer.Typer):
        return typer.main.get_command(target)
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(name)(target)
    return typer.main.get_command(single)
