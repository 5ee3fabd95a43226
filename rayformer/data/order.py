"""The order in which training reads its samples, as a pure function of seed and position.

This order is final: checkpoints hold only a number of consumed samples, and a resumed run must go on in the same order.
`tests/golden/sample_order.json` holds values of it.
"""

from __future__ import annotations

from functools import lru_cache

_NUM_ROUNDS = 8
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def sample_at(n: int, *, num_samples: int, seed: int) -> int:
    """Return the sample, in [0, num_samples), that is the n-th (from 0) read since the beginning of the run.

    Each epoch reads every sample once, in an order of its own, in O(1) time and memory. With all arithmetic modulo
    2^64, ^ exclusive or, and mix the splitmix64 finalizer

        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;  z = (z ^ z >> 27) * 0x94d049bb133111eb;  mix = z ^ z >> 31

    the order is

        epoch    = n // num_samples
        position = n % num_samples
        state    = mix(mix(seed + g) ^ epoch)             g = 0x9e3779b97f4a7c15; a negative seed is taken modulo 2^64
        key[r]   = mix(state + (r + 1) * g)               r = 0 ... 7: the splitmix64 generator started at state
        h        = the smallest integer >= 1 with 4^h >= num_samples

    and a Feistel network of 8 rounds over 2h bits, walked along its cycle until it is back in range:

        x = position
        do  left, right = the high h bits of x, the low h bits of x
            for r = 0 ... 7:  left, right = right, left ^ (the low h bits of mix(key[r] ^ right))
            x = left * 2^h + right
        while x >= num_samples
        return x

    Black and Rogaway, "Ciphers with arbitrary finite domains" (2002); Steele et al., splitmix64 (2014).

    >>> [sample_at(n, num_samples=5, seed=1234) for n in range(10)]
    [2, 1, 3, 0, 4, 3, 4, 2, 1, 0]
    """
    assert n >= 0 and num_samples >= 1, f"n={n}, num_samples={num_samples}"
    epoch, x = divmod(n, num_samples)
    keys = _round_keys(seed, epoch)
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    while True:
        left, right = x >> half_bits, x & half_mask
        for key in keys:
            left, right = right, left ^ (_mix(key ^ right) & half_mask)
        x = left << half_bits | right
        if x < num_samples:
            return x


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    state = _mix(_mix((seed + _GAMMA) & _MASK) ^ (epoch & _MASK))
    return tuple(_mix((state + (r + 1) * _GAMMA) & _MASK) for r in range(_NUM_ROUNDS))


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31
