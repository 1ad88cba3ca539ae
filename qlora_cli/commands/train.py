"""`qlora train`: from a recipe to an adapter."""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import Annotated

import typer

from qlora_cli.commands.options import ConfigOption, DebugOption, JsonOption, QuietOption, SetOption
from qlora_cli.console import Console


class Resume(str, Enum):
    """What to do where the run folder has a run."""

    auto = "auto"
    never = "never"


def train(
    config: ConfigOption,
    set_: SetOption = None,
    resume: Annotated[
        Resume, typer.Option(help="auto: go on where `output_dir` stands; never: want a new folder.")
    ] = Resume.auto,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a LoRA adapter on a 4-bit base, as a recipe says.

    Ctrl-C finishes the step, saves and exits 130; the same command goes on from there.

    Example: qlora train --config smollm2_135m --set output_dir=runs/first
    """
    from qlora_cli.config.load import load_recipe

    is_first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun or accelerate started
    console = Console(quiet=quiet or not is_first, json=json)
    loaded = load_recipe(config, set_ or ())

    from qlora_cli.build.training import train as run

    result = run(loaded, console, resume=resume.value, command=["qlora", *sys.argv[1:]])
    if json and is_first:
        console.out_json(result.as_json())
    if result.paging:
        console.say(result.paging)
    if result.best is not None:
        console.say(f"best evaluation: loss {result.best.eval_loss:.4f} after step {result.best.step}")
    console.say(f"adapter: {result.run / 'adapter'}; next: `qlora eval {result.run}`")
