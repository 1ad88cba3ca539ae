"""The two streams: data to stdout, words to stderr, and what `--quiet`, `--json` and a terminal change."""

from __future__ import annotations

import io
import json
import math

import pytest

from qlora_cli.console import LINE_EVERY_S, MAX_FAULTS_SHOWN, Console, error_document, render_error
from qlora_cli.errors import Fault, InputError, RunError


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def streams(**options: bool) -> tuple[Console, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Console(out=out, err=err, **options), out, err


FAULT = Fault(
    "unknown-key", "unknown key `a`", "r.yaml", 3, 5, "lora.a", "rank, alpha", "did you mean `alpha`?"
)


def test_data_goes_to_stdout_and_words_to_stderr() -> None:
    console, out, err = streams()
    console.out("data")
    console.say("remark")
    console.warn("careful", hint="do this")
    console.table([["a", 1], ["b", 22]], ["name", "count"])
    assert out.getvalue() == "data\n"
    assert err.getvalue() == (
        "remark\nwarning: careful\nhint: do this\nname  count\n----  -----\na         1\nb        22\n"
    )


def test_quiet_drops_remarks_tables_and_progress_and_keeps_warnings_and_errors() -> None:
    console, out, err = streams(quiet=True)
    console.say("remark")
    console.table([["a"]], ["name"])
    with console.progress(2, "training") as progress:
        progress.advance(2)
    console.warn("careful")
    console.error(InputError(FAULT))
    assert out.getvalue() == ""
    assert err.getvalue().splitlines()[:2] == ["warning: careful", "error: r.yaml:3:5: unknown key `a`"]


def test_a_warning_is_shown_once() -> None:
    console, _, err = streams()
    console.warn("careful")
    console.warn("careful")
    assert err.getvalue() == "warning: careful\n"


def test_one_fault_is_shown_with_what_is_accepted_and_a_hint() -> None:
    assert render_error(InputError(FAULT)) == (
        "error: r.yaml:3:5: unknown key `a`\n  accepted: rank, alpha\nhint: did you mean `alpha`?"
    )


def test_several_faults_end_with_their_number_and_that_nothing_was_started() -> None:
    text = render_error(InputError([FAULT, Fault("usage", "b")]))
    assert text.splitlines()[-2:] == ["error: b", "2 errors; nothing was started"]
    assert render_error(RunError([FAULT, FAULT])).endswith("\n2 errors")


def test_very_many_faults_are_cut_for_people_and_complete_in_json() -> None:
    error = InputError([FAULT] * (MAX_FAULTS_SHOWN + 7))
    assert "... and 7 more" in render_error(error)
    assert len(error_document(error)["error"]["faults"]) == MAX_FAULTS_SHOWN + 7


def test_with_json_an_error_is_a_document_on_stdout_and_text_on_stderr() -> None:
    console, out, err = streams(json=True)
    console.error(InputError(FAULT))
    document = json.loads(out.getvalue())
    assert document["error"]["code"] == "unknown-key"
    assert document["error"]["faults"] == [FAULT.as_json()]
    assert err.getvalue().startswith("error: ")


def test_json_has_no_nan_and_no_infinity() -> None:
    console, out, _ = streams(json=True)
    console.out_json({"a": math.nan, "b": [math.inf, 1.5], "c": (1, None), "d": "é"})
    assert json.loads(out.getvalue()) == {"a": None, "b": [None, 1.5], "c": [1, None], "d": "é"}
    assert out.getvalue().count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_stream_cannot_print_is_written_as_an_escape(encoding: str) -> None:
    raw_out, raw_err = io.BytesIO(), io.BytesIO()
    out, err = io.TextIOWrapper(raw_out, encoding=encoding), io.TextIOWrapper(raw_err, encoding=encoding)
    console = Console(out=out, err=err)
    console.out("é😀")
    console.say("é😀 \udcff")
    console.out_json("é😀")
    expected = {"ascii": "\\xe9\\U0001f600", "latin-1": "é\\U0001f600", "utf-8": "é😀"}[encoding]
    lines = raw_out.getvalue().decode(encoding).split("\n")
    assert lines[0] == expected
    assert json.loads(lines[1]) == "é😀"
    assert raw_err.getvalue().decode(encoding) == f"{expected} \\udcff\n"


def test_what_stands_in_a_file_cannot_steer_the_terminal() -> None:
    text = render_error(InputError(Fault("unknown-key", "unknown key `\x1b[2J\n`", "a\x07.yaml", 1, 1)))
    assert text == "error: a\\x07.yaml:1:1: unknown key `\\x1b[2J\\n`"


@pytest.mark.parametrize(
    ("terminal", "no_color", "term", "is_colored"),
    [
        (True, "", "xterm", True),
        (True, "1", "xterm", False),
        (True, "", "dumb", False),
        (False, "", "xterm", False),
    ],
)
def test_colour_only_on_a_terminal_that_wants_it(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, no_color: str, term: str, is_colored: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", term)
    err = Terminal() if terminal else io.StringIO()
    Console(out=io.StringIO(), err=err).warn("careful")
    assert ("\x1b[" in err.getvalue()) == is_colored
    assert "warning" in err.getvalue()


def test_without_a_terminal_progress_is_a_line_every_half_minute() -> None:
    clock, err = Clock(), io.StringIO()
    console = Console(out=io.StringIO(), err=err, clock=clock)
    with console.progress(100, "training") as progress:
        for step in range(1, 101):
            clock.now += LINE_EVERY_S / 10
            progress.advance(1, loss=f"{1 / step:.2f}")
    lines = err.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "training: 10/100, loss 0.10, 4:30 left"
    assert lines[-1] == "training: 100/100, loss 0.01, 0:00 left"


def test_on_a_terminal_progress_is_a_bar_and_remarks_stand_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    err = Terminal()
    console = Console(out=io.StringIO(), err=err)
    with console.progress(3, "training") as progress:
        progress.advance(1, loss="0.5")
        console.say("remark")
        progress.advance(2)
    text = err.getvalue()
    assert "3/3" in text
    assert "loss 0.5" in text
    assert "\rremark\n" in text.replace(" ", "").replace("\x1b[A", "") or "remark\n" in text


def test_a_loop_that_fails_closes_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    err = Terminal()
    console = Console(out=io.StringIO(), err=err)
    with pytest.raises(RuntimeError), console.progress(3, "training"):
        raise RuntimeError
    console.say("after")
    assert err.getvalue().endswith("after\n")


def test_a_table_without_rows_is_its_header() -> None:
    console, _, err = streams()
    console.table([], ["name", "loss"])
    assert err.getvalue() == "name  loss\n----  ----\n"
