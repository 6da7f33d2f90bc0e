"""The random generators of the process that datasets draw from: Python's, numpy's, and torch's for the CPU.

Each can be set, and be watched: a look at one costs about a microsecond, and tells whether numbers were drawn
since an earlier look.

Python's ``getstate`` makes 625 numbers and ``setstate`` reads them back. Together they take as long as a small
layer of a network, and a step needs both more than once. CPython keeps these numbers in one row inside of the
generator, so here they are copied as bytes. That is nowhere promised, so it is tried with two generators when this
module is loaded; where it fails, ``getstate`` and ``setstate`` do the work.

torch's ``get_state`` makes a tensor of 5 KiB, and ``set_state`` reads one. torch, too, keeps its words in a row,
with the place in it before and the second of a pair of normal numbers behind. So it is copied in the same way, and
tried in the same way. Its lock is not taken: what another thread draws at that moment may come from either state.

numpy tells where the words of a bit generator are. The second of a pair of normal numbers is elsewhere. It belongs
to no state: whenever states are exchanged it is dropped. That is tried as well, and where it is not found
``set_bit_generator`` drops it.
"""

import ctypes
import random
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

from popdist import extensions

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


def _address_of(generator: random.Random) -> int:
    """Where in memory CPython keeps the row: behind what every object begins with."""
    return id(generator) + object.__basicsize__


def _row_of(generator: random.Random) -> memoryview:
    return _memory(_address_of(generator), _ROW.size)


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


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


TorchState: TypeAlias = bytes
"""A state of torch's generator for the CPU: the row, or what ``get_state`` gives where there is none."""


def torch_state() -> TorchState:
    """The state of torch's generator for the CPU."""
    return _torch_state_of(torch.default_generator) if _torch_row is None else bytes(_torch_row)


def set_torch_state(state: TorchState) -> None:
    """Let torch's generator for the CPU go on from ``state``."""
    if _torch_row is None:
        torch.default_generator.set_state(as_torch_tensor(state))
    else:
        _torch_row[:] = state


def seeded_torch_state(seed: int) -> TorchState:
    """The state that ``torch.manual_seed(seed)`` would give."""
    return _torch_state_of(torch.Generator().manual_seed(seed))


def as_torch_tensor(state: TorchState) -> Tensor:
    """``state`` as ``torch.get_rng_state`` has it; a new tensor."""
    if _torch_row is None:
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)
    generator = torch.Generator()
    _torch_row_of(generator)[:] = state
    return generator.get_state()


def from_torch_tensor(tensor: Tensor) -> TorchState:
    """The inverse of :func:`as_torch_tensor`.

    Raises:
        TypeError, RuntimeError: If it is no state.
    """
    generator = torch.Generator()
    generator.set_state(tensor)
    return _torch_state_of(generator)


def _torch_state_of(generator: torch.Generator) -> TorchState:
    return generator.get_state().numpy().tobytes() if _torch_row is None else bytes(_torch_row_of(generator))


_NUM_WORDS: Final = 624
_SEED: Final = (1 << 40) + 7

_TORCH_HEAD_BYTES: Final = 20
"""In front of torch's 624 words are: the seed, how many words are left, whether there is a seed, the place."""

_TORCH_TAIL_BYTES: Final = 24
"""And behind them: the second of a pair of normal numbers, of both dtypes, and whether they are there."""

_TORCH_BYTES: Final = _TORCH_HEAD_BYTES + 4 * _NUM_WORDS + _TORCH_TAIL_BYTES

_MOST_BEFORE_BYTES: Final = 256
"""So far at most from the beginning of the object the words begin."""


def _find_torch_row() -> int | None:
    """How far behind the beginning of a generator of torch's its row is; None if it is not found."""
    generator = torch.Generator().manual_seed(_SEED)
    address = getattr(generator, "_cdata", None)
    if not isinstance(address, int):
        return None
    numbers = generator.get_state().numpy()[24 : 24 + 8 * _NUM_WORDS].view(np.uint64)
    words = numbers.astype(np.uint32).tobytes()
    start = ctypes.string_at(address, _MOST_BEFORE_BYTES).find(words[:32])
    if start < _TORCH_HEAD_BYTES or ctypes.string_at(address + start, len(words)) != words:
        return None
    return start - _TORCH_HEAD_BYTES


def _torch_address_of(generator: Any) -> int:  # noqa: ANN401 - torch's stubs leave out what is asked for
    return int(generator._cdata) + (_torch_start or 0)  # noqa: SLF001 - torch's own name for where it is


def _torch_row_of(generator: torch.Generator) -> memoryview:
    return _memory(_torch_address_of(generator), _TORCH_BYTES)


