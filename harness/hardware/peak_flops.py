"""What a GPU could compute at most, by its name: the denominator of the MFU."""

from __future__ import annotations

import re

# Dense bf16 with float32 sums, in TFLOP/s, from the vendors' data sheets and architecture papers; where those
# give the figure for 2:4 sparsity alone, half of it. V100 and T4 have no bf16 units: their fp16 figure.
_TERAFLOPS = {
    "GB300": 2500, "GB200": 2500, "B300": 2250, "B200": 2250, "B100": 1750,
    "GH200": 989, "H200": 989, "H200 NVL": 835.5,
    "H100": 989, "H100 NVL": 835.5, "H100 PCIE": 756,
    "H800": 989, "H800 PCIE": 756, "H20": 148,
    "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "A10": 125, "A10G": 70,
    "L40S": 362, "L40": 181, "L4": 121,
    "RTX 6000 ADA GENERATION": 364.2, "RTX A6000": 154.8, "RTX A5000": 111.1,
    "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71, "RTX 3090 TI": 80,
    "V100": 125, "V100 PCIE": 112, "V100S": 130, "T4": 65,
    "AMD INSTINCT MI300X": 1307.4,
}  # fmt: skip

# Words that name no other chip: the maker, the memory, the socket.
_ASIDE = re.compile(r"NVIDIA|TESLA|GEFORCE|\d+GB?|HBM\d\w*|SXM\d*|AC")


def peak_of(name: str) -> float | None:
    """FLOP/s of the GPU of this name, as `torch.cuda.get_device_name` gives it; None where it is not known.

    The whole name counts: a laptop's RTX 4090, an RTX 4090 D and a MIG part of an A100 are other devices.
    """
    words = [word for word in re.split(r"[\s-]+", name.upper()) if not _ASIDE.fullmatch(word)]
    without = [word for word in words if word != "PCIE"]
    found = _TERAFLOPS.get(" ".join(words), _TERAFLOPS.get(" ".join(without)))
    return None if found is None else found * 1e12
