"""The training loop: gradients summed over the accumulation window, one update, one record a step.

The loss of a step is the sum over its supervised tokens divided once by their number, over all micro-batches
and processes, so neither the split into micro-batches nor padding changes it. Every process runs its share of
the window without synchronising and the gradients are summed once at the end. The loop knows batches, a
model, an optimizer and callables; it does not know recipes, files or the terminal.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch

from qlora_cli.data.collate import Batch
from qlora_cli.errors import Fault, RunError
from qlora_cli.train.metrics import MIB, StepMetrics, host_peak_mib
from qlora_cli.train.schedule import Schedule
from qlora_cli.train.steps import StepPlan


class Optimizer(Protocol):
    """What the loop needs of `PagedAdamW`."""

    param_groups: list[dict[str, Any]]

    def step(self) -> None:
        """Update every parameter that has a gradient."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""

    def record(self, step_ms: float) -> dict[str, Any]:
        """Paging record of the last step."""


class Workers(Protocol):
    """What the loop needs of `accelerate.Accelerator`."""

    num_processes: int
    process_index: int

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients, scaled where mixed precision asks for it."""

    def reduce(self, tensor: Any, reduction: str) -> Any:
        """Sum tensors over processes."""


@dataclass(frozen=True)
class LoopSettings:
    """How a run is stepped.

    Attributes:
        learning_rate: Peak rate, scaled by the schedule's factor.
        max_grad_norm: Largest global L2 norm of a step's gradient; 0 does not clip.
        eval_every_steps: Steps between evaluations, or None for one after the last step.
        save_every_steps: Steps between checkpoints; the last step and the best evaluation save as well.
    """

    learning_rate: float
    max_grad_norm: float
    eval_every_steps: int | None
    save_every_steps: int


@dataclass(frozen=True)
class Hooks:
    """What the loop calls out to.

    Attributes:
        batch: Example indices to a batch on the CPU.
        loss: Model and batch to the sum of the token losses over supervised labels, nats.
        evaluate: Step to the fields of an evaluation, `eval_loss` and `eval_is_best` among them; None without
            validation data.
        save: Write a checkpoint of the step given.
        logged: Told the metrics of each step.
    """

    batch: Callable[[Sequence[int]], Batch]
    loss: Callable[[Any, Batch], torch.Tensor]
    evaluate: Callable[[int], dict[str, Any]] | None
    save: Callable[[int], None]
    logged: Callable[[StepMetrics], None]


class StopSignal:
    """True once Ctrl-C or SIGTERM arrived; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        """Start unset."""
        self.name: str | None = None

    def __bool__(self) -> bool:
        """Whether a signal has arrived."""
        return self.name is not None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Note the signal and give the next one its usual effect."""
        self.name = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Turn the first Ctrl-C or SIGTERM into a flag that the loop reads at the end of a step."""
    stop = StopSignal()
    before = {number: signal.signal(number, stop.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_steps(
    model: torch.nn.Module,
    optimizer: Optimizer,
    workers: Workers,
    plan: StepPlan,
    schedule: Schedule,
    settings: LoopSettings,
    hooks: Hooks,
    *,
    steps_done: int,
    stop: StopSignal,
) -> int:
    """Train from where a run stands to its last step, or to a stop signal.

    Args:
        model: In training mode; parameters that require a gradient are trained.
        optimizer: Over those parameters.
        workers: The processes that share the work.
        plan: Micro-batches of every step.
        schedule: Learning rate of every step.
        settings: Rates and intervals.
        hooks: Where batches come from and results go to.
        steps_done: Steps done before; 0 for a new run.
        stop: Read after each step; a checkpoint is saved before returning because of it.

    Returns:
        Steps done.

    Raises:
        RunError: If loss or gradient of a step is not finite; the parameters are those of the step before.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    for step, epoch, micro_batches in plan.windows(steps_done + 1):
        started = time.perf_counter()
        batches = [hooks.batch(indices) for indices in micro_batches]
        rate = settings.learning_rate * schedule.factor(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = _accumulate(model, workers, hooks, parameters, batches)
        norm = _clip(parameters, settings.max_grad_norm)
        loss_value, norm_value = float(loss), float(norm)
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise _not_finite(step, loss_value, norm_value, batches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step_ms = (time.perf_counter() - started) * 1e3

        last = step == plan.total_steps
        every = settings.eval_every_steps
        due = last or (every is not None and step % every == 0)
        evaluation = hooks.evaluate(step) if due and hooks.evaluate is not None else {}
        hooks.logged(
            StepMetrics(
                step=step,
                epoch=epoch,
                loss=loss_value,
                grad_norm=norm_value,
                learning_rate=rate,
                tokens=sum(int(b.attention_mask.sum()) for b in batches),
                supervised_tokens=sum(b.num_supervised for b in batches),
                step_ms=step_ms,
                peak_mib=peak_mib(),
                paging=optimizer.record(step_ms),
                eval=evaluation,
            )
        )
        if last or stop or step % settings.save_every_steps == 0 or evaluation.get("eval_is_best"):
            hooks.save(step)
        steps_done = step
        if stop:
            break
    return steps_done


def _accumulate(
    model: torch.nn.Module,
    workers: Workers,
    hooks: Hooks,
    parameters: list[torch.nn.Parameter],
    batches: list[Batch],
) -> torch.Tensor:
    """Gradients of one window, summed over its micro-batches and all processes.

    Returns:
        () fp32, the mean loss over the window's supervised tokens.
    """
    num_supervised = max(sum(batch.num_supervised for batch in batches), 1)
    device = parameters[0].device
    total = torch.zeros((), dtype=torch.float32, device=device)
    for batch in batches[workers.process_index :: workers.num_processes]:
        loss = hooks.loss(model, batch.to(device)) / num_supervised
        workers.backward(loss)
        total += loss.detach().float()
    if workers.num_processes > 1:
        # a process whose share of a short window is empty has no gradients yet: it adds zeros
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = workers.reduce(torch.cat([g.reshape(-1) for g in grads]), reduction="sum")
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        total = workers.reduce(total, reduction="sum")
    return total


def _clip(parameters: list[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Global L2 norm of the gradient before clipping, () fp32."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)


def _not_finite(step: int, loss: float, norm: float, batches: Sequence[Batch]) -> RunError:
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    rows = [str(origin) for batch in batches for origin in batch.origins]
    shown = ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
    return RunError(
        Fault(
            "not-finite",
            f"step {step}: {what} is not a finite number; the rows of this step are {shown}",
            hint="a lower `optimizer.learning_rate` or a longer `schedule.warmup_ratio` is the usual cure",
        )
    )


def peak_mib() -> float:
    """Peak device memory allocated by this process; on a machine without CUDA its peak resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / MIB
    return host_peak_mib()
