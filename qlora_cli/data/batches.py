"""Which examples stand in which micro-batch: a pure function of lengths, seed and epoch.

Examples are shuffled, then sorted by length inside windows of `WINDOW` micro-batches so that a micro-batch
holds similar lengths and little padding, and the micro-batches are shuffled again so that no step sees only
short ones because of where it stands. The order depends on no library's random numbers: it is the same on
every Python, machine and version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WINDOW = 16  # micro-batches that are sorted together

_MASK = (1 << 64) - 1


def plan_epoch(
    num_examples: int, lengths: Sequence[int], micro_batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """Order the examples of one epoch into micro-batches.

    Args:
        num_examples: How many there are; indices count from 0.
        lengths: Tokens of each.
        micro_batch_size: Examples in a micro-batch; the last one of the epoch may be smaller.
        seed: Any integer.
        epoch: Counted from 0; each has another order.

    Returns:
        Micro-batches that hold every example exactly once.

    Raises:
        ValueError: If `lengths` has not one entry an example, or `micro_batch_size` is below 1.
    """
    if len(lengths) != num_examples or micro_batch_size < 1:
        raise ValueError(f"{num_examples} examples, {len(lengths)} lengths, batches of {micro_batch_size}")
    order = _shuffled(range(num_examples), seed, epoch, 0)
    whole = num_examples - num_examples % micro_batch_size
    batches = []
    window = WINDOW * micro_batch_size
    for start in range(0, whole, window):
        ordered = sorted(order[start : min(start + window, whole)], key=lambda index: lengths[index])
        batches += [ordered[at : at + micro_batch_size] for at in range(0, len(ordered), micro_batch_size)]
    batches = [batches[index] for index in _shuffled(range(len(batches)), seed, epoch, 1)]
    return batches + ([order[whole:]] if whole < num_examples else [])


def in_order(num_examples: int, lengths: Sequence[int], micro_batch_size: int) -> list[list[int]]:
    """Micro-batches for evaluation: longest first, so that memory runs out at once or not at all.

    Args:
        num_examples: How many there are.
        lengths: Tokens of each.
        micro_batch_size: Examples in a micro-batch; the last one may be smaller.

    Returns:
        Micro-batches that hold every example exactly once.
    """
    order = sorted(range(num_examples), key=lambda index: (-lengths[index], index))
    return [order[at : at + micro_batch_size] for at in range(0, num_examples, micro_batch_size)]


def _shuffled(items: Iterable[int], seed: int, epoch: int, stream: int) -> list[int]:
    """Sort small integers by a hash of them, the seed, the epoch and a stream number."""
    base = _mix(_mix(_mix(seed & _MASK) ^ (epoch & _MASK)) ^ stream)
    return sorted(items, key=lambda item: (_mix(base ^ item), item))


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every bit depends on every bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
