"""`qlora merge`: one model out of base and adapter, with the proof that it is the same."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from qlora_cli.commands.options import DebugOption, JsonOption, QuietOption, RunArgument
from qlora_cli.console import Console


class Base(str, Enum):
    """Weights that the adapter is added to."""

    auto = "auto"
    nf4 = "nf4"
    original = "original"


class Dtype(str, Enum):
    """Dtype of the merged weights."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def merge(
    run: RunArgument,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Folder to write; default: RUN/merged.")
    ] = None,
    base: Annotated[
        Base, typer.Option(help="auto: what the adapter was trained on, by its own record.")
    ] = Base.auto,
    base_path: Annotated[
        str | None, typer.Option(help="Folder of the base, where it is not where the adapter says.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto: as the base is stored.")] = Dtype.auto,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Fold the adapter into the base, and compare the logits before the folder appears.

    Example: qlora merge runs/smollm2_135m -o models/mine
    """
    from qlora_cli.build.merging import merge_run

    console = Console(quiet=quiet, json=json)
    report = merge_run(run, output, base.value, base_path, dtype.value, console)
    if json:
        console.out_json(report.as_json())
    for note in report.notes:
        console.say(note)
    console.say(f"base: {report.base} ({report.base_reason})")
    proof = report.comparison
    console.say(
        f"{report.changed_tensors} of {report.tensors} tensors changed; merged against base + adapter:"
        f" largest difference of a logit {proof.max_abs_diff:.3g}, mean KL {proof.mean_kl:.3g} nats,"
        f" same next token {proof.top1_agreement:.1%}"
    )
    console.say(f"wrote {report.output}")
