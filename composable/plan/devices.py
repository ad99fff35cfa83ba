"""What accelerators and the links between them can do: the denominator of model FLOP/s utilisation (MFU), and what the
planner computes with."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

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


GIB = 2**30
RESERVED = 1.5 * GIB
"""of an accelerator, for its context and communication libraries: assumed"""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Device:
    """One accelerator, at its best."""

    name: str
    memory: float
    """bytes that torch can allocate from (`total_memory` of the device): some less than is sold"""
    memory_bandwidth: float
    """bytes a second of its memory"""
    bfloat16: float
    """FLOP/s of dense matrix products in bfloat16 and float16"""
    float32: float
    """FLOP/s of dense matrix products in float32, not TF32"""
    float64: float
    """FLOP/s of dense matrix products in float64"""
    float8: float
    """FLOP/s of dense matrix products in float8; 0 where there are none"""
    achievable: float
    """share of `bfloat16` that matrix products of a good shape reach: a bound on what a model can"""

    def __post_init__(self) -> None:
        for name in ("memory", "memory_bandwidth", "bfloat16", "float32", "float64", "achievable"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} of device {self.name}: write a number above 0")
        if self.achievable > 1:
            raise ValueError(f"achievable={self.achievable} of device {self.name} is a share of its peak: at most 1")

    @property
    def usable(self) -> float:
        """Bytes that tensors and their allocator may take."""
        return self.memory - (0.0 if self.name == "cpu" else RESERVED)

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s of dense matrix products in `dtype`. ValueError where the device has none."""
        peaks = {torch.float32: self.float32, torch.float64: self.float64}
        peaks |= dict.fromkeys(HALF, self.bfloat16) | dict.fromkeys(FLOAT8, self.float8)
        if not peaks.get(dtype):
            known = ", ".join(str(each).removeprefix("torch.") for each, peak in peaks.items() if peak)
            raise ValueError(f"no peak of device {self.name} for {dtype}; it computes in {known}")
        return peaks[dtype]


