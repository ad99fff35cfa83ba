"""Which sample comes when: a function of (seed, epoch, index), never of how many processes read.

Each epoch is read in its own permutation of the samples. A permutation is not stored but computed, element by
element, so a run can start at any position at once, and a data set of any size costs no memory.
"""

from dataclasses import dataclass

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
_ROUNDS = 8  # four make a Feistel network a pseudo-random permutation of large ranges; small ones need more to mix


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words that scatters every bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def permute(index: int, n: int, key: int) -> int:
    """The image of `index` under the permutation of range(n) that `key` (any integer; its low 64 bits count) names.

    A Feistel network (Luby and Rackoff 1988) permutes the next power of four; results that fall outside of range(n) are
    permuted again until one falls inside, which keeps it a bijection (cycle walking: Black and Rogaway 2002) and takes
    fewer than four rounds on average. A pure function of integers: the same on every machine.
    Raises ValueError unless 0 <= index < n.
    """
    if not 0 <= index < n:
        raise ValueError(f"permute needs 0 <= index < n; got index {index}, n {n}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [_mix((key + (turn + 1) * _GOLDEN) & _WORD) for turn in range(_ROUNDS)]
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            # The high bits of a product are its best mixed ones.
            left, right = right, left ^ ((_mix(round_key ^ right) >> 32) & mask)
        index = left << half | right
        if index < n:
            return index


@dataclass(frozen=True)
class Order:
    """The order in which `n` samples are read: the position-th sample consumed is sample `at(position)`.

    Every epoch reads each sample once; with `shuffle` in a permutation that (seed, epoch) names, else from 0 to n - 1.
    `epochs` None reads for ever. Raises ValueError when n or epochs is not positive.
    """

    n: int
    seed: int
    shuffle: bool = True
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"an order needs at least one sample; got {self.n}")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, or None to read for ever; got {self.epochs}")

    @property
    def total(self) -> int | None:
        """The number of samples in all epochs, or None when they never end."""
        return None if self.epochs is None else self.epochs * self.n

    def epoch(self, position: int) -> int:
        """The epoch, from 0, that the position-th consumed sample belongs to."""
        return position // self.n

    def at(self, position: int) -> int:
        """The index of the position-th sample consumed, or -1, a padding row, when all epochs are over."""
        if position < 0:
            raise ValueError(f"a position is the number of samples consumed before, so not negative; got {position}")
        if self.total is not None and position >= self.total:
            return -1
        epoch, index = divmod(position, self.n)
        if not self.shuffle:
            return index
        return permute(index, self.n, _mix((_mix(self.seed & _WORD) + (epoch + 1) * _GOLDEN) & _WORD))
