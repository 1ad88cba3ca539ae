"""Train, evaluate, merge and try SmolLM2-135M, offline: what `make quickstart` runs.

Each step is one command of the tool, printed before it runs, so that it can be typed again. The script adds
two things: the base model out of an installed package, and a check that the merged model answers as the
adapter
    does.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = ROOT / "recipes" / "data" / "sentence_to_json" / "held_out.jsonl"


def call(words: list[str], *, capture: bool = False) -> str:
    """Print and run one command; stop with its exit code when it fails."""
    print(f"\n$ {shlex.join(words)}", flush=True)
    binary = str(Path(sys.executable).parent / words[0])
    done = subprocess.run([binary, *words[1:]], stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def main() -> None:
    """Run the steps and print the scores before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--run", type=Path, default=Path("runs/smollm2_135m"))
    parser.add_argument("--merged", type=Path, default=Path("models/smollm2-135m-json"))
    options = parser.parse_args()
    started = time.perf_counter()

    call(["python", str(ROOT / "scripts" / "make_smollm2.py"), str(options.model)])
    base = ["--set", f"model.name_or_path={options.model}"]
    call(["qlora", "train", "--config", "smollm2_135m", *base, "--set", f"output_dir={options.run}"])
    call(["qlora", "eval", str(options.run)])
    report: dict[str, Any] = json.loads((options.run / "eval.json").read_text("utf-8"))
    if not options.merged.exists():
        call(["qlora", "merge", str(options.run), "--output", str(options.merged)])
    shown = report["samples"][0]
    first = json.loads(HELD_OUT.read_text("utf-8").split("\n")[0])["messages"]
    asked = [shown["prompt"], "--system", first[0]["content"], "--max-new-tokens", "48"]
    merged = call(["qlora", "generate", str(options.merged), *asked], capture=True).strip()
    answers = {"base": shown["base"], "adapter": shown["adapter"], "merged": merged}

    print("\nexact answers          before   after")
    for name, source in report["sources"].items():
        before, after = source["base"]["exact_match"], source["exact_match"]
        print(f"  {name:18s} {before:8.1%} {after:7.1%}   of {source['examples']}")
    print(f"perplexity           {report['base']['perplexity']:8.2f} {report['perplexity']:7.2f}")
    print(f"\n{shown['prompt']}")
    for name, answer in answers.items():
        print(f"  {name:8s} {answer.strip()}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"\n{time.perf_counter() - started:.0f} s, largest process {peak:.2f} GiB")
    if merged != shown["adapter"].strip():
        sys.exit("the merged model's answer differs from the adapter's")


if __name__ == "__main__":
    main()