@dataclass(frozen=True)
class Cluster:
    """Nodes of some devices each, and what connects them."""

    device: Device
    per_node: int
    """devices of a node"""
    inside: float
    """bytes a second that a device sends to the others of its node, and as many that it receives"""
    across: float
    """bytes a second that a device sends to other nodes while its neighbours send too, and as many that it receives"""
    inside_latency: float
    """seconds that a hop of a collective takes inside a node, whatever its size"""
    across_latency: float
    """the same to another node"""
    host_link: float
    """bytes a second between a device and its host's memory, each way"""
    overlap: float
    """share of its time that an exchange of parameters and gradients may run beside computation, 0 to 1"""

    def __post_init__(self) -> None:
        for name in ("per_node", "inside", "across", "host_link"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: write a number above 0")
        for name in ("inside_latency", "across_latency"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: write seconds, 0 or more")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap={self.overlap}: it is a share, 0 to 1")


# Memory: what torch's out-of-memory errors call the total capacity, the least of those seen for the device. Peaks: as
# in PEAKS; float64 on tensor or matrix cores. Achievable: bfloat16 with torch by the "maximum achievable matmul FLOPS"
# table of github.com/stas00/ml-engineering, compute/accelerator, over the peak here.
DEVICES = (
    Device(
        "A100-80G",
        memory=79.14 * GIB,  # of 80 GB, NVIDIA A100 data sheet, SXM
        memory_bandwidth=2.039e12,  # the same
        bfloat16=312e12,  # the same
        float32=19.5e12,  # the same
        float64=19.5e12,  # the same
        float8=0,  # none
        achievable=271.2 / 312,  # torch 2.6
    ),
    Device(
        "H100",
        memory=79.11 * GIB,  # of 80 GB, NVIDIA H100 data sheet, SXM
        memory_bandwidth=3.35e12,  # the same
        bfloat16=989.4e12,  # the same, halved: it prints the figure of 2:4 sparsity
        float32=67e12,  # the same
        float64=67e12,  # the same
        float8=1978.9e12,  # the same, halved
        achievable=794.5 / 989.4,  # torch 2.7
    ),
    Device(
        "H200",
        memory=139.72 * GIB,  # of 141 GB, NVIDIA H200 data sheet, SXM
        memory_bandwidth=4.8e12,  # the same
        bfloat16=989.4e12,  # the same, halved
        float32=67e12,  # the same
        float64=67e12,  # the same
        float8=1978.9e12,  # the same, halved
        achievable=794.5 / 989.4,  # "H200 is the same", says the table of the H100
    ),
    Device(
        "B200",
        memory=178.35 * GIB,  # of 180 GB, NVIDIA DGX B200 data sheet: 1,440 GB of 8
        memory_bandwidth=8e12,  # the same: 64 TB/s of 8
        bfloat16=2250e12,  # NVIDIA HGX B200 data sheet, an eighth of the board, halved
        float32=75e12,  # the same, an eighth
        float64=37e12,  # the same, an eighth
        float8=4500e12,  # NVIDIA DGX B200 data sheet: 72 PFLOP/s of 8, halved
        achievable=1745 / 2250,  # torch 2.7
    ),
    Device(
        "MI300X",
        memory=191.69 * GIB,  # of 192 GB, AMD Instinct MI300X data sheet
        memory_bandwidth=5.3e12,  # the same
        bfloat16=1307.4e12,  # the same
        float32=163.4e12,  # the same
        float64=163.4e12,  # the same
        float8=2614.9e12,  # the same
        achievable=668.4 / 1307.4,  # torch 2.5, ROCm 6.3, with tuned operators
    ),
    # No data sheet: CPUs differ. One rank on one core of an AMD EPYC with AVX-512, as measured for `onednn_linear`.
    Device(
        "cpu",
        memory=4 * GIB,  # assumed
        memory_bandwidth=10e9,  # assumed: a core's share of its socket's
        bfloat16=25e9,  # assumed: without bf16 units a tenth of float32
        float32=250e9,  # measured: oneDNN's float32 product
        float64=125e9,  # assumed: vectors of half as many elements
        float8=0,  # none
        achievable=1.0,  # `float32` was measured, not printed
    ),
)

# Links a direction: data sheets add up both. Latencies: hops of a ring with NCCL's Simple protocol, the constants that
# NCCL chooses its algorithms by (hwLat in src/graph/tuning.cc of NCCL 2.19; for MI300X tuning_model_0 of RCCL's).
LINKS: dict[str, dict[str, Any]] = {
    "A100-80G": {
        "per_node": 8,  # NVIDIA DGX A100 data sheet
        "inside": 300e9,  # NVIDIA A100 data sheet: NVLink 600 GB/s, both directions
        "across": 25e9,  # NVIDIA DGX A100 data sheet: 8 ConnectX of 200 Gb/s
        "inside_latency": 3.4e-6,  # NCCL: NVLink
        "across_latency": 14e-6,  # NCCL: network
        "host_link": 32e9,  # NVIDIA DGX A100 data sheet: PCIe 4.0 of 16 lanes, 64 GB/s both directions
        "overlap": 1.0,  # collectives have streams of their own
    },
    "H100": {
        "per_node": 8,  # NVIDIA DGX H100 data sheet
        "inside": 450e9,  # NVIDIA H100 data sheet: NVLink 900 GB/s, both directions
        "across": 50e9,  # NVIDIA DGX H100 data sheet: 8 ConnectX-7 of 400 Gb/s
        "inside_latency": 3.4e-6,  # NCCL: NVLink
        "across_latency": 14e-6,  # NCCL: network
        "host_link": 64e9,  # NVIDIA H100 data sheet: PCIe 5.0 of 128 GB/s, both directions
        "overlap": 1.0,  # collectives have streams of their own
    },
    "H200": {
        "per_node": 8,  # NVIDIA DGX H200 data sheet
        "inside": 450e9,  # NVIDIA H200 data sheet: NVLink 900 GB/s, both directions
        "across": 50e9,  # NVIDIA DGX H200 data sheet: 8 ConnectX-7 of 400 Gb/s
        "inside_latency": 3.4e-6,  # NCCL: NVLink
        "across_latency": 14e-6,  # NCCL: network
        "host_link": 64e9,  # NVIDIA H200 data sheet: PCIe 5.0 of 128 GB/s, both directions
        "overlap": 1.0,  # collectives have streams of their own
    },
    "B200": {
        "per_node": 8,  # NVIDIA DGX B200 data sheet
        "inside": 900e9,  # NVIDIA DGX B200 data sheet: NVLink 14.4 TB/s of 8, both directions
        "across": 50e9,  # NVIDIA DGX B200 data sheet: 8 ConnectX-7 of 400 Gb/s
        "inside_latency": 3.4e-6,  # NCCL: NVLink
        "across_latency": 14e-6,  # NCCL: network
        "host_link": 64e9,  # PCIe 5.0 of 16 lanes, as the CPUs of a DGX B200 have it
        "overlap": 1.0,  # collectives have streams of their own
    },
    "MI300X": {
        "per_node": 8,  # AMD Instinct MI300X platform data sheet
        "inside": 448e9,  # the same: 7 links to the 7 others, of 128 GB/s each, both directions
        "across": 50e9,  # Microsoft Azure ND MI300X v5: 400 Gb/s a GPU
        "inside_latency": 3.6e-6,  # RCCL: its NVLink row stands for XGMI
        "across_latency": 15.1e-6,  # RCCL: network
        "host_link": 64e9,  # AMD Instinct MI300X data sheet: PCIe 5.0 of 16 lanes, 128 GB/s both directions
        "overlap": 1.0,  # collectives have streams of their own
    },
    "cpu": {
        "per_node": 8,  # assumed: ranks of one machine
        "inside": 1e9,  # assumed: gloo over loopback
        "across": 1e9,  # assumed: Ethernet of 10 Gb/s
        "inside_latency": 100e-6,  # assumed
        "across_latency": 200e-6,  # assumed
        "host_link": 10e9,  # assumed: the same memory
        "overlap": 0.0,  # gloo computes on the same cores
    },
}

UNITS = {"GiB": GIB, "GB": 1e9, "TB": 1e12, "MB": 1e6, "Gb": 1e9 / 8, "TFLOPS": 1e12, "us": 1e-6}


def device(name: str, changes: Iterable[str] = ()) -> Device:
    """A device of `DEVICES` by its name, upper or lower case, with `changes` made to it ("memory=40GiB").

    Raises:
        ValueError: an unknown name, or a change that is none.
    """
    for each in DEVICES:
        if each.name.lower() == name.lower():
            return _changed(each, list(changes))
    raise ValueError(
        f"no device {name!r}: known are {', '.join(each.name for each in DEVICES)}; "
        "describe another by changes to one of them, such as memory=48GiB bfloat16=181TFLOPS"
    )


def cluster(name: str, changes: Iterable[str] = ()) -> Cluster:
    """Nodes of the device `name` as they are commonly built, with `changes` made to them.

    Args:
        changes: "field=number" for fields of Cluster and of Device, such as "per_node=4", "across=25GB" or
            "achievable=0.6". A number may end in GiB, MB, GB, TB, Gb (bits), TFLOPS or us.

    Raises:
        ValueError: an unknown name, or a change that is none.
    """
    links = {field.name for field in dataclasses.fields(Cluster)}
    changes = list(changes)
    own = [each for each in changes if each.partition("=")[0].strip() in links]
    found = device(name)
    for each in changes:
        if each not in own:
            found = _changed(found, [each], sorted(links - {"device"}))
    return _changed(Cluster(found, **LINKS[found.name]), own)


Changed = TypeVar("Changed", Device, Cluster)


def _changed(value: Changed, changes: Iterable[str], others: Iterable[str] = ()) -> Changed:
    numbers: list[str] = [each.name for each in dataclasses.fields(value) if each.name not in ("name", "device")]
    for change in changes:
        name, equals, text = (part.strip() for part in change.partition("="))
        if not equals or name not in numbers:
            raise ValueError(f"{change!r}: write field=number, the field one of {', '.join([*numbers, *others])}")
        number: Any = _number(change, text)
        if name == "per_node":
            if number != int(number):
                raise ValueError(f"{change!r}: a node has a whole number of devices")
            number = int(number)
        value = dataclasses.replace(value, **{name: number})
    return value


def _number(change: str, text: str) -> float:
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        return float(text.removesuffix(unit)) * UNITS.get(unit, 1)
    except ValueError:
        raise ValueError(f"{change!r}: {text!r} is no number, and no number of {', '.join(UNITS)}") from None
