"""train -> eval -> merge -> generate as processes, on a tiny random Llama."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.cli.conftest import Qlora


def done(result: object) -> str:
    assert getattr(result, "returncode", None) == 0, getattr(result, "stderr", "")
    return str(getattr(result, "stdout", ""))


def test_a_recipe_becomes_an_adapter_a_score_and_a_merged_model_that_answers_alike(
    qlora: Qlora, work: Path
) -> None:
    run = work / "runs" / "recipe"
    trained = qlora("train", "--config", "recipe.yaml")
    done(trained)
    assert "paging" in trained.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["paging"]["h2d_mib"] > 0
    assert "eval_loss" in lines[-1]
    assert yaml.safe_load((run / "recipe.yaml").read_text())["optimizer"]["learning_rate"] == 0.01
    for name in ("run.json", "data_report.json"):
        assert json.loads((run / name).read_text())
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert checkpoints == ["step-000002", "step-000004"]

    score = json.loads(done(qlora("eval", "runs/recipe", "--json")))
    assert score["examples"] == 2
    assert score["loss"] != score["base"]["loss"]
    assert 0 <= score["sources"]["validation"]["exact_match"] <= 1
    assert abs(score["loss"] - lines[-1]["eval_loss"]) < 1e-5

    proof = json.loads(done(qlora("merge", "runs/recipe", "--output", "merged", "--json")))
    assert proof["changed_tensors"] == 14
    assert proof["top1_agreement"] == 1.0
    assert "quantization_config" not in json.loads((work / "merged" / "config.json").read_text())

    prompt = "How many legs has a spider?"
    adapter = done(qlora("generate", "runs/recipe", prompt, "--max-new-tokens", "12"))
    merged = done(qlora("generate", "merged", prompt, "--max-new-tokens", "12"))
    base = done(qlora("generate", "runs/recipe", prompt, "--base", "--max-new-tokens", "12"))
    assert adapter == merged
    assert adapter != base


def test_a_second_call_of_a_complete_run_says_so_and_changes_no_file(qlora: Qlora, work: Path) -> None:
    words = ("train", "--config", "recipe.yaml", "--set", "train.max_steps=1")
    done(qlora(*words))
    before = {p: p.read_bytes() for p in (work / "runs").rglob("*") if p.is_file()}
    again = qlora(*words)
    done(again)
    assert "complete" in again.stderr
    assert before == {p: p.read_bytes() for p in (work / "runs").rglob("*") if p.is_file()}


def test_going_on_after_two_steps_gives_the_bytes_of_the_uninterrupted_run(qlora: Qlora, work: Path) -> None:
    done(qlora("train", "--config", "recipe.yaml", "--set", "output_dir=whole"))
    done(qlora("train", "--config", "recipe.yaml", "--set", "output_dir=cut", "--set", "train.max_steps=2"))
    done(qlora("train", "--config", "recipe.yaml", "--set", "output_dir=cut"))
    for name in ("adapter/adapter_model.safetensors", "checkpoints/step-000004/optimizer.safetensors"):
        assert (work / "whole" / name).read_bytes() == (work / "cut" / name).read_bytes(), name


def test_sample_prompts_are_answered_without_validation_data_and_leave_no_trace(
    qlora: Qlora, work: Path
) -> None:
    plain = (
        "train",
        "--config",
        "recipe.yaml",
        "--set",
        "data.validation=null",
        "--set",
        "train.max_steps=2",
    )
    done(qlora(*plain, "--set", "output_dir=plain"))
    asking = ("--set", "train.sample_prompts=[Name a bird.]", "--set", "train.eval_every_steps=1")
    asked = qlora(*plain, *asking, "--set", "output_dir=asked")
    done(asked)
    assert asked.stderr.count("Name a bird.") == 2
    lines = [json.loads(line) for line in (work / "asked" / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples"][0]["prompt"] for line in lines] == ["Name a bird."] * 2
    name = "adapter/adapter_model.safetensors"
    assert (work / "plain" / name).read_bytes() == (work / "asked" / name).read_bytes()
