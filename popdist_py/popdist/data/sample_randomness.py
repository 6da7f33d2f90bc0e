"""Random numbers that belong to the sample: augmentation is the same in any split and with any number of workers.

Datasets draw from the generators of the process: Python's, numpy's and torch's. Before each sample they are set to
a state that follows from seed, epoch and index. Setting all three costs more than reading a small sample, so they
are watched while the first samples are read, and afterwards only those are set that the dataset draws from. The
others are still watched: when one was drawn from after all, what was read is read again.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from popdist.data.epoch import GOLDEN, round_keys, scramble

T = TypeVar("T")

Reseed: TypeAlias = Callable[[int], None]
"""Seeds generators with a 64-bit number, for the sample that is read next."""


class _Generator(NamedTuple):
    """A random generator of the process, by public calls only.

    ``save`` gives the program's state, in whose place another one may now be put; ``restore`` restores it.
    ``draw`` tells whether others have drawn since it was seeded. ``watch`` is faster: it returns a function that
    tells at the end whether others have drawn.
    """

    name: str
    seed: Callable[[int], object]
    draw: Callable[[], object]
    save: Callable[[], Any]
    restore: Callable[[Any], object]
    watch: Callable[[], Callable[[], bool]]

    def is_as_seeded(self, seed: int) -> bool:
        """Whether nothing was drawn since the generator was seeded with ``seed``; this draws two numbers."""
        found = self.draw()
        self.seed(seed)
        return found == self.draw()


_bits: Final = np.random.MT19937()
"""The bit generator that numpy's functions use while samples are read."""


def _exchange_numpy() -> Any:  # noqa: ANN401 - a bit generator of any class
    """Have numpy's functions draw from another bit generator: reading a state takes a hundred times longer."""
    own: Any = get_bit_generator()
    set_bit_generator(np.random.MT19937() if own is _bits else _bits)  # a dataset may read another loader
    return own


_expected: Final = random.Random(_bits.random_raw())  # noqa: S311 - for training, not for secrets
_expected.random()  # else the first draw would take as long as setting the state
_PYTHON_STATE: Final = _expected.getstate()
_PYTHON_DRAW: Final = _expected.getrandbits(64)


def _watch_python() -> Callable[[], bool]:
    """Set a state whose next number is known."""
    random.setstate(_PYTHON_STATE)
    return lambda: random.getrandbits(64) != _PYTHON_DRAW


_watched, _twin = np.random.MT19937(0), np.random.MT19937(0)


def _watch_numpy() -> Callable[[], bool]:
    """Put a bit generator in place that has a twin, and draw from both at the end."""
    set_bit_generator(_watched)

    def is_drawn() -> bool:
        if _watched.random_raw() == _twin.random_raw():
            return False
        _twin.state = _watched.state
        return True

    return is_drawn


def _watch_torch() -> Callable[[], bool]:
    before = torch.get_rng_state()
    return lambda: not torch.equal(torch.get_rng_state(), before)


_GENERATORS: Final = (
    _Generator(
        "python", random.seed, lambda: random.getrandbits(64), random.getstate, random.setstate, _watch_python
    ),
    _Generator(
        "numpy",
        lambda seed: np.random.seed(seed % 2**32),  # noqa: NPY002 - what datasets draw from
        lambda: np.random.bytes(8),  # noqa: NPY002 - as above
        _exchange_numpy,
        set_bit_generator,
        _watch_numpy,
    ),
    _Generator(
        "torch",
        torch.default_generator.manual_seed,
        lambda: torch.empty((), dtype=torch.int64).random_().item(),
        torch.get_rng_state,
        torch.set_rng_state,
        _watch_torch,
    ),
)


@dataclass(slots=True)
class Randomness:
    """Seeds the generators that a dataset uses for each sample, and restores the program's states afterwards.

    ``used`` holds the names of those that the dataset was seen to draw from, None before the first work.
    """

    used: frozenset[str] | None = None

    def run(self, work: Callable[[Reseed | None], T]) -> T:
        """Return what ``work`` does with seeded generators; it may be called several times.

        It gets None where nothing is drawn, and else must reseed before it draws. The generators' states are
        afterwards what they were before.
        """
        own = [generator.save() for generator in _GENERATORS]
        try:
            while True:
                before = self.used
                result = self._find_used(work) if before is None else self._watch(work, before)
                if before is None or self.used == before:
                    return result
        finally:
            _restore(own)

    def _watch(self, work: Callable[[Reseed | None], T], used: frozenset[str]) -> T:
        """Seed the generators that are known to be used, and find out whether others were used, too."""
        watched = {it.name: it.watch() for it in _GENERATORS if it.name not in used}
        try:
            return work(_reseed(it for it in _GENERATORS if it.name in used) if used else None)
        finally:
            self.used = used.union([name for name, is_drawn in watched.items() if is_drawn()])

    def _find_used(self, work: Callable[[Reseed | None], T]) -> T:
        """Seed all generators for each sample, and find out which of them are used."""
        used, last = set[str](), cast("int | None", None)
        reseed_all = _reseed(_GENERATORS)

        def find() -> None:
            if last is not None:
                used.update(it.name for it in _GENERATORS if not it.is_as_seeded(last))

        def reseed(seed: int) -> None:
            nonlocal last
            find()
            reseed_all(seed)
            last = seed

        result = work(reseed)
        find()
        self.used = frozenset(used)
        return result


def isolated(work: Callable[[Reseed], T]) -> T:
    """Call ``work`` once with all generators to be seeded, and restore their states afterwards."""
    own = [generator.save() for generator in _GENERATORS]
    try:
        return work(_reseed(_GENERATORS))
    finally:
        _restore(own)


def _restore(own: list[Any]) -> None:
    for generator, state in zip(_GENERATORS, own, strict=True):
        generator.restore(state)


def _reseed(generators: Iterable[_Generator]) -> Reseed:
    seeds = [generator.seed for generator in generators]
    if len(seeds) == 1:
        return seeds[0]  # type: ignore[return-value] # what it returns is not used

    def reseed(number: int) -> None:
        for seed in seeds:
            seed(number)

    return reseed


def sample_seeds(indices: list[int], *, seed: int, epoch: int, what: int = 0) -> list[int]:
    """A 64-bit number for each index, from all of them; ``what`` tells numbers for different uses apart."""
    words = np.array(indices, dtype=np.uint64) * np.uint64(GOLDEN) + _key(seed, epoch, what)
    seeds: list[int] = scramble(words).tolist()
    return seeds


@lru_cache(maxsize=8)
def _key(*ingredients: int) -> np.uint64:
    return np.uint64(round_keys(*ingredients)[0])


def draws_nothing(dataset: object) -> bool:
    """Whether reading ``dataset`` is known to draw no random number: containers, and tensors in rows."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    return type(dataset) in (TensorDataset, torch.Tensor, np.ndarray, list, tuple, range)
