import pytest
import torch

from composable.plan.devices import peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 PCIe", torch.float16, 756e12),
        ("NVIDIA H100 NVL", torch.bfloat16, 835.5e12),
        ("NVIDIA H200", torch.bfloat16, 989.4e12),
        ("NVIDIA B200", torch.bfloat16, 2250e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4e12),
    ],
)
def test_dense_peaks_are_those_of_the_data_sheets(name, dtype, peak):
    assert peak_flops(name, dtype) == pytest.approx(peak)


@pytest.mark.parametrize("name", ["cpu", "", "AMD EPYC 9654", "NVIDIA RTX A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_an_unknown_device_has_no_peak_rather_than_a_made_up_one(name):
    assert peak_flops(name, torch.bfloat16) is None


def test_an_unknown_dtype_has_no_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.int32) is None
