"""The generators of the process that datasets draw from unasked: Python's, numpy's, and torch's for the CPU.

Each can be set, and be watched: a look at it costs about a microsecond, and tells whether numbers were drawn since
an earlier one.
"""

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.random import mtrand

from popdist.data import python_random

_NUMPY_SEEDS: Final = 2**32
_MT19937_BYTES: Final = 625 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """One of them.

    Attributes:
        name: What it is called.
        seed: Sets its state from a 64-bit number.
        get: Its state.
        set: Sets its state.
        look: Something that is another one when numbers were drawn in between; cheaper than the state.
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
        get=python_random.current,
        set=python_random.put_in_place,
        look=python_random.current,
        undo=python_random.put_in_place,
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
