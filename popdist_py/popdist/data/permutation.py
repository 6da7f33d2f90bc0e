"""A shuffle that takes no memory: a keyed bijection on the numbers 0 to n - 1.

A list of 10^12 shuffled indices is neither built nor stored here: the index at a position is computed from the
position alone. A Feistel network (https://en.wikipedia.org/wiki/Feistel_cipher) mixes the bits of the position
under a key made of seed and epoch. It is a bijection on the next power of two; where it leads out of the range it
is applied again until it leads back in (cycle walking), which keeps it a bijection on the range itself.

Only integer arithmetic modulo 2^64 is used, so a seed means the same shuffle on every machine and in every version
of numpy. It is no cryptography: an adversary could predict it.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_LENGTH: Final = 2**63
NUM_ROUNDS: Final = 12
"""With fewer, the orders of ranges below 10 are visibly unequal in frequency; 12 pass the test for uniformity."""

_WORD: Final = 2**64 - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9
_SECOND_FACTOR: Final = 0x94D049BB133111EB


class Permutation:
    """The order of ``length`` indices in one epoch: a bijection on ``range(length)``.

    Takes constant memory and constant time to make. Equal arguments give the same order everywhere.

    Args:
        length: How many indices there are, 0 to 2^63.
        seed: Chooses the family of orders; any whole number.
        epoch: Chooses the order within the family; any whole number.

    Raises:
        ValueError: If ``length`` is out of range.
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"length={length} must be 0 to 2**63")
        self._length = length
        num_bits = max(2, (length - 1).bit_length())
        self._low_bits = np.uint64(num_bits // 2)
        self._low_mask = np.uint64((1 << num_bits // 2) - 1)
        self._high_mask = np.uint64((1 << num_bits - num_bits // 2) - 1)
        self._keys = [np.uint64(key) for key in round_keys(length, seed, epoch)]

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices at ``positions``, in their order and shape.

        Raises:
            IndexError: If a position is not one of 0 to ``length - 1``.
        """
        if positions.size and not 0 <= positions.min() <= positions.max() < self._length:
            raise IndexError(f"positions {positions.min()} to {positions.max()} leave the range of {self._length}")
        values = self._mix(positions.ravel().astype(np.uint64))
        outside = np.flatnonzero(values >= self._length)
        while outside.size:
            values[outside] = self._mix(values[outside])
            outside = outside[values[outside] >= self._length]
        return values.astype(np.int64).reshape(positions.shape)

    def _mix(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The Feistel network on all numbers of the power of two; each round changes one half by the other."""
        low, high = values & self._low_mask, values >> self._low_bits
        for even_key, odd_key in zip(self._keys[::2], self._keys[1::2], strict=True):
            low ^= scramble(high + even_key) & self._low_mask
            high ^= scramble(low + odd_key) & self._high_mask
        return (high << self._low_bits) | low


def scramble(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread each word's bits over the word: the finishing steps of SplitMix64, applied in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FIRST_FACTOR)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND_FACTOR)
    words ^= words >> np.uint64(31)
    return words


def _scramble_word(word: int) -> int:
    """What :func:`scramble` does, for one Python number."""
    word &= _WORD
    word = (word ^ word >> 30) * _FIRST_FACTOR & _WORD
    word = (word ^ word >> 27) * _SECOND_FACTOR & _WORD
    return word ^ word >> 31


def round_keys(*ingredients: int) -> list[int]:
    """``NUM_ROUNDS`` 64-bit keys from all ingredients; changing any of them changes every key."""
    state = 0
    for ingredient in ingredients:
        state = _scramble_word(state + ingredient + GOLDEN)
    return [_scramble_word(state + count * GOLDEN) for count in range(1, NUM_ROUNDS + 1)]
