"""The safetensors format, written in a stream.

8 bytes: the header's length, little-endian. The header: a JSON object that names each tensor's dtype, shape
and place, padded with spaces to a multiple of 8 bytes. Then the tensors' bytes, one after the other, widest
dtype first, so that each is aligned. https://huggingface.co/docs/safetensors#format

The library itself writes to a path or into memory, and holds on to neither an error number nor a request to
stop; it reads what is written here, which is byte for byte what it would have written.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Writable(Protocol):
    def write(self, data: bytes | memoryview, /) -> int: ...


def write_safetensors(
    tensors: dict[str, Tensor], file: Writable, metadata: dict[str, str] | None = None
) -> None:
    """Write named tensors, which may lie on any device; the same arguments give the same bytes."""
    import torch

    names = {
        torch.int64: "I64",
        torch.float64: "F64",
        torch.float32: "F32",
        torch.int32: "I32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
    place = {dtype: number for number, dtype in enumerate(names)}
    ordered = sorted(tensors.items(), key=lambda item: (place[item[1].dtype], item[0]))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)
