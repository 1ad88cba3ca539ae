"""The `qlora` program: runs the command that is asked for and maps what it raised to an exit code.

This is the only place where exceptions become exit codes: 0 done, 1 the run failed, 2 the input is wrong, 130
stopped. It must not know what a command does; the commands are listed in `commands.registry`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from qlora_cli import __version__
from qlora_cli.commands.registry import COMMANDS, LazyGroup
from qlora_cli.console import Console
from qlora_cli.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Fault,
    InputError,
    Interrupted,
    QloraError,
    RunError,
)

SPIN_COUNT = "5000"  # turns of GNU OpenMP's busy wait: docs/decisions/0003-first-step-stall.md

app = typer.Typer(cls=LazyGroup, rich_markup_mode=None)
# The parser's own base exception: `typer.TyperException` in 0.29, without a public name before.
_PARSER_ERROR: type[Exception] = getattr(typer, "TyperException", typer.BadParameter.__mro__[2])


def _print_version(wanted: bool) -> None:
    if wanted:
        Console().out(f"qlora {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """QLoRA fine-tuning from one YAML recipe: train, evaluate, merge."""
    if ctx.invoked_subcommand is None:
        Console().out(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments after the program's name; None for those of the process.

    Returns:
        The exit code.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch loads its OpenMP
    flags = args[: args.index("--")] if "--" in args else args
    console = Console(quiet="--quiet" in flags, json="--json" in flags)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # training has its own once it steps
    try:
        code = typer.main.get_command(app).main(args, prog_name="qlora", standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # what the parser makes of Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else EXIT_DONE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # keeps the flush at exit silent
        return EXIT_FAILED
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in flags:
            import traceback

            sys.stderr.write(traceback.format_exc())
        problem = as_qlora_error(error, args)
        console.error(problem)
        return problem.exit_code


def as_qlora_error(error: BaseException, args: Sequence[str]) -> QloraError:
    """Any exception as one of ours: the parser's is an input error, an unexpected one a failed run."""
    if isinstance(error, QloraError):
        return error
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return Interrupted(Fault("interrupted", "stopped"))
    if isinstance(error, _PARSER_ERROR):
        return InputError(_usage_fault(error, args))
    message = f"unexpected {type(error).__name__}: {error}"
    return RunError(Fault("unexpected", message, hint="add `--debug` for the traceback, and report it"))


def _usage_fault(error: Any, args: Sequence[str]) -> Fault:
    """What the parser found wrong, in our words and quotes."""
    context = getattr(error, "ctx", None)
    command = f"qlora {args[0]}" if args and args[0] in COMMANDS else "qlora"
    path = context.command_path if context is not None else command
    near = getattr(error, "possibilities", None)
    if near is not None or "No such option" in error.message:
        hint = (
            f"did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else f"see `{path} --help`"
        )
        return Fault("usage", f"there is no option `{error.option_name}`", hint=hint)
    message = re.sub(r"'(\S+?)'", r"`\1`", error.format_message()).rstrip(".").replace("Value error, ", "")
    message = re.sub(r"argument(?:\(?s\)?)? \((.*)\)$", r"argument `\1`", message)
    return Fault("usage", message[:1].lower() + message[1:], hint=f"`{path} --help` lists what it takes")
