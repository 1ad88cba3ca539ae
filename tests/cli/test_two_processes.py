"""Two processes on one machine train what one does with twice the accumulation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import Qlora


@pytest.mark.slow
def test_two_processes_train_the_adapter_of_one_with_twice_the_accumulation(qlora: Qlora, work: Path) -> None:
    one = qlora("train", "--config", "recipe.yaml", "--set", "output_dir=one")
    assert one.returncode == 0, one.stderr
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "qlora_cli", "train"]
    sets = ["--set", "output_dir=two", "--set", "train.gradient_accumulation_steps=1"]
    two = subprocess.run(
        [sys.executable, *words, "--config", "recipe.yaml", *sets],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert two.returncode == 0, two.stderr
    assert two.stderr.count("adapter: ") == 1, "only the first process speaks"

    def losses(run: str) -> list[float]:
        lines = (work / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    # the order of the sum over micro-batches differs: fp32 rounding, then 8-bit codes one apart
    assert losses("two") == pytest.approx(losses("one"), rel=1e-3)
    first, second = (load_file(work / r / "adapter" / "adapter_model.safetensors") for r in ("one", "two"))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=0.05, atol=2e-3)
