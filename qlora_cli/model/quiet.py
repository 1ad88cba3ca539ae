"""Keeps the libraries' own progress bars, notices and deprecation warnings away from stderr.

What they report about our calls is either something the caller reports in its own words (a missing tensor)
or nothing a user can act on (a method name that peft still uses).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and peft while the block runs; errors are still raised."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")  # tells of every retry without a network
    hub_level = hub.level
    hub.setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        hub.setLevel(hub_level)
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
