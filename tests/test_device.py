from __future__ import annotations

import pytest
import torch

from qlora_cli.device import probe


def test_a_machine_without_a_gpu_is_a_cpu_with_its_memory_and_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = probe()
    assert (facts.kind, facts.torch_device, facts.bf16_is_fast) == ("cpu", "cpu", False)
    assert facts.total_bytes > 2**30
    assert facts.num_threads == torch.get_num_threads()


@pytest.mark.parametrize(("major", "is_fast"), [(7, False), (8, True), (9, True)])
def test_the_gpu_of_the_local_rank_is_chosen_and_its_bf16_judged(
    monkeypatch: pytest.MonkeyPatch, major: int, is_fast: bool
) -> None:
    class Properties:
        name, total_memory = "Card", 24 * 2**30

    Properties.major = major  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties if index == 1 else None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    facts = probe()
    assert (facts.torch_device, facts.name, facts.total_bytes) == ("cuda:1", "Card", 24 * 2**30)
    assert facts.bf16_is_fast == is_fast
