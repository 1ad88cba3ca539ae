"""Whatever a file or a `--set` holds: a recipe, or faults with a message; never another exception."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qlora_cli.config.load import load_recipe
from qlora_cli.config.names import all_keys
from qlora_cli.console import error_document, render_error
from qlora_cli.errors import InputError
from tests.config.conftest import MINIMAL

# Pieces of YAML, so that examples come near to recipes and to every corner of the grammar.
SIGNS = "{}[]:,-?&*!|>'\"%@`#\n\t \r.~=<\\\0\x07\ufeff\x85\u2028"
PIECES = st.sampled_from(
    [
        *SIGNS,
        *(
            "<<",
            "---",
            "...",
            "- ",
            ": ",
            "\n  ",
            "\n\n",
            "&a ",
            "*a",
            "!!int ",
            "%YAML 1.1\n",
            "? ",
            "null",
            "off",
        ),
        *("1e4", ".5", "-0", "1" * 50, "include", "base", "rows.jsonl", "part.yaml", "recipe.yaml", "é"),
        *MINIMAL.replace("\n", " ").split(),
        *sorted(all_keys()),
        *(key.rpartition(".")[2] + ": " for key in sorted(all_keys())),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=25).map("".join)
SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def answer(folder: Path, *sets: str) -> None:
    """Load the recipe; a refusal has to be presentable."""
    refusal = None
    try:
        load_recipe(folder / "recipe.yaml", sets)
    except InputError as error:
        refusal = error
    if refusal is not None:
        assert all(fault.message and fault.code for fault in refusal.faults)
        assert "\x07" not in render_error(refusal)
        assert error_document(refusal)["error"]["faults"]


@SETTINGS
@given(st.binary(max_size=60) | TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_file_is_a_recipe_or_refused_with_a_message(folder: Path, content: bytes) -> None:
    (folder / "recipe.yaml").write_bytes(content)
    answer(folder)


@SETTINGS
@given(TEXTS, st.sampled_from(["", MINIMAL]), TEXTS)
def test_any_text_after_a_recipe_and_in_a_part_is_read_or_refused(
    folder: Path, text: str, before: str, part: str
) -> None:
    (folder / "part.yaml").write_bytes(part.encode("utf-8", "surrogatepass"))
    (folder / "recipe.yaml").write_bytes(
        (before + "include: part.yaml\n" + text).encode("utf-8", "surrogatepass")
    )
    answer(folder)


@SETTINGS
@given(st.sampled_from([k for k in sorted(all_keys()) if "*" not in k]) | st.text(max_size=5), TEXTS)
def test_any_override_is_taken_or_refused_with_a_message(folder: Path, key: str, value: str) -> None:
    (folder / "recipe.yaml").write_text(MINIMAL, "utf-8")
    answer(folder, f"{key}={value}")
