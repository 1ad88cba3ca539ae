"""State that leaves and comes back: into any layout, from and to other optimizers, whole or not at all."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_tools import (
    ODD_SIZES,
    RESIDENT,
    bits_of,
    copy_of,
    differing,
    go_on,
    make_params,
    paging,
    set_grads,
    train,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from qlora_cli.optim.placement import PagingConfig

ON_HOST = paging(0, 4_160, staging_pages=3)
LAYOUTS = [ON_HOST, paging(9_000, 8_192), paging(None, 100_000), RESIDENT]


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("saved_from", LAYOUTS[::3])
@pytest.mark.parametrize("loaded_into", LAYOUTS)
@pytest.mark.parametrize("by_file", [True, False])
def test_five_steps_saved_and_loaded_and_five_more_are_ten_steps(
    tmp_path: Path, by_file: bool, loaded_into: PagingConfig, saved_from: PagingConfig, bits: int
) -> None:
    half = train(saved_from, 5, state_bits=bits)
    resumed = copy_of(half, loaded_into, state_bits=bits)
    if by_file:
        half.save(tmp_path / "optimizer.safetensors")
        resumed.load(tmp_path / "optimizer.safetensors")
    else:
        resumed.load_state_dict(half.state_dict())
    assert differing(bits_of(resumed), bits_of(half)) == []
    go_on(resumed, 5, 6)
    assert differing(bits_of(resumed), bits_of(train(RESIDENT, 10, state_bits=bits))) == []


def test_paging_goes_on_after_a_load(tmp_path: Path) -> None:
    half = train(ON_HOST, 2)
    half.save(tmp_path / "optimizer.safetensors")
    resumed = copy_of(half, ON_HOST)
    resumed.load(tmp_path / "optimizer.safetensors")
    go_on(resumed, 3, 3)
    assert resumed.counters.pages_fetched == resumed.counters.pages_written == 3 * len(resumed.table.pages)


def test_a_load_clears_the_state_of_parameters_it_has_none_for() -> None:
    params = make_params((5_000, 6_000))
    optimizer = train(ON_HOST, 3, params=params)
    partial = optimizer.state_dict()
    del partial["state"][1]
    optimizer.load_state_dict(partial)
    assert list(optimizer.state_dict()["state"]) == [0]
    moments = optimizer._pages.read(1)
    assert moments.step == 0
    assert not moments.tensors["absmax1"].any()


def test_padding_of_a_short_tail_does_not_change_what_comes_after_a_load(tmp_path: Path) -> None:
    params = make_params((4_097, 5_001))
    half = train(ON_HOST, 5, params=params)
    half.save(tmp_path / "optimizer.safetensors")
    resumed = copy_of(half, RESIDENT)
    resumed.load(tmp_path / "optimizer.safetensors")
    for optimizer in (half, resumed):
        go_on(optimizer, 5, 6)
    assert differing(bits_of(half), bits_of(resumed)) == []


def storages(tree: Any) -> set[int]:
    if isinstance(tree, torch.Tensor):
        return {tree.untyped_storage().data_ptr()}
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return set().union(*map(storages, values))


@pytest.mark.parametrize("config", [ON_HOST, RESIDENT])
@pytest.mark.parametrize("bits", [8, 32])
def test_no_tensor_of_a_state_dict_shares_memory_with_a_page(bits: int, config: PagingConfig) -> None:
    optimizer = train(config, 2, state_bits=bits)
    slabs = {
        optimizer._pages.pager.read_view(page.number).untyped_storage().data_ptr()
        for page in optimizer.table.pages
    }
    found = optimizer.state_dict()
    assert not storages(found) & slabs
    before = bits_of(optimizer)
    go_on(optimizer, 1, 3)
    changed = bits_of(optimizer)
    assert differing(before, changed)  # the copy stayed, the state went on


def test_a_file_is_written_one_parameter_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    optimizer = train(ON_HOST, 2)
    read, given, most = optimizer._pages.read, [], []

    def counting(param: int) -> Any:
        moments = read(param)
        given.append(weakref.ref(moments.tensors["exp_avg"]))
        most.append(sum(tensor() is not None for tensor in given))
        return moments

    monkeypatch.setattr(optimizer._pages, "read", counting)
    optimizer.save(tmp_path / "optimizer.safetensors")
    assert len(given) == len(ODD_SIZES)
    assert max(most) <= 2  # the one being written and the next


def test_the_file_is_plain_safetensors_keyed_by_name(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.safetensors"
    optimizer = train(ON_HOST, 3)
    optimizer.save(path)
    found = load_file(path)
    state = optimizer.state_dict()["state"]
    assert torch.equal(found["layer.7.exp_avg"], state[7]["__bnb_optimizer_quant_state__"]["state1"])
    assert found["layer.0.exp_avg_sq"].dtype == torch.float32
    assert found["layer.7.absmax2"].shape == (40,)
    assert [p.name for p in tmp_path.iterdir()] == ["optimizer.safetensors"]


# ---- what is refused, and leaves the old state


def spoil(path: Path, change: Callable[..., Any]) -> None:
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    header = json.loads(metadata["qlora_paged_adamw"])
    change(tensors, header)
    save_file(tensors, path, {**metadata, "qlora_paged_adamw": json.dumps(header)})


def rename(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    header["steps"]["other"] = header["steps"].pop("layer.2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, h: h.update(format=9), "has format 9, blocks of 256; this version reads format 1"),
        (lambda t, h: h.update(block=128), "blocks of 128"),
        (rename, "does not hold the state of layer.2"),
        (
            lambda t, h: h["steps"].update({f"x{k}": 1 for k in range(5)}),
            "also holds the state of x0, x1, x2 and 2 more",
        ),
        (
            lambda t, h: t.update({"layer.7.exp_avg": t["layer.7.exp_avg"][:-1].clone()}),
            "exp_avg has 9999 elements, expected 10000",
        ),
        (lambda t, h: t.pop("layer.7.absmax2"), "layer.7 has no absmax2"),
        (
            lambda t, h: t.update({"layer.7.exp_avg": t["layer.7.exp_avg"].float()}),
            "layer.7.exp_avg is F32, expected U8",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_its_reason_and_the_state_stays(
    tmp_path: Path, change: Callable[..., Any], message: str
) -> None:
    path = tmp_path / "optimizer.safetensors"
    optimizer = train(ON_HOST, 3)
    optimizer.save(path)
    spoil(path, change)
    go_on(optimizer, 1, 4)
    before = bits_of(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load(path)
    assert differing(before, bits_of(optimizer)) == []


@pytest.mark.parametrize("content", [b"", b"no safetensors at all", None])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "optimizer.safetensors"
    optimizer = train(ON_HOST, 1)
    optimizer.save(path)
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        optimizer.load(path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    with pytest.raises(ValueError, match="holds no state of PagedAdamW"):
        train(ON_HOST, 1).load(tmp_path / "adapter.safetensors")


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        train(ON_HOST, 1).load(tmp_path / "optimizer.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["param_groups"][0]["params"].pop(),
            r"has groups of \[7\] parameters, this optimizer of \[8\]",
        ),
        (lambda s: s["state"][7].pop("step"), "layer.7: no AdamW state"),
        (
            lambda s: s["state"].update({7: {"momentum_buffer": torch.zeros(10_000), "step": 1}}),
            "layer.7: no AdamW state; the entry holds",
        ),
        (lambda s: s["state"][0].update(max_exp_avg_sq=torch.zeros(1)), "layer.0: the state is of amsgrad"),
        (
            lambda s: s["state"][0].update(exp_avg=torch.zeros(2)),
            "layer.0: exp_avg has 2 elements, expected 1",
        ),
        (
            lambda s: s["state"][7]["__bnb_optimizer_quant_state__"].pop("absmax1"),
            "layer.7: 8-bit state without absmax1",
        ),
        (lambda s: s["param_groups"][0].update(betas=(0.9, 1.5)), "betas needs two numbers"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_and_the_state_stays(
    change: Callable[..., Any], message: str
) -> None:
    optimizer = train(ON_HOST, 3)
    state = optimizer.state_dict()
    change(state)
    before, lr = bits_of(optimizer), optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert differing(before, bits_of(optimizer)) == []
    assert optimizer.param_groups[0]["lr"] == lr


def test_a_kernel_other_than_the_one_that_wrote_the_file_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.safetensors"
    optimizer = train(ON_HOST, 1)
    optimizer.save(path)
    spoil(path, lambda t, h: h.update(kernel="triton"))
    with pytest.warns(UserWarning, match="written with kernel triton"):
        optimizer.load(path)


def test_torch_hooks_and_pickled_state_work(tmp_path: Path) -> None:
    optimizer = train(ON_HOST, 2)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("load"))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    set_grads(optimizer.param_groups[0]["params"], 3)
    optimizer.step()
    assert seen == ["load", "step"]
