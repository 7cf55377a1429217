"""Copies of tensors in host memory: what a background writer writes while training changes the originals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class HostCopy:
    """Host memory that takes a copy of nested containers of tensors, again and again.

    The memory is kept between copies, so it costs its allocation once: as many bytes as one copy has. For
    tensors of a GPU it is pinned: their copies are put on the stream that trains, behind the step that was
    and before the one that comes, and the host waits for none of them; `wait` does.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], Tensor] = {}
        self._copied: list[tuple[torch.device, torch.cuda.Event]] = []

    def take(self, value: Any) -> Any:
        """The same containers with their tensors replaced by copies, which the next `take` overwrites."""
        import torch

        devices: set[torch.device] = set()
        copied = self._copy(value, (), devices)
        self._copied = []
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append((device, event))
        return copied

    def wait(self) -> None:
        """Return when the last copy is complete; may be called by another thread."""
        import torch

        for device, event in self._copied:
            with torch.cuda.device(device):  # a thread begins on the first GPU, and would take memory there
                event.synchronize()

    def _copy(self, value: Any, key: tuple[Any, ...], devices: set[torch.device]) -> Any:
        import torch

        if isinstance(value, dict):
            return {name: self._copy(item, (*key, name), devices) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item, (*key, i), devices) for i, item in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        tensor = value.detach()
        memory = self._memory.get(key)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[key] = memory
        if tensor.is_cuda:
            devices.add(tensor.device)
        return memory.copy_(tensor, non_blocking=tensor.is_cuda)


def tensor_bytes(value: Any) -> int:
    """The bytes of every tensor in nested containers."""
    import torch

    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(tensor_bytes, value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0
