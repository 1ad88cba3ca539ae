"""Help, versions, recipes and wrong recipes answer without a heavy module: each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qlora_cli.commands.registry import COMMANDS, help_line

HEAVY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "datasets", "numpy", "tokenizers")
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
out, err = io.StringIO(), io.StringIO()
with redirect_stdout(out), redirect_stderr(err):
    from qlora_cli.cli import main
    code = main(sys.argv[1:])
modules = sorted(sys.modules)
print(json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue(), "modules": modules}))
"""


def run(*args: str, cwd: Path | None = None) -> dict[str, object]:
    """Run the program in an interpreter of its own; what it wrote and which modules it had at the end."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, cwd=cwd, check=True
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


def heavy(result: dict[str, object]) -> list[str]:
    modules = result["modules"]
    assert isinstance(modules, list)
    return [name for name in HEAVY if name in modules]


LINES = ["", "--help", "--version", *(f"{name} --help" for name in COMMANDS), "recipes", "recipes list"]
LINES += [f"recipes {name} --help" for name in ("list", "show", "copy")]


@pytest.mark.parametrize("line", LINES)
def test_help_imports_no_heavy_module(line: str) -> None:
    result = run(*line.split())
    assert result["code"] == 0, result["err"]
    assert result["out"]
    assert result["err"] == ""
    assert heavy(result) == []


def test_the_list_of_commands_imports_no_command() -> None:
    modules = run("--help")["modules"]
    assert isinstance(modules, list)
    assert [
        m for m in modules if m.startswith("qlora_cli.commands.") and m != "qlora_cli.commands.registry"
    ] == []
    assert "pydantic" not in modules
    assert "yaml" not in modules


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_the_list_of_commands_begins_the_help_of_the_command(name: str) -> None:
    listed = " ".join(str(run("--help")["out"]).split())
    own = " ".join(str(run(name, "--help")["out"]).split())
    assert len(help_line(name)) > 20
    assert help_line(name) in listed
    assert help_line(name) in own


@pytest.mark.parametrize(
    "line", ["train --config r.yaml", "train --config no", "train", "trian", "recipes show no"]
)
def test_wrong_input_is_answered_without_a_heavy_module(tmp_path: Path, line: str) -> None:
    (tmp_path / "r.yaml").write_text("modle: {}\n", "utf-8")
    result = run(*line.split(), cwd=tmp_path)
    assert result["code"] == 2
    assert str(result["err"]).startswith("error: ")
    assert heavy(result) == []
