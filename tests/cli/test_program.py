"""The program around its commands: exit codes, usage errors, flags, pipes, completion, `qlora recipes`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from qlora_cli import __version__, shipped
from qlora_cli.cli import main
from qlora_cli.config.load import load_recipe
from qlora_cli.errors import Fault, Interrupted, RunError

QLORA = Path(sys.executable).parent / "qlora"
NAME = next(iter(shipped.recipe_paths()))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `qlora recipes list` raise."""

    def fail() -> NoReturn:
        raise error

    monkeypatch.setattr(shipped, "recipe_paths", fail)


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [(["trian"], "there is no command `qlora trian`", "did you mean `qlora train`?"),
     (["zzz"], "there is no command `qlora zzz`", "`qlora --help` lists the commands"),
     (["recipes", "shwo"], "there is no command `qlora recipes shwo`", "did you mean `qlora recipes show`?"),
     (["--vresion"], "there is no option `--vresion`", "did you mean `--version`?"),
     (["train", "--cnofig", "x"], "there is no option `--cnofig`", "did you mean `--config`?"),
     (["train", "--zzz"], "there is no option `--zzz`", "see `qlora train --help`"),
     (["train"], "missing option `--config` / `-c`", "`qlora train --help` lists what it takes"),
     (["train", "--config"], "option `--config` requires an argument", "`qlora train --help`"),
     (["recipes", "show"], "missing argument `NAME`", "`qlora recipes show --help` lists what it takes"),
     (["recipes", "list", "x"], "got unexpected extra argument `x`", "`qlora recipes list --help`")],
)  # fmt: skip
def test_wrong_usage_exits_2_with_one_error_in_our_form(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str, hint: str
) -> None:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == f"error: {message}"
    assert lines[-1].startswith(f"hint: {hint}")


def test_wrong_usage_with_json_is_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list", "--jsno", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage"


def test_flags_after_two_dashes_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "--", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "there is no shipped recipe `--json`" in captured.err


def test_without_arguments_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: qlora")


def test_the_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"qlora {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(RunError(Fault("out-of-memory", "full")), 1), (Interrupted(Fault("interrupted", "stopped")), 130),
     (KeyboardInterrupt(), 130), (ValueError("surprise"), 1), (RecursionError("deep"), 1)],
)  # fmt: skip
def test_every_exception_becomes_an_exit_code_and_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    fail_with(monkeypatch, error)
    assert main(["recipes", "list"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    expected = {RunError: "full", ValueError: "unexpected ValueError: surprise", RecursionError: "deep"}
    assert expected.get(type(error), "stopped") in captured.err.splitlines()[0]


def test_an_unexpected_error_shows_its_traceback_with_debug_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ValueError("surprise"))
    assert main(["recipes", "list", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "error: unexpected ValueError: surprise" in err


def test_a_reader_that_goes_away_ends_the_program_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [QLORA, "recipes", "show", NAME], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 1


def test_a_stdout_that_cannot_print_a_recipe_shows_escapes(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    done = subprocess.run([QLORA, "recipes", "show", "é"], env=env, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"`\\xe9`" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [("qlora tr", "train"), ("qlora recipes sh", "show"), (f"qlora recipes show {NAME[:3]}", NAME),
     (f"qlora train --config {NAME[:3]}", NAME), ("qlora train --set lora.ra", "lora.rank="),
     ("qlora train --set optimizer.paging.prefetch=o", "optimizer.paging.prefetch=off")],
)  # fmt: skip
def test_the_shell_completes_commands_recipes_and_keys(words: str, expected: str) -> None:
    env = os.environ | {"_QLORA_COMPLETE": "complete_bash", "COMP_WORDS": words,
                        "COMP_CWORD": str(len(words.split()) - 1)}  # fmt: skip
    done = subprocess.run([QLORA], env=env, capture_output=True, text=True, check=False)
    assert expected in done.stdout.split("\n")
    assert done.stderr == ""


def test_recipes_list_names_every_shipped_recipe_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped.recipe_paths())
    assert all(len(line.split()) > 4 for line in lines)
    assert main(["recipes", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == list(shipped.recipe_paths())
    assert all(entry["description"] for entry in listed)


def test_recipes_show_prints_the_file_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", NAME]) == 0
    assert capsys.readouterr().out == shipped.recipe_paths()[NAME].read_text("utf-8")


def test_recipes_copy_writes_a_recipe_that_runs_from_here_and_never_overwrites(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["recipes", "copy", NAME, "my file.yaml"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "my file.yaml" in captured.err
    recipe = load_recipe("my file.yaml").recipe
    assert recipe == load_recipe(NAME).recipe
    before = (tmp_path / "my file.yaml").read_bytes()
    assert main(["recipes", "copy", NAME, "my file.yaml"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "my file.yaml").read_bytes() == before
    assert main(["recipes", "copy", NAME, "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == ({"path": f"{NAME}.yaml"}, "")


def test_a_recipe_that_does_not_ship_is_met_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", NAME[:-1]]) == 2
    assert f"did you mean `{NAME}`?" in capsys.readouterr().err
