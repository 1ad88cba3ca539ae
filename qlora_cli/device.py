"""Facts of the device a run will use; the only module that asks the driver anything."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What choices depend on.

    Attributes:
        kind: `cpu` or `cuda`.
        name: As the driver says; `CPU` on a machine without one.
        index: Number of the GPU, 0 on a CPU.
        total_bytes: Memory of the device.
        num_threads: Threads that torch uses on the host.
        bf16_is_fast: Whether the device has bf16 matrix units.
    """

    kind: str
    name: str
    index: int
    total_bytes: int
    num_threads: int
    bf16_is_fast: bool

    @property
    def torch_device(self) -> str:
        """The device as torch names it."""
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"


def probe() -> DeviceFacts:
    """Ask for the device of this process: the GPU of its local rank where there is one, else the CPU."""
    import torch

    threads = torch.get_num_threads()
    if not torch.cuda.is_available():
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceFacts("cpu", "CPU", 0, host, threads, False)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    facts = torch.cuda.get_device_properties(index)
    return DeviceFacts("cuda", facts.name, index, facts.total_memory, threads, facts.major >= 8)
