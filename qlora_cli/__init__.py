"""QLoRA fine-tuning with a paged AdamW whose paging is set in a recipe, visible, and exact."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "PagedAdamW": "qlora_cli.optim.paged_adamw",
    "PagingConfig": "qlora_cli.optim.placement",
    "load_recipe": "qlora_cli.config.load",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for, so that `import qlora_cli` stays light."""
    if name not in _PUBLIC:
        raise AttributeError(f"module `qlora_cli` has no attribute `{name}`")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """The public names and the version."""
    return ["__version__", *_PUBLIC]
