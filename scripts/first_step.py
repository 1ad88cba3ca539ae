"""Time the first training steps, plain libraries beside this package: `python scripts/first_step.py FOLDER`.

Each side runs in a process of its own, in turns, on the same random token ids: NF4 with double quantisation,
rank 16 on all linear layers, 8 sequences of 64 tokens of which the last third is supervised, 8-bit AdamW.
Plain is transformers + peft + bitsandbytes as their documentation has it. For each step it prints wall and
CPU seconds, the part of the CPU time spent in the kernel, and how much memory was touched for the first time
(minor page faults): on a virtual machine a first touch may cost seconds for each GiB, and none of it shows
in a profile of the program. CPU seconds compare only with OMP_NUM_THREADS=1: waiting threads spin.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROWS, LENGTH, SUPERVISED = 8, 64, 22
STEPS = 4
PAGE_GIB = resource.getpagesize() / 2**30


class Rows:
    """One batch, the same for both sides."""

    def __init__(self, vocabulary: int) -> None:
        """Draw the token ids from seed 0."""
        draw = torch.Generator().manual_seed(0)
        self.input_ids = torch.randint(10, vocabulary, (ROWS, LENGTH), generator=draw)
        self.attention_mask = torch.ones_like(self.input_ids)
        self.labels = self.input_ids.clone()
        self.labels[:, : LENGTH - SUPERVISED] = -100


def plain(folder: str) -> Callable[[], float]:
    """One step of transformers, peft and bitsandbytes."""
    import bitsandbytes
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32)
    model: Any = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).train()
    optimizer = bitsandbytes.optim.PagedAdamW8bit([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    rows = Rows(base.config.vocab_size)

    def step() -> float:
        loss: Any = model(
            input_ids=rows.input_ids, attention_mask=rows.attention_mask, labels=rows.labels
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def ours(folder: str) -> Callable[[], float]:
    """The same step of this package."""
    from qlora_cli.model.load import QuantizationSpec, load_base
    from qlora_cli.model.lora import LoraSpec, attach
    from qlora_cli.model.loss import training_loss
    from qlora_cli.optim.paged_adamw import PagedAdamW

    base = load_base(folder, None, QuantizationSpec("nf4", True, "fp32"), "sdpa", "cpu", False)
    model = attach(base, LoraSpec(rank=16, alpha=32), seed=0)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = PagedAdamW(named, lr=2e-4, state_bits=8)
    rows = Rows(base.config.vocab_size)

    def step() -> float:
        loss: Any = training_loss(model, rows) / (ROWS * SUPERVISED)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def measure(side: str, folder: str) -> list[dict[str, float]]:
    """Run the steps of one side in this process."""
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    step = {"plain": plain, "ours": ours}[side](folder)
    figures = [{"load_s": time.perf_counter() - started}]
    for _ in range(STEPS):
        before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        loss = step()
        after = resource.getrusage(resource.RUSAGE_SELF)
        figures.append(
            {
                "wall_s": time.perf_counter() - wall,
                "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
                "kernel_s": after.ru_stime - before.ru_stime,
                "majflt": after.ru_majflt - before.ru_majflt,
                "touched_gib": (after.ru_minflt - before.ru_minflt) * PAGE_GIB,
                "loss": loss,
            }
        )
    figures.append({"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20})
    return figures


def touch_cost() -> float:
    """Seconds for each GiB of memory that this machine takes to hand out for the first time."""
    import mmap

    size = 2**29
    with mmap.mmap(-1, size) as memory:
        started = time.perf_counter()
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1
        return (time.perf_counter() - started) * 2**30 / size


def main() -> None:
    """Run both sides in turns and print a row a step."""
    parser = argparse.ArgumentParser(description="time the first training steps on a CPU")
    parser.add_argument("folder", type=Path, help="the base, e.g. from scripts/make_smollm2.py")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each side")
    parser.add_argument("--side", choices=["plain", "ours"], help="run one side here and print JSON")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments.side, str(arguments.folder))))
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads,"
        f" {touch_cost():.2f} s a GiB of new memory"
    )
    found: dict[str, list[list[dict[str, float]]]] = {"plain": [], "ours": []}
    for _ in range(arguments.rounds):
        for side, rounds in found.items():
            command = [sys.executable, __file__, str(arguments.folder), "--side", side]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
            rounds.append(json.loads(output.stdout.splitlines()[-1]))
    keys = ("wall_s", "cpu_s", "kernel_s", "touched_gib")
    print(f"{'':18}" + "".join(f"{key:>13}" for key in keys) + "   (median of rounds)")
    for side, rounds in found.items():
        for number in range(1, STEPS + 1):
            values = [statistics.median(each[number][key] for each in rounds) for key in keys]
            print(f"{side:8} step {number:<4}" + "".join(f"{value:13.2f}" for value in values))
        load = statistics.median(each[0]["load_s"] for each in rounds)
        peak = statistics.median(each[-1]["peak_gib"] for each in rounds)
        print(f"{side:8} load {load:.1f} s, peak {peak:.2f} GiB, last loss {rounds[0][STEPS]['loss']:.4f}")


if __name__ == "__main__":
    main()
