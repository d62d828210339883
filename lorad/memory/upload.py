"""Copies adapters from host memory into the slab without holding up the steps.

On CUDA: from page-locked memory (`pinned_arena.py`), on a stream of its own, layer by layer, after
the work that last read those pages and before what reads them: a prefill may start when the first
layer is there, and each layer of it waits, on the device, for its own. On a CPU a copy is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lorad.sizing.adapter_size import AdapterLayout


class Upload:
    """One copy that may still run. Keeps its source alive until it is done."""

    def __init__(self, source: Tensor, events: Sequence[torch.cuda.Event] = ()) -> None:
        """An event for each layer, in order; none when the copy has ended."""
        self._source: Tensor | None = source if events else None
        self._events = events

    @property
    def begun(self) -> bool:
        """Whether the first layer is there; never waits."""
        return not self._events or self._events[0].query()

    @property
    def done(self) -> bool:
        """Whether the copy has ended; never waits."""
        if self._events and self._events[-1].query():
            self._events, self._source = (), None
        return not self._events

    def order_after(self, layer: int) -> None:
        """Have the device do what it is given next after it has copied a layer; -1 is the last."""
        if self._events:
            torch.cuda.current_stream().wait_event(self._events[layer])


class Uploader:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The device may read a source that nobody else needs any more: an adapter may leave before
        # it is there. Its memory is another's only after that.
        self._unfinished: list[Upload] = []

    def start(self, target: Tensor, source: Tensor, layout: AdapterLayout) -> Upload:
        """Copy a packed adapter into a part of the slab; both 1-D, one dtype and length.

        On CUDA `source` should be page-locked: from other memory the copy waits for the host.
        """
        if self._stream is None:
            target.copy_(source)
            return Upload(source)
        self._unfinished = [upload for upload in self._unfinished if not upload.done]
        # Kernels of earlier steps may still read what lay in these pages.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        events = []
        with torch.cuda.stream(self._stream):
            for start, end in pairwise([0, *layer_ends(layout, source.numel())]):
                target[start:end].copy_(source[start:end], non_blocking=True)
                events.append(torch.cuda.Event())
                events[-1].record(self._stream)
        self._unfinished.append(Upload(source, events))
        return self._unfinished[-1]

    def join(self) -> None:
        """Order all copies before whatever the device is given next: for who moves pages."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def layer_ends(layout: AdapterLayout, elements: int) -> list[int]:
    """Where each layer ends among the packed elements, in which layers follow one another."""
    ends, following = [], elements
    for layer in reversed(layout.slices):
        ends.append(following)
        starts = [part.a_offset for projection in layer for part in projection if part.rank]
        following = min(starts, default=following)
    return ends[::-1]
