"""Tells a device that has failed from a step that has: after the first nothing on it can go on."""

from __future__ import annotations

import torch

from lorad.errors import LoradError

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, the one error that leaves a device as it was


def device_fault(error: Exception, device: torch.device) -> LoradError | None:
    """What ends the engine, or None when the device works after this error.

    A kernel that reads a wrong address ruins the whole context: every later call of the process
    gives the same error, so that only a new process can use the device again. Libraries and
    Triton raise other types for the same, so a device is asked whether it still answers.
    """
    lost = isinstance(error, torch.AcceleratorError) and not _is_out_of_memory(error)
    if not lost and _answers(device):
        return None
    reason = str(error).partition("\n")[0]  # the rest is advice for those who build torch
    return LoradError(
        "engine.device_fault",
        f"the device has failed: {reason}",
        hint="the daemon ends, and a service manager starts it again; if it comes again, look at "
        "nvidia-smi and the kernel's log",
    )


def _is_out_of_memory(error: Exception) -> bool:
    return getattr(error, "error_code", None) == _OUT_OF_MEMORY


def _answers(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
