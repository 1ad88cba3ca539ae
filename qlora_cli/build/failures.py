"""What can go wrong on a machine while a run goes on, as errors of ours, with the traceback kept."""

from __future__ import annotations

import contextlib
import errno
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from qlora_cli import run_folder
from qlora_cli.errors import Fault, QloraError, RunError


@contextlib.contextmanager
def crash_log(run: Path) -> Iterator[None]:
    """Turn what can go wrong on a machine into a `RunError`, with the traceback in the run folder."""
    try:
        yield
    except QloraError as error:
        if error.exit_code == 1:
            _write_crash(run)
        raise
    except torch.OutOfMemoryError as error:
        _write_crash(run)
        raise RunError(
            Fault(
                "out-of-memory",
                f"out of device memory: {str(error).splitlines()[0]}",
                hint="a smaller `train.micro_batch_size` or `data.max_seq_len`, or"
                " `train.activation_checkpointing: full`; the same command goes on from the last checkpoint",
            )
        ) from error
    except OSError as error:
        _write_crash(run)
        reasons = {errno.ENOSPC: "no space left", errno.EROFS: "read-only", errno.EACCES: "no permission"}
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise RunError(
            Fault(
                "cannot-write",
                f"{error.filename or run}: {reason}",
                hint="what was saved before stays; make room or give another `output_dir`",
            )
        ) from error
    except Exception:
        _write_crash(run)
        raise


def _write_crash(run: Path) -> None:
    with contextlib.suppress(OSError):
        if run.is_dir():
            run_folder.write_text(run / run_folder.CRASH_LOG, traceback.format_exc())
