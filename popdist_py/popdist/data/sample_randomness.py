"""Random numbers that belong to the sample: augmentation is the same in any split and with any number of workers.

Datasets draw from the generators of the process: Python's, numpy's and torch's. Before each sample they are set to
a state that follows from seed, epoch and index. Setting all three costs more than reading a small sample, so they
are watched while the first samples are read, and afterwards only those are set that the dataset draws from. The
others are still watched: when one was drawn from after all, what was read is read again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from popdist.data.epoch import GOLDEN, round_keys, scramble
from popdist.data.process_generators import GENERATORS, Generator

T = TypeVar("T")


class Reseed(NamedTuple):
    """Sets generators for what comes next.

    Attributes:
        once: From a 64-bit number.
        each: From one number after the other, at each step of an iterator.
    """

    once: Callable[[int], object]
    each: Callable[[list[int]], Iterator[object]]


@dataclass(slots=True)
class Randomness:
    """The generators that reading samples draws from: set for each sample, and afterwards as they were.

    Attributes:
        used: Names of the generators that the dataset was seen to draw from; None before the first work.
    """

    used: frozenset[str] | None = None

    def run(self, work: Callable[[Reseed | None], T]) -> T:
        """What ``work`` returns, as if all generators had been set whenever it reseeded; it may be called again.

        It gets None where nothing is drawn, and else must reseed before it draws. The generators' states are
        afterwards what they were before.
        """
        if self.used is None:
            return isolated(lambda reseed: self._learn(work, reseed))
        while True:
            looks, was_drawn = _looks_at_others(self.used), False
            before = [look() for look in looks]
            try:
                result = self._seeded(work)
            finally:
                after = [look() for look in looks]
                if after != before:
                    was_drawn = True
                    self._undo(self.used, before, after)
            if not was_drawn:
                return result

    def _seeded(self, work: Callable[[Reseed | None], T]) -> T:
        """What ``work`` returns when the generators that are known to be used are set."""
        if not self.used:
            return work(None)
        return isolated(work, [generator for generator in GENERATORS if generator.name in self.used])

    def _undo(self, used: frozenset[str], before: list[object], after: list[object]) -> None:
        """Let generators that were drawn from go on as before, and count them as used."""
        for generator, seen, found in zip(_others(used), before, after, strict=True):
            if found != seen:
                generator.undo(seen)
                used |= {generator.name}
        self.used = used

    def _learn(self, work: Callable[[Reseed | None], T], reseed_all: Reseed) -> T:
        """Set all generators, and see which of them each sample draws from."""
        used: set[str] = set()
        expected: dict[str, object] = {}

        def find() -> None:
            found = {generator.name: generator.look() for generator in GENERATORS}
            used.update(name for name, look in found.items() if look != expected.get(name, look))

        def reseed(seed: int) -> None:
            find()
            reseed_all.once(seed)
            expected.update({generator.name: generator.look() for generator in GENERATORS})

        result = work(Reseed(reseed, lambda seeds: map(reseed, seeds)))
        find()
        self.used = frozenset(used)
        return result


def _others(used: frozenset[str]) -> list[Generator]:
    """The generators that are watched, not set."""
    return [generator for generator in GENERATORS if generator.name not in used]


@lru_cache(maxsize=8)
def _looks_at_others(used: frozenset[str]) -> list[Callable[[], object]]:
    """What tells whether those were drawn from; it is asked twice for each step."""
    return [generator.look for generator in _others(used)]


def isolated(work: Callable[[Reseed], T], generators: Sequence[Generator] = GENERATORS) -> T:
    """What ``work`` returns, called once; the generators' states are afterwards what they were before."""
    own = [generator.get() for generator in generators]
    try:
        return work(_seeding(generators))
    finally:
        for generator, state in zip(generators, own, strict=True):
            generator.set(state)


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


def _seeding(generators: Sequence[Generator]) -> Reseed:
    if len(generators) == 1:
        return Reseed(generators[0].seed, generators[0].seed_each)

    def once(number: int) -> None:
        for generator in generators:
            generator.seed(number)

    return Reseed(once, lambda seeds: zip(*[generator.seed_each(seeds) for generator in generators], strict=True))
