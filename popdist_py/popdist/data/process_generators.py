"""The random generators of the process that datasets draw from: Python's, numpy's, and torch's for the CPU.

Each can be set, and be watched: a look at one costs about a microsecond, and tells whether numbers were drawn
since an earlier look.

Python's ``getstate`` makes 625 numbers and ``setstate`` reads them back. Together they take as long as a small
layer of a network, and a step needs both more than once. CPython keeps these numbers in one row inside of the
generator, so here they are copied as bytes. That is nowhere promised, so it is tried with two generators when this
module is loaded; where it fails, ``getstate`` and ``setstate`` do the work.

torch's ``get_state`` makes a tensor of 5 KiB. torch, too, keeps its words in a row, of which some bytes are read
here, and none written, as a mark of the state: what moves with each number that is drawn (the place in the row,
and the second of a pair of normal numbers), and the first words, which are others whenever the row is made anew or
another seed is set. That is tried as well; where it fails, there are no marks.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.random import mtrand

PythonState: TypeAlias = tuple[bytes, float | None]
"""A state of Python's generator: the row, and the second of a pair of normal numbers if that is still to come. Two
states are equal if nothing was drawn between them."""

_ROW: Final = struct.Struct("=i624I")
"""Which word is next, and the 624 words of the Mersenne Twister."""

_VERSION: Final = 3
"""The version of the states that ``random.getstate`` gives."""

_generator: Final[Any] = random.getstate.__self__  # type: ignore[attr-defined] # behind the functions of the module


def python_state() -> PythonState:
    """The state of the generator behind the functions of ``random``."""
    return _read(_generator) if _row is None else (bytes(_row), _generator.gauss_next)


def set_python_state(state: PythonState) -> None:
    """Let the generator behind the functions of ``random`` go on from ``state``."""
    if _row is None:
        _generator.setstate(_unpacked(state))
    else:
        _row[:], _generator.gauss_next = state


def exchange_python_state(state: PythonState) -> PythonState:
    """Let the generator behind the functions of ``random`` go on from ``state``; what it was in before."""
    if _row is None:
        before = python_state()
        set_python_state(state)
    else:
        before = bytes(_row), _generator.gauss_next
        _row[:], _generator.gauss_next = state
    return before


def seeded_python_state(seed: int) -> PythonState:
    """The state that ``random.seed(seed)`` would give."""
    return _read(random.Random(seed))  # noqa: S311 - for training, not for secrets


def as_numbers(state: PythonState) -> tuple[list[int], float | None]:
    """``state`` as ``random.getstate`` has it: version, words and which one is next; and the second of a pair."""
    version, internal, gauss = _unpacked(state)
    return [version, *internal], gauss


def from_numbers(numbers: Sequence[int], gauss: float | None) -> PythonState:
    """The inverse of :func:`as_numbers`.

    Raises:
        TypeError, ValueError: If these are no state.
    """
    version, *internal = numbers
    generator = random.Random()  # noqa: S311 - as above
    generator.setstate((version, tuple(internal), gauss))
    return _read(generator)


def _read(generator: random.Random) -> PythonState:
    _, (*words, index), gauss = generator.getstate()
    return _ROW.pack(index, *words), gauss


def _unpacked(state: PythonState) -> tuple[int, tuple[int, ...], float | None]:
    index, *words = _ROW.unpack(state[0])
    return _VERSION, (*words, index), state[1]


def _row_of(generator: random.Random) -> memoryview:
    """Where in memory CPython keeps the row: behind what every object begins with."""
    return memoryview((ctypes.c_char * _ROW.size).from_address(id(generator) + object.__basicsize__)).cast("B")


def _are_rows_in_place() -> bool:
    """Whether a row that is copied from one generator to another takes its whole state along."""
    end = object.__basicsize__ + _ROW.size
    if sys.implementation.name != "cpython" or not end <= random.Random.__basicsize__ < end + 64:
        return False
    left, right = random.Random(1), random.Random(2)  # noqa: S311 - as above
    right.random()
    if any(bytes(_row_of(generator)) != _read(generator)[0] for generator in (left, right)):
        return False
    _row_of(left)[:] = bytes(_row_of(right))
    return left.getstate() == right.getstate()


_row: Final = _row_of(_generator) if _are_rows_in_place() else None


def torch_mark() -> bytes | None:
    """A mark of torch's generator for the CPU; None where there are no marks.

    Between two equal ones no number was drawn, and no state was set but the one that was there.
    """
    return None if _torch_ends is None else b"".join(_torch_ends)


_MARK_BYTES: Final = 84
"""Of the beginning of a row: the place in it, and its first 16 words."""

_TORCH_HEAD_BYTES: Final = 20
"""In front of torch's 624 words are: the seed, how many words are left, whether there is a seed, the place."""

