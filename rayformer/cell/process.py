"""What a process that hosts a cell sets once: threads, kernels, and what must be recorded because bits depend on it."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from contextlib import suppress

import numpy as np
import torch

from rayformer.config.job import Job

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def prepare_process(job: Job, device: torch.device) -> None:
    """Set one CPU thread for this process, and deterministic kernels where the device has others.

    On a CPU one thread is enough for that, and ``use_deterministic_algorithms`` would load the compiler, 1.5 seconds.
    """
    torch.set_num_threads(1)
    if gc.get_freeze_count() == 0:
        gc.freeze()  # else every full collection looks through all that was imported, 0.2 s
    _keep_freed_memory()
    if device.type == "cuda" and job.precision.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _keep_freed_memory() -> None:
    """Let glibc keep what tensors free, up to 1 GiB, for the next ones: new pages cost 1 to 4 % of a step on a CPU."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, 2**30)


def environment(device: torch.device) -> dict[str, object]:
    """What the bits of a run depend on besides the job."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
