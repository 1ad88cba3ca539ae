"""Measure `qlora train` beside plain transformers + peft + bitsandbytes on one recipe, in one run.

    python scripts/compare_plain.py --config RECIPE [--set KEY=VALUE ...] [--steps 10] [--rounds 1]

Each round runs ours, plain, plain, ours as processes of their own. Both train the same examples in the same
order with the same batch; plain is what the libraries' own documentation shows:
`prepare_model_for_kbit_training`, `get_peft_model`, `PagedAdamW8bit`, the model's own loss. Printed: tokens/s
over the steps after the second, seconds of the first and the second step, peak memory (allocated on a GPU,
resident on a CPU), first and last loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def plain(config: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """Train with the libraries alone; returns the figures of one run."""
    import bitsandbytes
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from qlora_cli.build.inputs import read_inputs
    from qlora_cli.build.training import build_schedule, step_plan
    from qlora_cli.config.load import load_recipe
    from qlora_cli.console import Console
    from qlora_cli.data.collate import collate
    from qlora_cli.train.loop import peak_mib

    inputs = read_inputs(load_recipe(config, overrides), Console(quiet=True))
    recipe, cuda = inputs.loaded.recipe, inputs.device.kind == "cuda"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[inputs.choices.compute_dtype.value]
    model = AutoModelForCausalLM.from_pretrained(
        recipe.model.name_or_path,
        dtype=dtype,
        attn_implementation="sdpa",
        device_map={"": 0} if cuda else {"": "cpu"},
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
    )
    checkpointing = inputs.choices.activation_checkpointing.value == "full"
    model = prepare_model_for_kbit_training(
        model,
        use_gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
    )
    lora = LoraConfig(
        r=recipe.lora.rank, lora_alpha=recipe.lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, lora)
    model.train()
    model.config.use_cache = False
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = bitsandbytes.optim.PagedAdamW8bit(parameters, lr=recipe.optimizer.learning_rate)
    device = parameters[0].device
    seconds, tokens, losses = [], [], []
    schedule = build_schedule(inputs, steps)
    for step, _, micro_batches in step_plan(inputs).windows(1):
        if step > steps:
            break
        started = time.perf_counter()
        batches = [
            collate([inputs.training.examples[i] for i in indices], inputs.tokenizer.pad_token_id)
            for indices in micro_batches
        ]
        total = 0.0
        for batch in batches:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = model(
                    input_ids=batch.input_ids.to(device),
                    attention_mask=batch.attention_mask.to(device),
                    labels=batch.labels.to(device),
                ).loss / len(batches)
            loss.backward()
            total += loss.item()
        optimizer.param_groups[0]["lr"] = recipe.optimizer.learning_rate * schedule.factor(step)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        tokens.append(sum(int(batch.attention_mask.sum()) for batch in batches))
        losses.append(total)
    return {"seconds": seconds, "tokens": tokens, "losses": losses, "peak_mib": peak_mib()}


def ours(config: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """Run `qlora train` for some steps; returns the figures of its metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "qlora_cli", "train", "--config", config]
        for override in [*overrides, f"output_dir={folder}/run", f"train.max_steps={steps}"]:
            words += ["--set", override]
        subprocess.run(words, check=True, stdout=sys.stderr)
        lines = [
            json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    return {
        "seconds": [line["step_ms"] / 1e3 for line in lines],
        "tokens": [line["tokens"] for line in lines],
        "losses": [line["loss"] for line in lines],
        "peak_mib": lines[-1]["peak_mib"],
        "paging": lines[-1]["paging"],
    }


def rate(run: dict[str, Any]) -> float:
    """Tokens per second of the median step after the second."""
    rates: list[float] = [t / s for t, s in zip(run["tokens"][2:], run["seconds"][2:], strict=True)]
    return statistics.median(rates)


def main() -> None:
    """Run the rounds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="run plain here and print its figures as JSON")
    options = parser.parse_args()
    if options.plain:
        print(json.dumps(plain(options.config, options.overrides, options.steps)))
        return
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "plain": []}
    for engine in ["ours", "plain", "plain", "ours"] * options.rounds:
        if engine == "ours":
            runs[engine].append(ours(options.config, options.overrides, options.steps))
        else:
            words = [sys.executable, *sys.argv, "--plain"]
            done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            runs[engine].append(json.loads(done.stdout.splitlines()[-1]))
    print("engine   tok/s   first s  second s  peak MiB  loss first -> last")
    for engine, found in runs.items():
        for run in found:
            first, second = run["seconds"][:2]
            print(
                f"{engine:6s} {rate(run):8.1f} {first:8.2f} {second:9.2f} {run['peak_mib']:9.0f}"
                f"  {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}"
            )
    ratio = statistics.mean(map(rate, runs["ours"])) / statistics.mean(map(rate, runs["plain"]))
    print(f"ours / plain: {ratio:.3f} x tokens/s")
    print("paging of the last step:", json.dumps(runs["ours"][-1]["paging"]))


if __name__ == "__main__":
    main()
