"""The optimizer that training sees: AdamW whose moments live in pages.

A real `torch.optim.Optimizer`: parameter groups, schedulers, clipping and `zero_grad` work as with any other.
`Optimizer.state` stays empty, because the state is bytes on pages; `state_dict` gives it in the form of
torch's AdamW (32-bit) or bitsandbytes (8-bit). Where pages lie and how they move is `placement`, `backend`
and `pager`; the numbers are `kernels`. No choice of the first three can change a trained bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qlora_cli.optim import checks, pages, state_file, state_io
from qlora_cli.optim.kernels import KERNELS, EagerKernel, Hyper, Piece
from qlora_cli.optim.paged_state import MakeBackend, PagedState, formats_after_load
from qlora_cli.optim.placement import Choice, PagingConfig
from qlora_cli.optim.state_io import Moments


class PagedAdamW(torch.optim.Optimizer):
    """AdamW with 8- or 32-bit moments on pages that can leave the device between steps.

    Attributes:
        counters: What paging did since the optimizer was made.
        choices: What was `auto` and what it became: `backend`, `page_bytes`, `budget_bytes`, `kernel`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_bits: int = 8,
        min_8bit_size: int = pages.MIN_8BIT_NUMEL,
        paging: PagingConfig | None = None,
        kernel: str = "auto",
    ) -> None:
        """Allocate zeroed state for every parameter.

        Args:
            params: Parameters, `(name, parameter)` pairs, or groups of either; contiguous, on one device.
            lr: Learning rate of each group that names none.
            betas: Decay of the first and the second moment, each in [0, 1).
            eps: Added to the root of the bias-corrected second moment, > 0.
            weight_decay: Decoupled decay, >= 0.
            state_bits: 8 for blockwise 8-bit moments, 32 for fp32.
            min_8bit_size: Parameters with fewer elements keep 32-bit moments.
            paging: Where state lives and how it moves; None takes every default.
            kernel: `auto` or `eager`.

        Raises:
            ValueError: If a value is out of range, or a parameter is not contiguous, not fp32, bf16 or fp16,
                or on another device than the others.
        """
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
        pages.formats((), state_bits, min_8bit_size)
        self._config = paging or PagingConfig()
        self._state_bits, self._min_8bit_size = state_bits, min_8bit_size
        self._pages: PagedState | None = None
        self._flat: list[Tensor] = []
        self._hypers: list[Hyper | None] = []
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        device = self._flat[0].device
        self._kernel = EagerKernel(device)
        self._pages = PagedState(self._config, device, self._make_backend())
        numels = [param.numel() for param in self._flat]
        self._pages.build(numels, pages.formats(numels, state_bits, min_8bit_size))
        self.counters = self._pages.counters
        reason = "the only kernel there is" if kernel == "auto" else f"kernel is {kernel}"
        self.choices = self._pages.choices
        self.choices["kernel"] = Choice("eager", reason)
        self._totals = self._pages.totals

    def _make_backend(self) -> MakeBackend | None:
        """None for the real memory; a test puts in memory that runs copies in another order."""
        return None

    @property
    def table(self) -> pages.PageTable:
        """Which state lies on which page."""
        return self._open().table

    def __repr__(self) -> str:
        """Torch's description, and where the state lies."""
        where = "closed" if self._pages is None else f"backend {self.choices['backend'].value}"
        return f"{super().__repr__()} ({where})"

    # ---- parameters and layout

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; the state of those that were there is kept.

        Args:
            param_group: As for any torch optimizer.

        Raises:
            ValueError: If a value is out of range or a parameter is not acceptable; nothing was added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            checks.check_group(group)
            device = self.param_groups[0]["params"][0].device
            for param, name in zip(group["params"], self.param_names()[len(self._flat) :], strict=True):
                checks.check_param(param, device, name)
        except ValueError:
            self.param_groups.pop()
            raise
        self._flat += group["params"]
        if self._pages is not None:
            numels = [param.numel() for param in group["params"]]
            self._pages.grow(numels, pages.formats(numels, self._state_bits, self._min_8bit_size))

    def param_names(self) -> list[str]:
        """Name every parameter: as it was given, else `param_0`, `param_1` and so on.

        Returns:
            Names in registration order.
        """
        names: list[str] = []
        for group in self.param_groups:
            numbered = [f"param_{len(names) + k}" for k in range(len(group["params"]))]
            names += group.get("param_names", numbered)
        return names

    # ---- the step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns when the work is enqueued.

        Args:
            closure: Computes the loss and the gradients anew.

        Returns:
            What `closure` returned, or None.

        Raises:
            ValueError: If a gradient is sparse, or not of its parameter's shape and device; nothing was
                updated.
            RuntimeError: After `close`.
        """
        state = self._open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        live = [index for index, param in enumerate(self._flat) if param.grad is not None]
        checks.check_grads(self._flat, live, self.param_names)
        self._set_hypers(state.steps)
        state.pager.run(state.table.pages_of(live), self._update_page)
        return loss

    def _set_hypers(self, steps: list[int]) -> None:
        """Count the step of every live parameter and gather its scalars."""
        self._hypers = []
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            scalars = (float(group["lr"]), beta1, beta2, group["eps"], float(group["weight_decay"]))
            shared: dict[int, Hyper] = {}
            for param in group["params"]:
                if param.grad is None:
                    self._hypers.append(None)
                    continue
                index = len(self._hypers)
                steps[index] += 1
                self._hypers.append(shared.setdefault(steps[index], Hyper(*scalars, steps[index])))

    def _update_page(self, number: int, buffer: Tensor) -> None:
        page = self.table.pages[number]
        pieces: list[Piece] = []
        for segment in page.segments:
            param, hyper = self._flat[segment.param], self._hypers[segment.param]
            if hyper is not None and param.grad is not None:
                flat, grad = param.view(-1), param.grad.reshape(-1)
                if segment.num_elems != flat.numel():
                    span = slice(segment.elem0, segment.elem0 + segment.num_elems)
                    flat, grad = flat[span], grad[span]
                pieces.append(Piece(flat, grad, segment.block0, hyper))
        self._kernel.update_(state_io.page_arrays(page, buffer), pieces)

    # ---- what it cost

    def record(self, step_ms: float) -> dict[str, Any]:
        """Report what paging did since the last call; the `paging` object of `metrics.jsonl`.

        Args:
            step_ms: Milliseconds of the whole training step, forward and backward included.

        Returns:
            The record; see docs/paging.md for its fields.
        """
        return self._open().record(self._kernel.name, self._kernel.counts(), step_ms)

    def summary(self) -> str:
        """Say in one line what paging cost over all recorded steps.

        Returns:
            Such as `paging cost 0.2% of step time · 81 MiB on host · 0 evictions`.
        """
        return self._totals.line()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Copy all state out, in the form torch's AdamW (32-bit) and bitsandbytes (8-bit) load.

        Returns:
            `state`, `param_groups`, and `qlora_paged_adamw`, which says what wrote it. No tensor shares
            memory with a page; parameters that were never updated have no entry.
        """
        return self.export("ours")

    def export(self, dialect: str) -> dict[str, Any]:
        """Copy all state out for a given reader.

        Args:
            dialect: `ours`; `bnb` for bitsandbytes, which wants its own names for 32-bit state; `torch` for
                torch's AdamW, which wants fp32 moments.

        Returns:
            A state dict.

        Raises:
            ValueError: If the dialect is none of these.
        """
        if dialect not in ("ours", "bnb", "torch"):
            raise ValueError(f"dialect must be ours, bnb or torch, got {dialect!r}")
        state = self._open()
        packed = super().state_dict()
        packed["state"] = {}
        for index, param in enumerate(self._flat):
            if state.steps[index]:
                moments = state.read(index)
                moments = state_io.convert(moments, 32) if dialect == "torch" else moments
                packed["state"][index] = state_io.as_entry(moments, param.shape, dialect)
        if dialect == "ours":
            packed[state_file.KEY] = self._header() | {"numels": list(state.table.numels)}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state of this optimizer, torch's AdamW, or bitsandbytes' AdamW (paged or not, 8 or 32 bits).

        8-bit state keeps its codes, and small parameters that were kept in fp32 stay so. Everything is
        checked before the first byte is written.

        Args:
            state_dict: What the other's `state_dict` returned.

        Raises:
            ValueError: If groups, sizes or the kind of optimizer do not match; the old state is kept.
        """
        groups = checks.own_groups(state_dict, self.param_groups)
        names = self.param_names()
        parsed: dict[int, Moments] = {}
        found: dict[int, int] = {}
        for index, number in enumerate(number for group in groups for number in group["params"]):
            if number in state_dict["state"]:
                entry, numel = state_dict["state"][number], self.table.numels[index]
                parsed[index], found[index] = state_io.parse_entry(entry, numel, names[index])
        if any(parsed[index].bits != bits for index, bits in found.items()):
            _warn("the 8-bit maps are not those of this optimizer; the state is encoded anew")
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        self._replace(found, parsed.get)

    def save(self, path: str | Path) -> None:
        """Write all state to a safetensors file, one parameter at a time, whole or not at all.

        Args:
            path: The file; learning rate and the other scalars are the recipe's and are not in it.
        """
        state, names = self._open(), self.param_names()
        header = self._header() | {
            "numels": dict(zip(names, state.table.numels, strict=True)),
            "steps": dict(zip(names, state.steps, strict=True)),
        }
        shapes = [param.shape for param in self._flat]
        state_file.write_file(Path(path), header, names, shapes, state.table.bits, state.read)

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote, into whatever layout this optimizer has.

        Args:
            path: The file; its parameters are matched by name.

        Raises:
            ValueError: If the file is damaged, of another format, or does not hold exactly these parameters;
                the old state is kept.
        """
        file = state_file.StateFile(Path(path))
        names = self.param_names()
        found = file.check(dict(zip(names, self.table.numels, strict=True)))
        written = file.header["kernel"]
        if written != self._kernel.name:
            _warn(f"{path} was written with kernel {written}; {self._kernel.name} may differ in the last bit")
        self._replace(
            dict(enumerate(found.values())), lambda index: file.read(names[index], found[names[index]])
        )

    def _header(self) -> dict[str, Any]:
        return {
            "format": state_file.FORMAT,
            "state_bits": self._state_bits,
            "block": pages.BLOCK,
            "min_8bit_size": self._min_8bit_size,
            "kernel": self._kernel.name,
        }

    def _replace(self, found: Mapping[int, int], read: Callable[[int], Moments | None]) -> None:
        state = self._open()
        wish = (self._state_bits, self._min_8bit_size)
        bits, converted = formats_after_load(found, state.table.numels, *wish)
        if converted:
            _warn(f"the moments of {converted} parameters are converted to the format of `state_bits`")
        state.replace(bits, read)

    # ---- end

    def close(self) -> None:
        """Wait for copies under way and free all state; `step` is an error afterwards. Twice is once."""
        if self._pages is not None:
            self._pages.pager.close()
        self._pages = None

    def __enter__(self) -> PagedAdamW:
        """Use as a context manager that closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _open(self) -> PagedState:
        if self._pages is None:
            raise RuntimeError("this optimizer was closed; its state is gone")
        return self._pages


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)
