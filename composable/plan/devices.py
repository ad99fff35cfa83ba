"""What an accelerator can do at best: the denominator of model FLOP/s utilisation (MFU), and of the planner's times."""

from __future__ import annotations

import re

import torch

HALF = (torch.bfloat16, torch.float16)

# (pattern in the device's name, dense peak TFLOP/s of 16-bit matrix products accumulated in float32, of plain float32).
# Data sheets print the doubled figure of 2:4 sparsity too: here it is halved. The first pattern that fits counts.
# TF32 is left out: torch multiplies float32 in float32 unless told otherwise.
PEAKS = (
    (r"\bGB200\b", 2500.0, 80.0),  # NVIDIA GB200 NVL72 data sheet, per GPU
    (r"\bB200\b", 2250.0, 75.0),  # NVIDIA HGX B200 data sheet, an eighth of the board
    (r"\bGH200\b", 989.4, 67.0),  # NVIDIA GH200 data sheet
    (r"\bH[12]00 NVL\b", 835.5, 60.0),  # NVIDIA H100 NVL and H200 NVL data sheets
    (r"\bH100 PCIe\b", 756.0, 51.0),  # NVIDIA H100 PCIe data sheet
    (r"\b(H100|H200|H800)\b", 989.4, 67.0),  # NVIDIA H100 SXM and H200 SXM data sheets; H800 differs in NVLink only
    (r"\bH20\b", 148.0, 44.0),  # NVIDIA H20 data sheet
    (r"\b(A100|A800)\b", 312.0, 19.5),  # NVIDIA A100 data sheet; A800 differs in NVLink only
    (r"\bL40S\b", 362.0, 91.6),  # NVIDIA L40S data sheet
    (r"\bL4\b", 121.0, 30.3),  # NVIDIA L4 data sheet
    (r"\bA10\b", 125.0, 31.2),  # NVIDIA A10 data sheet
    (r"\bRTX A6000\b", 154.8, 38.7),  # NVIDIA Ampere GA102 whitepaper
    (r"\bRTX 4090\b", 165.2, 82.6),  # NVIDIA Ada whitepaper
    (r"\bRTX 3090\b", 71.0, 35.6),  # NVIDIA Ampere GA102 whitepaper
    (r"\bMI3(00X|25X)\b", 1307.4, 163.4),  # AMD Instinct MI300X and MI325X data sheets
    (r"\bMI250X\b", 191.5, 23.95),  # AMD Instinct MI250X data sheet, one of its two dies: torch sees each as a device
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """The dense peak of one device in FLOP/s for matrix products in `dtype`; None where it is not known.

    Known are bfloat16, float16 (both accumulated in float32) and float32 (not TF32) on the accelerators of `PEAKS`. A
    CPU, an unknown device or dtype, and a part of a device (MIG) have no figure rather than a made-up one.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it.
        dtype: of the operands.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    for pattern, half, single in PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return 1e12 * half if dtype in HALF else 1e12 * single if dtype == torch.float32 else None
    return None
