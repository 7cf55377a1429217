"""Copies of tensors in host memory: what a background writer writes while training changes the originals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ALIGNMENT = 64  # bytes
_SMALLEST = 64 << 20  # bytes of a chunk
_Key = tuple[Any, ...]  # where a tensor lies in the containers


class HostCopy:
    """Host memory that takes a copy of nested containers of tensors, again and again.

    The memory is kept between copies, so it costs its allocation once: as many bytes as one copy has. For
    tensors of a GPU it is pinned: their copies are put on the stream that trains, behind the step that was
    and before the one that comes, and the host waits for none of them; `wait` does.
    """

    def __init__(self) -> None:
        self._memory: dict[_Key, Tensor] = {}
        self._copied: list[tuple[torch.device, torch.cuda.Event]] = []

    def take(self, value: Any) -> Any:
        """The same containers with their tensors replaced by copies, which the next `take` overwrites."""
        import torch

        tensors = dict(_tensors(value, ()))
        for is_cuda in (False, True):
            self._memory |= _allocated(
                {
                    key: tensor
                    for key, tensor in tensors.items()
                    if tensor.is_cuda == is_cuda and not self._has_room(key, tensor)
                },
                pinned=is_cuda,
            )
        copied = self._copy(value, ())
        self._copied = []
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
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

    def _has_room(self, key: _Key, tensor: Tensor) -> bool:
        memory = self._memory.get(key)
        return memory is not None and (memory.shape, memory.dtype) == (tensor.shape, tensor.dtype)

    def _copy(self, value: Any, key: _Key) -> Any:
        import torch

        if isinstance(value, dict):
            return {name: self._copy(item, (*key, name)) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item, (*key, i)) for i, item in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        return self._memory[key].copy_(value.detach(), non_blocking=value.is_cuda)


def _tensors(value: Any, key: _Key) -> Iterable[tuple[_Key, Tensor]]:
    """Every tensor in nested containers, and where it lies."""
    import torch

    if isinstance(value, dict):
        for name, item in value.items():
            yield from _tensors(item, (*key, name))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, (*key, i))
    elif isinstance(value, torch.Tensor):
        yield key, value


def _allocated(tensors: dict[_Key, Tensor], *, pinned: bool) -> dict[_Key, Tensor]:
    """Memory for tensors of these shapes and dtypes, each with a storage of its own: torch.save writes all of
    one."""
    import torch

    places, sizes = packed([tensor.nbytes for tensor in tensors.values()])
    # As arrays, for a tensor that is made of a part of one knows nothing of the rest.
    chunks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy() for size in sizes]
    memory = {}
    for (key, tensor), (chunk, start) in zip(tensors.items(), places, strict=True):
        if not tensor.nbytes:  # nowhere: at the place of another tensor torch.save refuses its dtype
            memory[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
            continue
        part = torch.from_numpy(chunks[chunk][start : start + tensor.nbytes])
        memory[key] = part.view(tensor.dtype).view(tensor.shape)
    return memory


def packed(sizes: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Where parts of so many bytes lie, as the number of a chunk and a byte in it; and the chunks' bytes.

    torch rounds what it pins up to a power of two, which of each tensor by itself may be twice its bytes. So
    several share a chunk that is such a power: the largest first, each where there is room.
    """
    largest = max(sizes, default=0)
    whole = max(_SMALLEST, 1 << (4 * largest - 1).bit_length()) if largest else _SMALLEST
    places, chunks = [(0, 0)] * len(sizes), list[int]()
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        needed = -(-sizes[number] // _ALIGNMENT) * _ALIGNMENT
        chunk = next((i for i, used in enumerate(chunks) if used + needed <= whole), len(chunks))
        if chunk == len(chunks):
            chunks.append(0)
        places[number] = (chunk, chunks[chunk])
        chunks[chunk] += needed
    return places, chunks


def tensor_bytes(value: Any) -> int:
    """The bytes of every tensor in nested containers."""
    return sum(tensor.nbytes for _, tensor in _tensors(value, ()))
