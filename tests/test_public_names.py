"""What `import qlora_cli` offers."""

from __future__ import annotations

import pytest

import qlora_cli


def test_every_public_name_can_be_imported() -> None:
    for name in dir(qlora_cli):
        assert getattr(qlora_cli, name) is not None


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="PagedAdam"):
        _ = qlora_cli.PagedAdam
