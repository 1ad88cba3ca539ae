"""`qlora eval`: base and adapter of a run side by side on its validation data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qlora_cli import run_folder
from qlora_cli.build.inputs import Inputs, load_recipe_base, missing_validation, read_inputs
from qlora_cli.config.load import load_recipe
from qlora_cli.config.schema import ValidationSource
from qlora_cli.console import Console
from qlora_cli.data.batches import in_order
from qlora_cli.data.collate import Batch, collate
from qlora_cli.data.prepare import Split
from qlora_cli.data.templates import prompt_ids
from qlora_cli.errors import Fault, InputError
from qlora_cli.evaluate import EvalSource, Question, evaluate_adapter
from qlora_cli.model.lora import load_trainable

SPARE_TOKENS = 8  # an answer may be this much longer than the longest right one


def evaluate_run(run: str, sets: Sequence[str], console: Console, *, answers: bool) -> dict[str, Any]:
    """Measure a run's adapter and its base.

    Args:
        run: A run folder or one of its checkpoints.
        sets: `--set` overrides of the run's recipe.
        console: Told what goes on.
        answers: Whether to generate answers.

    Returns:
        The document of `qlora eval --json`; written to `eval.json` in the run folder too.

    Raises:
        InputError: If RUN has no recipe, the recipe no validation data, or anything named is not there.
    """
    target = run_folder.find_run(run)
    if target.recipe is None or target.run is None:
        raise InputError(
            Fault(
                "no-recipe",
                f"`{run}` is an adapter without a run around it, so there is no recipe to evaluate by",
                accepted="a run folder or one of its checkpoints",
            )
        )
    loaded = load_recipe(target.recipe, sets)
    if not loaded.recipe.data.validation:
        raise InputError(missing_validation(loaded))
    inputs = read_inputs(loaded, console, needs_train=False)
    if inputs.validation is None:
        raise InputError(missing_validation(loaded))
    console.say(f"loading {loaded.recipe.model.name_or_path}")
    base = load_recipe_base(inputs)
    sources = _sources(inputs, inputs.validation, answers)
    longest = max((len(q.expected) for s in sources for q in s.questions), default=0)
    tokens = inputs.tokenizer(
        [q.expected for s in sources for q in s.questions if len(q.expected) == longest]
    )
    console.say("evaluating adapter and base")
    result = evaluate_adapter(
        load_trainable(base, target.adapter),
        inputs.tokenizer,
        sources,
        max_new_tokens=max(map(len, tokens["input_ids"]), default=0) + SPARE_TOKENS,
        batch_size=8 * loaded.recipe.train.micro_batch_size,
    )
    document = {"adapter": str(target.adapter)} | result.as_json()
    run_folder.write_json(target.run / run_folder.EVAL, document)
    return document


def _sources(inputs: Inputs, split: Split, answers: bool) -> list[EvalSource]:
    """The validation examples by source, each with its batches and its questions."""
    recipe = inputs.loaded.recipe
    entries = recipe.data.validation if isinstance(recipe.data.validation, tuple) else ()
    exact = {entry.name for entry in entries if isinstance(entry, ValidationSource) and entry.exact_match}
    groups: dict[str, list[int]] = {}
    for index, example in enumerate(split.examples):
        groups.setdefault(example.source, []).append(index)
    return [
        EvalSource(
            name=name,
            batches=_batches(inputs, split, indices),
            questions=_questions(inputs, split, indices) if answers else (),
            exact_match=name in exact,
        )
        for name, indices in groups.items()
    ]


def _batches(inputs: Inputs, split: Split, indices: Sequence[int]) -> list[Batch]:
    recipe = inputs.loaded.recipe
    lengths = [len(split.examples[index].input_ids) for index in indices]
    return [
        collate(
            [split.examples[indices[place]] for place in places],
            inputs.tokenizer.pad_token_id,
            max_seq_len=recipe.data.max_seq_len,
        )
        for places in in_order(len(indices), lengths, recipe.train.micro_batch_size)
    ]


def _questions(inputs: Inputs, split: Split, indices: Sequence[int]) -> list[Question]:
    found = []
    for index in indices:
        example = split.conversations[index]
        asked = [m["content"] for m in example.messages[: example.answers[-1]] if m["role"] == "user"]
        prompt = str(asked[-1]) if asked else ""
        found.append(Question(prompt, prompt_ids(example, inputs.tokenizer), example.answer))
    return found


def table_rows(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The document as a table for people.

    Args:
        document: From `evaluate_run`.

    Returns:
        Headers and rows: one a source, and all together where there are several.
    """
    headers = ["source", "examples", "tokens"]
    headers += ["base loss", "loss", "base perplexity", "perplexity", "base exact", "exact"]
    parts = dict(document["sources"])
    if len(parts) > 1:
        parts["all"] = document
    rows = [
        [name, str(part["examples"]), str(part["tokens"])]
        + [_number(side.get(key)) for key in ("loss", "perplexity") for side in (part["base"], part)]
        + [_share(side.get("exact_match")) for side in (part["base"], part)]
        for name, part in parts.items()
    ]
    return headers, rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
