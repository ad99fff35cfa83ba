"""Devices and clusters are data: consistent with each other, found by name, and changed field by field."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import composable.plan.devices as devices
from composable.plan.devices import DEVICES, GIB, LINKS, cluster, device, peak_flops

TORCH_NAMES = {
    "A100-80G": "NVIDIA A100-SXM4-80GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "B200": "NVIDIA B200",
    "MI300X": "AMD Instinct MI300X",
}
SOLD = {"A100-80G": 80, "H100": 80, "H200": 141, "B200": 180, "MI300X": 192}


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_the_planner_computes_with_the_peaks_that_mfu_is_measured_by(name):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert device(name).peak(dtype) == pytest.approx(peak_flops(TORCH_NAMES[name], dtype), rel=1e-12)


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_has_a_little_less_memory_than_is_sold(name):
    assert 0.98 * SOLD[name] * GIB < device(name).memory < SOLD[name] * GIB


def test_every_device_has_its_links_and_the_node_is_faster_than_the_network():
    assert [each.name for each in DEVICES] == list(LINKS) == [*TORCH_NAMES, "cpu"]
    for name in LINKS:
        found = cluster(name)
        assert found.device == device(name)
        assert found.inside >= found.across
        assert found.inside_latency < found.across_latency


def test_every_constant_names_its_source_beside_it():
    text = Path(devices.__file__).read_text()
    tables = text[text.index("DEVICES = (") : text.index("UNITS = ")]
    rows = [line for line in tables.splitlines() if re.match(r' {8}(\w+=|"\w+": )', line)]
    assert len(rows) == 6 * 7 + 6 * 7
    for row in rows:
        assert len(row.partition("#")[2]) > 3, row


def test_a_name_is_found_in_any_case_and_an_unknown_one_names_those_that_are():
    assert device("h100") is device("H100")
    with pytest.raises(ValueError, match=r"no device 'H300': known are A100-80G, H100, H200, B200, MI300X, cpu;"):
        device("H300")
    with pytest.raises(ValueError, match="no device 'TPU'"):
        cluster("TPU")


def test_every_field_can_be_changed():
    assert device("A100-80G", ["memory=40GiB"]) == dataclasses.replace(device("A100-80G"), memory=40 * 2**30)
    found = cluster(
        "H100", ["per_node=4", "across = 200Gb", "bfloat16=600TFLOPS", "inside_latency=5us", "achievable=0.5"]
    )
    assert found.per_node == 4
    assert isinstance(found.per_node, int)
    assert found.across == 25e9
    assert found.inside_latency == pytest.approx(5e-6)
    assert found.inside == cluster("H100").inside
    assert found.device == dataclasses.replace(device("H100"), bfloat16=600e12, achievable=0.5)
    for field in dataclasses.fields(found.device):
        if field.name != "name":
            assert getattr(device("H100", [f"{field.name}=0.125"]), field.name) == 0.125
    for field in dataclasses.fields(found):
        if field.name != "device":
            assert getattr(cluster("H100", [f"{field.name}=1"]), field.name) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("memory", r"'memory': write field=number, the field one of memory, memory_bandwidth, bfloat16"),
        ("ram=3", r"'ram=3': write field=number, .*achievable, across, across_latency, host_link, inside"),
        ("memory=lots", "'memory=lots': 'lots' is no number, and no number of GiB, GB"),
        ("per_node=2.5", "'per_node=2.5': a node has a whole number of devices"),
        ("per_node=0", "per_node=0: write a number above 0"),
        ("memory=-1", "memory=-1.0 of device H100: write a number above 0"),
        ("achievable=1.5", "achievable=1.5 of device H100 is a share"),
        ("across_latency=-1us", "across_latency=-1e-06: write seconds, 0 or more"),
        ("overlap=1.5", "overlap=1.5: it is a share, 0 to 1"),
        ("name=H100", "write field=number"),
        ("device=A100-80G", "write field=number"),
    ],
)
def test_a_change_that_is_none_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        cluster("H100", [change])


def test_a_device_without_a_dtype_says_which_it_has():
    with pytest.raises(ValueError, match=r"no peak of device A100-80G for torch.float8_e4m3fn; it computes in float32"):
        device("A100-80G").peak(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"no peak of device H100 for torch.int8; .*float8_e4m3fn"):
        device("H100").peak(torch.int8)