def _are_torch_rows_whole() -> bool:
    """Whether a row that is copied from one generator to another takes its whole state along."""
    if _torch_start is None:
        return False
    draws: tuple[Callable[[torch.Generator], Tensor], ...] = (
        lambda it: torch.rand(_NUM_WORDS + 1, dtype=torch.float32, generator=it),
        lambda it: torch.randn(1, dtype=torch.float32, generator=it),
        lambda it: torch.randn(1, generator=it, dtype=torch.float64),
    )
    left, right = torch.Generator().manual_seed(_SEED), torch.Generator().manual_seed(1)
    for draw in (*draws, *reversed(draws)):
        draw(left)
        if torch.equal(left.get_state(), right.get_state()):
            return False
        _torch_row_of(right)[:] = bytes(_torch_row_of(left))
        if not torch.equal(left.get_state(), right.get_state()):
            return False
        if any(not torch.equal(again(left), again(right)) for again in draws):
            return False
    return True


_torch_start: Final = _find_torch_row()
_torch_row: Final = _torch_row_of(torch.default_generator) if _are_torch_rows_whole() else None


NUMPY_ROW: Final = struct.Struct("=624Ii")
"""The 624 words of numpy's Mersenne Twister, and which one is next."""

_PAIR: Final = struct.Struct("=i4xd")
"""Whether numpy has the second of a pair of normal numbers, and that number."""

_NO_PAIR: Final = _PAIR.pack(0, 0.0)

_random_state: Final[Any] = np.random.rand.__self__  # type: ignore[attr-defined] # behind the functions of numpy.random

_found_bits: Final[Any] = get_bit_generator()
_numpy_bits: Final[Any] = _found_bits if type(_found_bits) is np.random.MT19937 else np.random.MT19937()
"""What numpy's functions draw from, unless the program has given them something else."""


def numpy_row(bits: Any) -> bytes:  # noqa: ANN401 - numpy's stubs leave out what is asked for
    """The state of a Mersenne Twister of numpy's."""
    return ctypes.string_at(bits.ctypes.state_address, NUMPY_ROW.size)


def _find_pair() -> int | None:
    """How far behind the beginning of a RandomState its pair is; None if it is not found."""
    left, right = np.random.RandomState(1), np.random.RandomState(1)
    left.normal()
    right.normal(size=2)
    pair = _PAIR.pack(1, left.get_state(legacy=False)["gauss"])
    start = ctypes.string_at(id(left), type(left).__basicsize__).find(pair)
    if sys.implementation.name != "cpython" or type(_random_state) is not np.random.RandomState or start < 0:
        return None
    place = _memory(id(left) + start, _PAIR.size)
    place[:] = _NO_PAIR
    is_dropped = left.get_state(legacy=False)["has_gauss"] == 0 and left.normal() == right.normal()
    return start if is_dropped else None


_pair_start: Final = _find_pair()


class States:
    """A state of Python's generator, of numpy's and of torch's for the CPU.

    Args:
        python: Of Python's.
        numpy: Of numpy's, as :func:`numpy_row` gives it.
        torch: Of torch's.

    Attributes:
        rows: All of them as bytes, end to end; behind them the second of a pair of Python's generator.
        other_bits: What numpy's functions draw from, where the program has given them something else; or None.
    """

    __slots__ = ("other_bits", "rows")

    def __init__(self, python: PythonState, numpy: bytes, torch: TorchState) -> None:
        row, second = python
        self.rows = bytearray().join((row, numpy, torch, _NO_PAIR if second is None else _PAIR.pack(1, second)))
        self.other_bits: Any = None

    @property
    def python(self) -> PythonState:
        """That of Python's."""
        has_second, second = _PAIR.unpack(self.rows[-_PAIR.size :])
        return bytes(self.rows[: _ROW.size]), second if has_second else None

    @property
    def numpy(self) -> bytes:
        """That of numpy's."""
        return bytes(self.rows[_ROW.size :][: NUMPY_ROW.size])

    @property
    def torch(self) -> TorchState:
        """That of torch's."""
        return bytes(self.rows[_ROW.size + NUMPY_ROW.size : -_PAIR.size])


def exchange_in_turn(out: States, into: States) -> None:
    """Have ``out`` become the state of the generators now, and let these go on from ``into``: see `exchange`."""
    bits = get_bit_generator()
    set_bit_generator(_numpy_bits)  # also drops the second of a pair
    out.rows = States(python_state(), numpy_row(_numpy_bits), torch_state()).rows
    out.other_bits = None if bits is _numpy_bits else bits
    set_python_state(into.python)
    _undo_numpy(into.numpy)
    set_torch_state(into.torch)
    if into.other_bits is not None:
        set_bit_generator(into.other_bits)


