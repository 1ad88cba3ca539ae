"""The record of a step and the lines for people say what happened."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from optim_tools import RESIDENT, go_on, make_params, paging, set_grads, train

from qlora_cli.optim.paged_adamw import PagedAdamW
from qlora_cli.optim.placement import PagingConfig
from qlora_cli.optim.telemetry import PagingCounters, RunTotals, SpanTimes, StateSize, human_line, step_record

FIELDS = {
    "backend": str, "kernel": str, "emulated": bool, "state_mib": float, "resident_mib": float, "pages": int,
    "resident_pages": int, "device_peak_mib": float, "h2d_mib": float, "d2h_mib": float, "h2d_ms": float,
    "d2h_ms": float, "kernel_ms": float, "exposed_ms": float, "step_ms": float, "cost_pct": float,
    "overlap": (float, type(None)), "prefetched_pages": int, "evictions": int, "nonfinite": int, "zero_v": int,  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("config", [paging(0, 4_160), paging(None, 4_160), RESIDENT])
def test_a_record_has_every_field_with_its_type_and_is_json(config: PagingConfig) -> None:
    optimizer = train(config, 1)
    record = optimizer.record(12.5)
    assert record.keys() == FIELDS.keys()
    for name, kind in FIELDS.items():
        assert isinstance(record[name], kind), name
    assert json.loads(json.dumps(record)) == record
    assert record["step_ms"] == 12.5


def test_a_record_counts_its_own_step_only() -> None:
    optimizer = train(paging(0, 4_160), 3)
    first = optimizer.record(10.0)
    go_on(optimizer, 1, 4)
    second = optimizer.record(10.0)
    moved = optimizer.table.state_bytes / 2**20
    assert second["h2d_mib"] == second["d2h_mib"] == moved
    assert first["h2d_mib"] == 3 * moved
    assert second["prefetched_pages"] == len(optimizer.table.pages)
    assert optimizer.record(10.0)["h2d_mib"] == 0


def test_on_a_cpu_the_whole_copy_is_exposed_and_the_device_is_said_to_be_emulated() -> None:
    record = train(paging(0, 4_160), 2).record(1000.0)
    assert record["emulated"] is True
    assert record["exposed_ms"] == record["h2d_ms"] + record["d2h_ms"] > 0
    assert record["overlap"] == 0
    assert record["cost_pct"] == 100 * record["exposed_ms"] / 1000


def test_nothing_moved_means_no_overlap_and_an_idle_line() -> None:
    optimizer = train(paging(None, 4_160), 2)
    record = optimizer.record(5.0)
    assert record["overlap"] is None
    assert record["resident_mib"] == record["state_mib"]
    assert optimizer.summary() == "paging idle (all 0.1 MiB resident, device memory emulated)"


def test_gradients_that_are_not_finite_are_counted_in_the_record() -> None:
    params = make_params((5000, 100))
    optimizer = PagedAdamW(params)
    set_grads(params, 1)
    params[0].grad[:3] = torch.nan
    params[1].grad[7] = torch.inf
    optimizer.step()
    assert optimizer.record(1.0)["nonfinite"] == 4


def record_of(exposed_ms: float, moved_mib: int, **more: Any) -> dict:
    size = {
        "state_bytes": 85_196_800,
        "resident_bytes": 0,
        "pages": 21,
        "resident_pages": 0,
        "device_peak_bytes": 0,
    }
    size = StateSize(**{"backend": "pinned", "kernel": "eager", "emulated": False, **size, **more})
    moved = PagingCounters(h2d_bytes=moved_mib * 2**20, d2h_bytes=moved_mib * 2**20)
    return step_record(size, moved, SpanTimes(h2d_ms=2.0, d2h_ms=2.0, exposed_ms=exposed_ms), step_ms=400.0)


def test_the_line_for_people_says_cost_place_and_evictions() -> None:
    assert human_line(record_of(0.8, 81)) == "paging cost 0.2% of step time · 81 MiB on host · 0 evictions"
    assert human_line(record_of(0.0, 0, resident_bytes=85_196_800)) == "paging idle (all 81 MiB resident)"
    assert record_of(0.8, 81)["overlap"] == 0.8


def test_the_summary_weighs_steps_by_their_time() -> None:
    totals = RunTotals()
    totals.add(record_of(4.0, 81))
    totals.add({**record_of(0.0, 81), "step_ms": 3600.0})
    assert totals.line() == "paging cost 0.1% of step time · 81 MiB on host · 0 evictions"
    assert RunTotals().line() == "paging idle (no step was made)"


@pytest.mark.parametrize("module", ["pages", "placement", "telemetry"])
def test_planning_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, qlora_cli.optim.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