_TORCH_TAIL_BYTES: Final = 24
"""And behind them: the second of a pair of normal numbers, of both dtypes, and whether they are there."""

_MOST_BEFORE_BYTES: Final = 256
"""So far at most from the beginning of the object the words begin."""

_Ends: TypeAlias = tuple[memoryview, memoryview]


def _ends_of_torch(generator: torch.Generator) -> _Ends | None:
    """Where in memory torch keeps the beginning and the end of a generator's row; None if it is not found."""
    address = getattr(generator, "_cdata", None)
    if not isinstance(address, int):
        return None
    words = generator.get_state().numpy()[24 : 24 + 8 * 8].view(np.uint64).astype(np.uint32).tobytes()
    start = ctypes.string_at(address, _MOST_BEFORE_BYTES).find(words)
    if start < _TORCH_HEAD_BYTES:
        return None
    head = (ctypes.c_char * _MARK_BYTES).from_address(address + start - _TORCH_HEAD_BYTES)
    tail = (ctypes.c_char * _TORCH_TAIL_BYTES).from_address(address + start + _NUM_WORDS * 4)
    return memoryview(head).toreadonly(), memoryview(tail).toreadonly()


def _find_torch_ends() -> _Ends | None:
    """Where the ends are of the generator that torch draws from, if marks are right for one that is tried."""
    tried = torch.Generator().manual_seed(_TRIED_SEED)
    ends = _ends_of_torch(tried)
    if ends is None:
        return None
    draws: tuple[Callable[[], object], ...] = (
        lambda: torch.rand(1, generator=tried),
        lambda: torch.rand(_NUM_WORDS, generator=tried),
        *[lambda: torch.randn(1, generator=tried)] * 2,
        *[lambda: torch.randn(1, generator=tried, dtype=torch.float64)] * 2,
        lambda: tried.manual_seed(_TRIED_SEED),
    )
    for draw in draws:
        mark, state = b"".join(ends), tried.get_state()
        draw()
        if b"".join(ends) == mark and not torch.equal(tried.get_state(), state):
            return None
    return _ends_of_torch(torch.default_generator)


_NUM_WORDS: Final = 624
_TRIED_SEED: Final = (1 << 40) + 7
_torch_ends: Final = _find_torch_ends()

_NUMPY_SEEDS: Final = 2**32
_MT19937_BYTES: Final = 625 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A random generator of the process.

    Attributes:
        name: What it is called.
        seed: Sets its state from a 64-bit number.
        get: Gives its state.
        set: Sets its state.
        look: Gives something that differs when numbers were drawn in between; cheaper than the state.
        undo: Makes the state what it was at a look.
    """

    name: str
    seed: Callable[[int], object]
    get: Callable[[], Any]
    set: Callable[[Any], object]
    look: Callable[[], object]
    undo: Callable[[Any], object]


def _look_at_numpy() -> bytes:
    """The bytes of the state where numpy shows them to compiled code: a copy takes a hundred times longer."""
    generator = mtrand.get_bit_generator()
    is_watched = isinstance(generator, np.random.MT19937)
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES) if is_watched else b""


def _undo_numpy(seen: bytes) -> None:
    ctypes.memmove(mtrand.get_bit_generator().ctypes.state_address, seen, len(seen))


def _look_at_torch() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _undo_torch(seen: bytes) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(seen), dtype=torch.uint8))


GENERATORS: Final = (
    Generator(
        name="python",
        seed=random.seed,
        get=python_state,
        set=set_python_state,
        look=python_state,
        undo=set_python_state,
    ),
    Generator(
        name="numpy",
        seed=lambda seed: np.random.seed(seed % _NUMPY_SEEDS),  # noqa: NPY002 - what datasets draw from
        get=np.random.get_state,
        set=np.random.set_state,
        look=_look_at_numpy,
        undo=_undo_numpy,
    ),
    Generator(
        name="torch",
        seed=torch.default_generator.manual_seed,
        get=torch.default_generator.get_state,
        set=torch.default_generator.set_state,
        look=_look_at_torch,
        undo=_undo_torch,
    ),
)
