from __future__ import annotations

import math

import pytest
import torch

from qlora_cli.model.verify import compare, shorten


def logits(seed: int, positions: int = 40, vocabulary: int = 50) -> torch.Tensor:
    return 3 * torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_equal_logits_hold_with_every_figure_at_its_best() -> None:
    reference = [logits(0), logits(1)]
    comparison = compare(reference, reference, [logits(2), logits(3)], torch.float32)
    assert comparison.holds
    assert (comparison.max_abs_diff, comparison.mean_kl, comparison.top1_agreement) == (0.0, 0.0, 1.0)
    assert comparison.effect_ratio == pytest.approx(1.0)
    assert comparison.positions == 80


def test_kl_is_that_of_the_definition() -> None:
    reference, found = logits(0, 3, 4), logits(1, 3, 4)
    comparison = compare([found], [reference], [logits(2, 3, 4)], torch.bfloat16)
    expected = 0.0
    for row, other in zip(reference.tolist(), found.tolist(), strict=True):
        p, q = ([math.exp(v) / sum(map(math.exp, r)) for v in r] for r in (row, other))
        expected += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 3
    assert comparison.mean_kl == pytest.approx(expected, rel=1e-6)


def test_the_worst_prompt_is_named() -> None:
    reference = [logits(0), logits(1), logits(2)]
    found = [reference[0], reference[1] + 0.5 * logits(9), reference[2]]
    comparison = compare(found, reference, [logits(i) for i in (3, 4, 5)], torch.bfloat16)
    assert comparison.worst_prompt == 1
    assert comparison.worst_kl == pytest.approx(3 * comparison.mean_kl)
    assert not comparison.holds


@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.5, 1.5, 2.0])
def test_a_faint_effect_of_the_wrong_size_is_caught_though_rounding_is_larger(factor: float) -> None:
    without = [logits(seed, 200) for seed in range(4)]
    effect = [0.02 * logits(10 + seed, 200) for seed in range(4)]
    rounding = [0.01 * logits(20 + seed, 200) for seed in range(4)]
    reference = [w + e for w, e in zip(without, effect, strict=True)]
    right = [r + n for r, n in zip(reference, rounding, strict=True)]
    wrong = [w + factor * e + n for w, e, n in zip(without, effect, rounding, strict=True)]
    assert compare(right, reference, without, torch.bfloat16).holds
    comparison = compare(wrong, reference, without, torch.bfloat16)
    assert comparison.median_kl <= comparison.tolerance.median_kl  # by the distributions alone it would pass
    assert comparison.effect_ratio == pytest.approx(factor, abs=0.02)
    assert not comparison.holds


def test_no_effect_at_all_is_a_failure_and_not_a_division_by_zero() -> None:
    reference = [logits(0)]
    assert not compare(reference, reference, reference, torch.float32).holds


def test_rows_that_were_added_are_compared_but_have_no_effect_to_measure() -> None:
    reference, without = [logits(0, vocabulary=53)], [logits(1, vocabulary=50)]
    assert compare(reference, reference, without, torch.float32).holds
    found = [reference[0].clone()]
    found[0][:, 52] += 5
    assert not compare(found, reference, without, torch.float32).holds


def test_a_nan_is_never_within_the_tolerance() -> None:
    reference = [logits(0)]
    found = [reference[0].clone()]
    found[0][0, 0] = math.nan
    assert not compare(found, reference, [logits(1)], torch.bfloat16).holds


def test_a_finer_dtype_is_held_to_a_finer_tolerance() -> None:
    reference, without = [logits(0)], [logits(1)]
    tolerances = [
        compare(reference, reference, without, dtype).tolerance.median_kl
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    assert tolerances == sorted(tolerances)


@pytest.mark.parametrize(
    ("lengths", "most", "left"),
    [
        ([3, 4], 10, [3, 4]),
        ([3, 20, 30], 13, [3, 5, 5]),
        ([0, 5], 10, [5]),
        ([5] * 4, 3, [1, 1, 1]),
        ([], 10, []),
    ],
)
def test_long_prompts_are_cut_first(lengths: list[int], most: int, left: list[int]) -> None:
    rows = shorten([list(range(length)) for length in lengths], most)
    assert [len(row) for row in rows] == left
