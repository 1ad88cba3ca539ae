"""`qlora eval`: what a run's adapter is worth beside its base."""

from __future__ import annotations

from typing import Annotated

import typer

from qlora_cli.commands.options import DebugOption, JsonOption, QuietOption, RunArgument, SetOption
from qlora_cli.console import Console


def evaluate(
    run: RunArgument,
    set_: SetOption = None,
    generate: Annotated[
        bool, typer.Option(help="Generate answers for the sources that ask for exact match.")
    ] = True,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure base and adapter on the run's validation data: loss, perplexity, exact answers.

    Loss is the sum over supervised tokens divided by their number, whatever the batch size. The result is
    written to `eval.json` in the run folder as well.

    Example: qlora eval runs/smollm2_135m --set train.micro_batch_size=16
    """
    from qlora_cli.build.evaluation import evaluate_run, table_rows

    console = Console(quiet=quiet, json=json)
    document = evaluate_run(run, set_ or (), console, answers=generate)
    if json:
        console.out_json(document)
    headers, rows = table_rows(document)
    console.table(rows, headers)
    for sample in document["samples"][:3]:
        console.say(f"\n{sample['prompt']}\n  expected {sample['expected']}")
        console.say(f"  base     {sample['base']}\n  adapter  {sample['adapter']}")
