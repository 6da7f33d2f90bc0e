"""Rounding of float32 to half precision by random bits, so that the mean of many roundings is exact.

A number between two neighbours becomes the upper neighbour with the probability of its position between the two;
beyond the largest finite value the result is equal to torch's cast. The bits come from Philox4x32-10 (Salmon et
al., SC 2011) with the seed as key, and are equal in C and in torch. An element's bits do not depend on instances,
shards or threads.
"""

import zlib
from functools import cache
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from popdist.optim.pieces import BLOCK, find_extension

HALVES: Final = (torch.float16, torch.bfloat16)
"""The dtypes of half precision."""

_NUMBERS: Final = {dtype: number for number, dtype in enumerate(HALVES, 1)}
"""The number of each dtype of half precision in the extension."""

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS: Final = 10
_WORDS_OF_A_CALL: Final = 4

_INFINITY: Final = 0x7F800000
"""Bits of infinity in float32; larger numbers are bits of NaN. The next constants are bits of float32 too."""
_LARGEST_BFLOAT16: Final = 0x7F7F0000
_LARGEST_FLOAT16: Final = 0x477FE000
_LEAST_NORMAL_FLOAT16: Final = 0x38800000
_OTHER_EXPONENTS: Final = 112 << 10
"""The difference of the exponents' biases of float32 and float16, at the position of float16's exponent."""

_NAN: Final = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four tensors of 32-bit words, stored as int64."""


class Place(NamedTuple):
    """The place of elements in the optimizer's parameters, which determines the random bits of the elements."""

    position: int  # index of the parameter, counted over all parameter groups
    first: int  # number of the first element in the whole parameter, a multiple of 128


@cache
def number_of(name: str) -> int:
    """Return a number made from a tensor's ``name``; the counter of the random generator contains this number."""
    return zlib.crc32(name.encode())


def round_by_chance(wide: Tensor, held: Tensor, name: str, place: Place, *, seed: int, step: int) -> None:
    """Write the numbers ``wide`` to ``held``, rounded by random bits that all other arguments determine."""
    number, extension = number_of(name), find_extension()
    if wide.device.type != "cpu" or extension is None:
        _round_by_torch(wide, held, (step & _MASK, place.position, number), place.first, seed)
        return
    wide = wide.contiguous()
    extension.round_by_chance(
        *(wide.data_ptr(), held.data_ptr(), len(held), _NUMBERS[held.dtype], place.first, place.position, number),
        *(seed % (1 << 64), step & _MASK, torch.get_num_threads()),
    )


def philox(counter: Words, seed: int) -> Words:
    """Return four random words for each counter: Philox4x32-10 with the two halves of ``seed`` as key."""
    a, b, c, d = counter
    key, other_key = seed & _MASK, seed >> 32 & _MASK
    for _ in range(_NUM_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # & keeps the lower 64 bits, which are all bits
        a, c = (right >> 32 & _MASK) ^ b ^ key, (left >> 32 & _MASK) ^ d ^ other_key
        b, d = right & _MASK, left & _MASK
        key, other_key = key + _WEYL[0] & _MASK, other_key + _WEYL[1] & _MASK
    return a, b, c, d


def _round_by_torch(wide: Tensor, held: Tensor, known_by: tuple[int, int, int], first: int, seed: int) -> None:
    words = _words(held, known_by, first, seed)
    bits = wide.view(torch.int32).to(torch.int64) & _MASK
    size = bits & 0x7FFFFFFF
    if held.dtype == torch.bfloat16:
        halves = torch.stack([words & 0xFFFF, words >> 16], 1).view(-1)[: len(held)]
        rounded, largest = bits + halves >> 16, _LARGEST_BFLOAT16
    else:
        rounded, largest = _float16_bits(bits, size, words.view(-1)[: len(held)]), _LARGEST_FLOAT16
    nearest = wide.to(held.dtype).view(torch.int16).to(torch.int64)
    rounded = torch.where(size > largest, nearest, rounded)
    rounded = torch.where(size > _INFINITY, _NAN[held.dtype], rounded) & 0xFFFF
    held.view(torch.int16).copy_((rounded ^ 0x8000) - 0x8000)  # the 16 bits as a signed int16


def _words(held: Tensor, known_by: tuple[int, int, int], first: int, seed: int) -> Tensor:
    """Return random 32-bit words, a row for each 128 elements of ``held``; a bfloat16 element uses half a word."""
    # for float16, word w of call c belongs to element 32 w + c of a block; for bfloat16, its lower half belongs to
    # element 16 w + c, and its upper half to element 64 + 16 w + c
    num_blocks = -(-len(held) // BLOCK)
    elements_of_a_word = 2 if held.dtype == torch.bfloat16 else 1
    num_calls = BLOCK // _WORDS_OF_A_CALL // elements_of_a_word
    start = first // BLOCK * num_calls
    calls = torch.arange(start, start + num_blocks * num_calls, dtype=torch.int64, device=held.device) & _MASK
    rest = (torch.full_like(calls, number) for number in known_by)
    found = philox((calls, *rest), seed)  # type: ignore[arg-type] # the tuple has four tensors
    return torch.stack([word.view(num_blocks, num_calls) for word in found], 1).view(num_blocks, -1)


def _float16_bits(bits: Tensor, size: Tensor, words: Tensor) -> Tensor:
    """Round float32 numbers (``bits``) up or down to float16 by random ``words``; return the float16 bits."""
    normal = (size + (words >> 19) >> 13) - _OTHER_EXPONENTS
    is_small = size < _LEAST_NORMAL_FLOAT16
    units = torch.where(is_small, size, 0).to(torch.int32).view(torch.float32) * 2.0**24
    whole = units.to(torch.int32)
    limit = ((units - whole) * 2.0**31).to(torch.int32)
    subnormal = whole + ((words >> 1) < limit)
    return (bits >> 16 & 0x8000) | torch.where(is_small, subnormal, normal)
