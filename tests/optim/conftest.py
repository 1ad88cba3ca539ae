"""One thread for the optimizer's tests: their tensors are small, and a shared machine waits at barriers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    used = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(used)
