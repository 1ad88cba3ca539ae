"""`qlora generate`: one answer of an adapter, its base, or a whole model."""

from __future__ import annotations

from typing import Annotated

import typer

from qlora_cli.commands.options import DebugOption, JsonOption, QuietOption, RunArgument
from qlora_cli.console import Console


def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the user says.")],
    base: Annotated[bool, typer.Option("--base", help="Answer with the base, without the adapter.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Answer a prompt, greedily, through the chat template.

    RUN may also be a whole model, such as a merged one.

    Example: qlora generate runs/smollm2_135m "Lunch with Ana on Friday at noon."
    """
    from qlora_cli.build.answering import answer

    console = Console(quiet=quiet, json=json)
    text = answer(run, prompt, system, use_base=base, max_new_tokens=max_new_tokens)
    if json:
        console.out_json({"prompt": prompt, "answer": text})
    else:
        console.out(text)