_extension: Final = extensions.find("popdist.data._generators")


def _find_exchange() -> Callable[[States, States], None]:
    """C's way, where there is the extension and all places are known."""
    if _extension is None or _row is None or _torch_row is None or _pair_start is None:
        return exchange_in_turn
    places = [_address_of(_generator), _ROW.size, _numpy_bits.ctypes.state_address, NUMPY_ROW.size]
    places += [_torch_address_of(torch.default_generator), _TORCH_BYTES]
    pair = id(_random_state) + _pair_start
    _extension.prepare(
        array("Q", places).tobytes(), pair, _generator, _random_state, _numpy_bits, exchange_in_turn
    )
    return _extension.exchange  # type: ignore[no-any-return] # mypy knows no extension


exchange: Final = _find_exchange()
"""Has a first state become that of the generators now, and lets them go on from a second one.

Where numpy's functions draw from something that the program has given them, that is part of the state. Every micro
batch calls this twice.
"""


_numpy_place: Final = _memory(_numpy_bits.ctypes.state_address, NUMPY_ROW.size)

_NUMPY_SEEDS: Final = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A random generator of the process.

    Attributes:
        name: What it is called.
        seed: Sets its state from a 64-bit number.
        seed_each: Does so from one number after the other, at each step of an iterator, in less time.
        get: Gives its state.
        set: Sets its state.
        look: Gives something that differs when numbers were drawn in between; cheaper than the state.
        undo: Makes the state what it was at a look.
    """

    name: str
    seed: Callable[[int], object]
    seed_each: Callable[[list[int]], Iterator[object]]
    get: Callable[[], Any]
    set: Callable[[Any], object]
    look: Callable[[], object]
    undo: Callable[[Any], object]


def _look_at_numpy() -> bytes:
    """The bytes of the state where numpy shows them to compiled code: a copy takes a hundred times longer."""
    bits = get_bit_generator()
    if bits is _numpy_bits:
        return bytes(_numpy_place)
    return numpy_row(bits) if isinstance(bits, np.random.MT19937) else b""


def _undo_numpy(seen: bytes) -> None:
    ctypes.memmove(get_bit_generator().ctypes.state_address, seen, len(seen))


_SOME_SEEDS: Final = [0, 1, 2**32 - 1, 2**32, 2**64 - 1]


def _find_python_seeds() -> Callable[[list[int]], Iterator[object]]:
    """C's way to seed Python's generator again and again, where it gives what ``random.seed`` does."""
    if _row is not None and _extension is not None:
        expected = [seeded_python_state(seed)[0] for seed in _SOME_SEEDS]
        if _rows_seeded_in_c(expected[0]) == expected:
            return partial(_extension.seeding, _address_of(_generator), expected[0], _generator)
    return lambda seeds: map(random.seed, seeds)


def _find_torch_seeds() -> Callable[[list[int]], Iterator[object]]:
    """C's way to seed torch's generator again and again, where it gives what ``manual_seed`` does."""
    if _torch_row is not None and _extension is not None:
        like = seeded_torch_state(0)
        made = [as_torch_tensor(row) for row in _rows_seeded_in_c(like)]
        expected = [torch.Generator().manual_seed(seed).get_state() for seed in _SOME_SEEDS]
        if all(map(torch.equal, made, expected)):
            return partial(_extension.seeding, _torch_address_of(torch.default_generator), like, None)
    return lambda seeds: map(torch.default_generator.manual_seed, seeds)


def _rows_seeded_in_c(like: bytes) -> list[bytes]:
    """The rows of generators with some seeds."""
    place = ctypes.create_string_buffer(len(like))
    return [place.raw for _ in _extension.seeding(ctypes.addressof(place), like, None, _SOME_SEEDS)]


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed % _NUMPY_SEEDS)  # noqa: NPY002 - what datasets draw from


GENERATORS: Final = (
    Generator(
        name="python",
        seed=random.seed,
        seed_each=_find_python_seeds(),
        get=python_state,
        set=set_python_state,
        look=python_state,
        undo=set_python_state,
    ),
    Generator(
        name="numpy",
        seed=_seed_numpy,
        seed_each=lambda seeds: map(_seed_numpy, seeds),
        get=np.random.get_state,
        set=np.random.set_state,
        look=_look_at_numpy,
        undo=_undo_numpy,
    ),
    Generator(
        name="torch",
        seed=torch.default_generator.manual_seed,
        seed_each=_find_torch_seeds(),
        get=torch_state,
        set=set_torch_state,
        look=torch_state,
        undo=set_torch_state,
    ),
)
