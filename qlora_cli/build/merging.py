"""`qlora merge`: which adapter, which prompts to prove it on, where the result goes."""

from __future__ import annotations

from pathlib import Path

from qlora_cli.build.inputs import read_split, template_of
from qlora_cli.config.load import load_recipe
from qlora_cli.console import Console
from qlora_cli.device import probe
from qlora_cli.errors import InputError, QloraError
from qlora_cli.model.load import load_tokenizer
from qlora_cli.model.merge import MergeReport, merge
from qlora_cli.run_folder import RunTarget, find_run

NUM_PROMPTS = 8  # examples the logits are compared on


def merge_run(
    run: str, output: str | None, base: str, base_path: str | None, dtype: str, console: Console
) -> MergeReport:
    """Merge the adapter that a `RUN` argument names.

    Args:
        run: A run folder, a checkpoint or an adapter folder.
        output: Folder to write; None: `merged/` in the run folder, or beside a bare adapter folder.
        base: `auto`, `nf4` or `original`.
        base_path: Where the base lies, None: where the adapter says.
        dtype: `auto`, `fp32`, `bf16` or `fp16`.
        console: Told the progress.

    Returns:
        What was done, with its proof.

    Raises:
        InputError: If adapter, base and options do not go together.
        RunError: If the proof does not hold.
    """
    target = find_run(run)
    folder = Path(output) if output else (target.run or target.adapter) / "merged"
    if output is None and target.run is None:
        folder = target.adapter.with_name(target.adapter.name + "-merged")
    prompts = _prompts(target, console)
    return merge(
        target.adapter,
        folder,
        base=base,
        base_path=base_path,
        dtype=dtype,
        device=probe().torch_device,
        prompts=prompts,
        on_shard=lambda done, total, name: console.say(f"wrote {name} ({done} of {total})"),
    )


def _prompts(target: RunTarget, console: Console) -> list[list[int]]:
    """Token ids of examples that the run was validated on, or trained on; none where they cannot be read."""
    if target.recipe is None:
        return []
    try:
        recipe = load_recipe(target.recipe, check_files=False).recipe
        tokenizer = load_tokenizer(
            str(target.adapter), None, template_of(recipe), recipe.model.trust_remote_code
        )
        entries = recipe.data.validation if isinstance(recipe.data.validation, tuple) else recipe.data.train
        split = read_split(recipe, entries, tokenizer)
        if split.faults:
            raise InputError(split.faults)
    except (QloraError, OSError) as error:
        console.warn(f"the run's data cannot be read, the proof uses built-in prompts: {error}")
        return []
    return [list(split.examples[i].input_ids) for i in range(min(NUM_PROMPTS, len(split.examples)))]
