"""Random bits as a function of a counter, in wrapping int64 arithmetic: the same on every device, for every shape."""

from torch import Tensor

ODD = -0x61C8864680B583EB
"""2**64 / golden ratio: the increment of SplitMix64"""


def mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014): int64 -> int64 that look drawn, one to one."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def sum_of_uniforms(bits: Tensor) -> Tensor:
    """bits [..., 3] -> [...] int64: twelve 16-bit uniforms, summed and centred, in units of 2**-17 standard deviations.

    Irwin-Hall: a normal variate up to an excess kurtosis of -0.1, cut at 6 standard deviations. Sums of integers are
    exact, where logarithms and cosines differ in the last bit between devices.
    """
    total = bits.new_full(bits.shape[:-1], -12 * 65535)
    for word in bits.unbind(-1):
        for shift in (0, 16, 32, 48):
            total += 2 * ((word >> shift) & 0xFFFF)
    return total


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
