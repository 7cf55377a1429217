"""The most memory that a run has had on its device: CUDA's own count, else of this process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_PROC = Path("/proc/self")
_MEGABYTE = 1e6  # bytes


class PeakMemory:
    """Counts from its making on; the peaks of what this process did before are left out.

    On CUDA: the bytes in tensors (`torch.cuda.max_memory_allocated`). Else the resident set of the whole
    process, the interpreter, its libraries and mapped pages of the data included: Linux keeps its peak
    (`VmHWM`) and sets it back on request (`clear_refs`). Where it does not, the resident set is looked at in
    `sample` alone, and a peak in between is missed, which `notes` say. Where even that is not known, the peak
    is the process's own over its whole life.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sampled = 0
        self._resets = True
        self.notes: list[str] = []
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            (_PROC / "clear_refs").write_text("5")
            self._resets = process_bytes("VmHWM") is not None
        except OSError:
            self._resets = False
        if not self._resets:
            self.notes.append(
                "memory    peak_memory_mb is the most that logged steps find: this system does not set the "
                "peak of a process back"
            )
        self.sample()

    def sample(self) -> None:
        """Look at what is in use now, where nothing else keeps the peak."""
        if self._device.type != "cuda" and not self._resets:
            self._sampled = max(self._sampled, process_bytes("VmRSS") or _peak_of_process())

    def megabytes(self) -> float:
        """The peak so far, in 10^6 bytes."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            self.sample()
            peak = self._sampled if not self._resets else process_bytes("VmHWM") or 0
        return round(peak / _MEGABYTE, 3)


def process_bytes(name: str) -> int | None:
    """A size in this process's status, bytes; None where the system has none."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _peak_of_process() -> int:
    """The largest resident set in this process's life, bytes; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
