"""The data chain: one hash over all batches that a run has trained on, in order.

`chain_0` is the 32 bytes of the manifest's `metadata_sha256`; `chain_k` is the SHA-256 of `chain_(k-1)` and
the 32 bytes of step k's batch hash. Whoever has the data and the configuration can compute it again.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.loaders import Batch


class DataChain:
    """`value` is the chain so far, as hex."""

    def __init__(self, value: str) -> None:
        self._value = bytes.fromhex(value)
        self._last = ""

    def add(self, batch: Batch) -> None:
        """Take in the batch of one step."""
        self._last = batch_sha256(batch)
        self._value = hashlib.sha256(self._value + bytes.fromhex(self._last)).digest()

    def last_sha256(self) -> str:
        """The hash of the batch that was added last."""
        return self._last

    def value(self) -> str:
        """The chain over all batches so far, as hex."""
        return self._value.hex()


def batch_sha256(batch: Batch) -> str:
    """SHA-256 over the inputs' and then the targets' int64 little-endian bytes."""
    digest = hashlib.sha256()
    for tensor in (batch.inputs, batch.targets):
        digest.update(tensor.contiguous().numpy().astype("<i8", copy=False).tobytes())
    return digest.hexdigest()
