"""What a GPU could compute at most, by its name: the denominator of the MFU.

The figures are of dense matrix products in bf16 that are summed in float32, which is what autocast trains
with. What a data sheet says first is often another one:

* H100, H200, B200 and their kin are sold by the figure for 2:4 sparsity, twice the dense one: H100 and H200
  SXM by 1,979, H100 NVL and H200 NVL by 1,671, B200 by 4,500 and a GPU of GB200 by 5,000
  (https://www.nvidia.com/en-us/data-center/h100/, https://www.nvidia.com/en-us/data-center/h200/,
  https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703).
* GeForce cards sum in float32 at half the speed at which they sum in float16, and are sold by the latter: an
  RTX 4090 by 330.3, an RTX 5090 by 419
  (https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf).
  Cards for workstations and servers sum in both at full speed.
* V100 and T4 have no bf16 units: this is their fp16 figure.
* ROCm shows each half of an MI250X as a GPU: this is half of the card's figure.

Looked up in 2026, also in what torchtitan (torchtitan/tools/utils.py), nanochat (`get_peak_flops`) and
Lightning (fabric/utilities/throughput.py) divide by. They differ in A10G, AWS's card whose tensor units are
slower than an A10's: Lightning takes that one's 125. The cards' figures also follow from each other, by units
times clock.
"""

from __future__ import annotations

import re

_TERAFLOPS = {
    "GB300": 2500, "GB200": 2500, "B300": 2250, "B200": 2250, "B100": 1750,
    "GH200": 989, "H200": 989, "H200 NVL": 835.5,
    "H100": 989, "H100 NVL": 835.5, "H100 PCIE": 756, "H100 HBM2E": 756,
    "H800": 989, "H800 PCIE": 756, "H20": 148,
    "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "A10": 125, "A10G": 70,
    "L40S": 362, "L40": 181, "L4": 121,
    "RTX PRO 6000 BLACKWELL WORKSTATION EDITION": 503.8, "RTX 6000 ADA GENERATION": 364.2,
    "RTX A6000": 154.8, "RTX A5000": 111.1, "RTX A4000": 76.7,
    "RTX 5090": 209.5, "RTX 5080": 112.6, "RTX 4090": 165.2, "RTX 4090 D": 147.1, "RTX 4080": 97.5,
    "RTX 3090": 71, "RTX 3090 TI": 80,
    "V100": 125, "V100 PCIE": 112, "V100S": 130, "T4": 65,
    "AMD INSTINCT MI325X": 1307.4, "AMD INSTINCT MI300X": 1307.4, "AMD INSTINCT MI250X": 191.5,
}  # fmt: skip

# Words that name no other chip: the maker, the memory, the socket. Those with 64 GB are supercomputers' own.
_ASIDE = re.compile(r"NVIDIA|TESLA|GEFORCE|(?!64)\d+GB?|HBM3\w*|SXM\d*|AC")


def peak_of(name: str) -> float | None:
    """FLOP/s of the GPU of this name, as `torch.cuda.get_device_name` gives it; None where it is not known.

    The whole name counts: a laptop's RTX 4090 and a MIG part of an A100 are other devices than those of the
    names they begin with, and L40S is not L40.
    """
    words = [word for word in re.split(r"[\s-]+", name.upper()) if not _ASIDE.fullmatch(word)]
    without = [word for word in words if word != "PCIE"]
    found = _TERAFLOPS.get(" ".join(words), _TERAFLOPS.get(" ".join(without)))
    return None if found is None else found * 1e12
