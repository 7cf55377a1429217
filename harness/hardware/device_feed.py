"""A batch's way to the device, beside what the device computes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from harness.loaders import Batch


class DeviceFeed:
    """Puts whole batches, all their micro-batches, on `device`; on a CPU they are there already.

    On CUDA they are copied from pinned memory by a stream of its own, and the stream that computes waits for
    them there: the host is a step ahead of the device, so the copy runs beside the step before. Pageable
    batches are pinned first; the prefetch thread has done it already where `Prefetcher` pins.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and targets on the device, int64 `(B, T)`."""
        return self.put(batch.inputs, batch.targets)

    def put(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The same for two tensors that are no loader's."""
        if self._stream is None:
            return inputs.to(self._device), targets.to(self._device)
        computes = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            inputs, targets = self._copied(inputs), self._copied(targets)
        computes.wait_stream(self._stream)
        for tensor in (inputs, targets):
            tensor.record_stream(computes)  # or its memory could be given away while it is still read
        return inputs, targets

    def _copied(self, tensor: Tensor) -> Tensor:
        # torch keeps pinned memory from being used again before a copy out of it is done.
        return tensor.pin_memory().to(self._device, non_blocking=True)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # One for all feeds, of which each evaluation makes one: what a stream's memory was, torch keeps for it.
    return torch.cuda.Stream(device)
