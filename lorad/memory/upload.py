"""Copies adapters from host memory into the slab without holding up the steps.

On CUDA: from pinned memory, on a stream of its own, ordered after the work that last read those
pages and before the first step that reads them. On a CPU a copy is a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Upload:
    """One copy that may still run. Keeps its source alive until it is done."""

    def __init__(self, source: Tensor, event: torch.cuda.Event | None) -> None:
        self._source: Tensor | None = source if event is not None else None
        self._event = event

    @property
    def done(self) -> bool:
        """Whether the copy has ended; never waits."""
        if self._event is not None and self._event.query():
            self._event = self._source = None
        return self._event is None


class Uploader:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, target: Tensor, source: Tensor) -> Upload:
        """Copy a host tensor into a part of the slab; both 1-D, one dtype and length.

        On CUDA `source` should be pinned: from pageable memory the copy waits for the host.
        """
        if self._stream is None:
            target.copy_(source)
            return Upload(source, None)
        # Kernels of earlier steps may still read what lay in these pages.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Upload(source, event)

    def join(self) -> None:
        """Order all copies before whatever the device is given next: for who moves pages."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def pinned(weights: Tensor, device: torch.device) -> Tensor:
    """The tensor in memory that the device can read by itself, where that matters."""
    return weights.pin_memory() if device.type == "cuda" else weights
