"""Random numbers that belong to a replica or to a sample, and not to the process that draws the numbers.

Each replica owns a state of every generator that programs draw from: Python's and numpy's generator, and torch's
generators for CPU and accelerator. These states are in place only during the replica's micro batches. Before a
dataset reads a sample, the generators get a state that follows from seed, epoch and index. So augmentation is the
same for any number of instances and workers.
"""

import copy
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from popdist.data.epoch import GOLDEN, round_keys, scramble
from popdist.errors import BatchError, WeightsError, seed_number
from popdist.ground.accelerators import accelerator

T = TypeVar("T")

_CPU: Final = torch.device("cpu")


def checked_seed(seed: int | None, num_replicas: int) -> int | None:
    """Return ``seed`` as an int or None; raise BatchError if it is invalid, or is None for several replicas."""
    if seed is None and num_replicas > 1:
        raise BatchError(
            f"seed=None, and the model has {num_replicas} replicas, each of which draws from states of its own: "
            "give them a seed, the same on all instances"
        )
    return None if seed is None else seed_number(seed, BatchError)


class _PythonState(NamedTuple):
    """A state of Python's random generator, and two numbers drawn from it, by which the state is recognised."""

    values: tuple[Any, ...]  # the result of ``getstate()``; its last item is the second of a normal pair, or None
    bits: int
    normal: float  # the normal number that is drawn if the last item of ``values`` is None


class _PythonGenerator:
    """Python's random generator; its state is slow to read, so it is read only after the program has drawn."""

    def __init__(self) -> None:
        self._last: _PythonState | None = None

    def take_out(self) -> _PythonState:
        """Return the state of Python's random generator. This draws numbers from the generator, so call
        :meth:`put_in` with a state before the program draws again.
        """
        last, bits = self._last, random.getrandbits(32)
        # reading the state is slow, so equal bits mean "nothing drawn"; once in 2**32 times numbers repeat
        if last is None or last.bits != bits:
            return _state_before(bits, random)
        normal = random.gauss(0.0, 1.0)
        second = None if normal == last.normal else normal
        return last if second == last.values[-1] else last._replace(values=(*last.values[:-1], second))

    def put_in(self, state: _PythonState) -> None:
        """Make Python's random generator continue from ``state``."""
        random.setstate(state.values)
        self._last = state

    def watch(self, _own: _PythonState) -> Callable[[], bool]:
        """Set the generator to a known state; return a function that says whether the program has drawn since."""
        self.put_in(_WATCHED)
        return lambda: random.getrandbits(32) != _WATCHED.bits


def _state_before(bits: int, generator: Any) -> _PythonState:
    """Return the state of ``generator`` before it drew the 32-bit number ``bits``; this draws more numbers."""
    version, (*words, place), second = generator.getstate()
    if second is not None:
        generator.gauss(0.0, 1.0)
    return _PythonState((version, (*words, place - 1), second), bits, generator.gauss(0.0, 1.0))


def _state_of(generator: random.Random) -> _PythonState:
    """Return the state of ``generator``; this draws numbers, so do not use ``generator`` afterwards."""
    return _state_before(generator.getrandbits(32), generator)


_python: Final = _PythonGenerator()
_WATCHED: Final = _state_of(random.Random())  # noqa: S311 - for training, not for secrets


@dataclass(slots=True)
class _States:
    """The saved states of all random generators (of Python, numpy and torch) of one replica or of the program."""

    python: _PythonState
    numpy: Any  # the bit generator, because reading its state takes longer than saving all other states
    torch: Tensor
    device: Tensor | None = None  # the state of the accelerator's generator; None before the first use


class ReplicaRandomness:
    """The random states of this instance's replicas; each pipeline stage of a replica has other states."""

    def __init__(self, seed: int | None, replicas: range, *, stage: int = 0) -> None:
        self.seed = seed
        self._stage = stage
        self._states = {} if seed is None else {replica: _seeded(seed, replica, stage) for replica in replicas}
        self._scopes = {replica: RandomScope(self._states, replica, None) for replica in self._states}

    def of(self, replica: int, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which ``replica``, whose model is on ``device``, draws its own random numbers.

        Without a seed the context has no effect: the replica draws from the program's own random states.
        """
        if self.seed is None:
            return nullcontext()
        if device.type in ("cpu", "meta"):
            return self._scopes[replica]
        if self._states[replica].device is None:
            number = _number(self.seed, replica, "device", self._stage)
            self._states[replica].device = torch.Generator(device).manual_seed(number).get_state()
        return RandomScope(self._states, replica, device)

    def begin_as_program(self, device: torch.device) -> None:
        """Replace the random states of each local replica by a copy of the program's states, and of the generator
        of ``device``, on which the replicas compute, if ``device`` is an accelerator.
        """
        python = _python.take_out()
        _python.put_in(python)
        own = None if device.type in ("cpu", "meta") else accelerator.random_state(device)
        for replica in self._states:
            bits, state = copy.deepcopy(get_bit_generator()), torch.get_rng_state()
            self._states[replica] = _States(python, bits, state, None if own is None else own.clone())

    def copy_from(self, other: "ReplicaRandomness", replica: int) -> None:
        """Replace the random states of ``replica`` by a copy of its states in ``other``."""
        states = other._states[replica]  # noqa: SLF001 - an attribute of the same class
        numpy = self._states[replica].numpy
        if type(numpy) is type(states.numpy):
            numpy.state = states.numpy.state  # a third of the time of a copy
        else:
            numpy = copy.deepcopy(states.numpy)
        self._states[replica] = replace(states, numpy=numpy)

    def become_programs(self, replica: int) -> None:
        """Let the program, outside of all replicas' contexts, go on with the random states of ``replica``."""
        _exchange(_programs, self._states[replica], None)

    def state_dict(self) -> dict[str, dict[str, object]]:
        """Return the random states of each local replica, by the replica's job-wide number as a string; the dicts
        of all instances together have the states of the whole job.
        """
        return {str(replica): _as_values(states) for replica, states in self._states.items()}

    def load_state_dict(self, state_dict: Mapping[Any, Mapping[str, Any]]) -> None:
        """Load the states of this instance's replicas from ``state_dict``, which may also have other replicas.

        A replica that ``state_dict`` does not have keeps its state, because a job may go on with more replicas.

        Raises:
            WeightsError: If :meth:`state_dict` did not write an entry; then no state has changed.
        """
        try:
            found = {int(replica): values for replica, values in state_dict.items()}
            loaded = {replica: _from_values(found[replica]) for replica in self._states if replica in found}
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise WeightsError(f"these are no random states of replicas: {error!r}") from error
        self._states.update(loaded)


class RandomScope:
    """A context in which all random generators use a replica's states; its end restores the program's states."""

    # Two loops side by side leave their scopes in any order; the replica of the last scope draws.
    _entered: ClassVar[list["RandomScope"]] = []

    __slots__ = ("_device", "_replica", "_states")

    def __init__(self, states: dict[int, _States], replica: int, device: torch.device | None) -> None:
        self._states = states
        self._replica = replica
        self._device = device

    @classmethod
    def is_entered(cls) -> bool:
        """Whether the process is inside a context of this class, so that random numbers belong to a replica."""
        return bool(cls._entered)

    def __enter__(self) -> None:
        if self._entered:
            self._entered[-1]._take_back()  # noqa: SLF001 - a method of the same class
        self._entered.append(self)
        self._put_in_place()

    def __exit__(self, *_error: object) -> None:
        was_last = self._entered[-1] is self
        self._entered.remove(self)
        if was_last:
            self._take_back()
            if self._entered:
                self._entered[-1]._put_in_place()  # noqa: SLF001 - a method of the same class

    def _put_in_place(self) -> None:
        """Save the program's random states, and make the generators continue from the replica's states."""
        _exchange(_programs, self._states[self._replica], self._device)

    def _take_back(self) -> None:
        """Save the replica's random states, and make the generators continue from the program's states."""
        _exchange(self._states[self._replica], _programs, self._device)


def _exchange(out: _States, into: _States, device: torch.device | None) -> None:
    """Save all generators' states in ``out``, and make the generators continue from the states ``into``."""
    out.python, out.numpy, out.torch = _python.take_out(), get_bit_generator(), torch.get_rng_state()
    _python.put_in(into.python)
    set_bit_generator(into.numpy)
    torch.set_rng_state(into.torch)
    if device is not None:
        out.device = accelerator.random_state(device)
        if into.device is not None:
            accelerator.set_random_state(device, into.device)


def _number(seed: int, replica: int, generator: str, stage: int) -> int:
    """Return a 63-bit seed, a hash of all arguments: different for each replica, generator and stage."""
    text = f"{seed} {replica} {generator}" + (f" stage {stage}" if stage else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _seeded(seed: int, replica: int, stage: int = 0) -> _States:
    return _States(
        _state_of(random.Random(_number(seed, replica, "python", stage))),  # noqa: S311 - for training, not for secrets
        np.random.MT19937(_number(seed, replica, "numpy", stage)),
        torch.Generator().manual_seed(_number(seed, replica, "torch", stage)).get_state(),
    )


_programs: Final = _seeded(0, 0)
"""The random states of the program, saved while a replica draws random numbers."""


def _as_values(states: _States) -> dict[str, object]:
    version, numbers, gauss = states.python.values
    return {
        "python": torch.tensor([version, *numbers], dtype=torch.int64, device="cpu"),
        "python_gauss": gauss,
        "numpy": _numbers_of(states.numpy),
        "torch": states.torch.clone(),
        "device": None if states.device is None else states.device.clone(),
    }


def _numbers_of(bits: Any) -> Tensor | None:
    """Return the state of the Mersenne Twister ``bits`` as a tensor; None if ``bits`` is another bit generator."""
    if not isinstance(bits, np.random.MT19937):
        return None
    state: Any = bits.state["state"]
    return torch.tensor([state["pos"], *state["key"].tolist()], dtype=torch.int64, device="cpu")


def _from_values(values: Mapping[str, Any]) -> _States:
    version, *numbers = values["python"].tolist()
    python = random.Random()  # noqa: S311 - for training, not for secrets
    python.setstate((version, tuple(numbers), values["python_gauss"]))
    bits = np.random.MT19937()
    if values["numpy"] is not None:
        position, *key = values["numpy"].tolist()
        bits.state = {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
        }
    generator = torch.Generator()
    generator.set_state(values["torch"])
    device = None if values["device"] is None else values["device"].clone()
    return _States(_state_of(python), bits, generator.get_state(), device)


Reseed: TypeAlias = Callable[[int], None]
"""A function that seeds the random generators with a 64-bit number, for the sample that is read next."""


class _Generator(NamedTuple):
    """A random generator of the process (Python, numpy or torch): functions that seed, save and restore it."""

    name: str
    seed: Callable[[int], object]
    draw: Callable[[], object]  # draws a number, which shows whether the program has drawn since the seeding
    save: Callable[[], Any]  # returns the program's state, which another state may replace now
    restore: Callable[[Any], object]
    # takes the program's state; returns a function that says whether numbers were drawn, faster than ``draw``
    watch: Callable[[Any], Callable[[], bool]]

    def is_as_seeded(self, seed: int) -> bool:
        """Whether nothing was drawn since the generator was seeded with ``seed``; this draws two numbers."""
        found = self.draw()
        self.seed(seed)
        return found == self.draw()


_bits: Final = np.random.MT19937()
"""The bit generator that numpy's functions use while samples are read."""


def _exchange_numpy() -> Any:
    """Replace the generator that numpy's functions use; return the old generator: copying a state is slower."""
    own: Any = get_bit_generator()
    # ``_bits`` is in use already if a dataset reads from another loader.
    set_bit_generator(np.random.MT19937() if own is _bits else _bits)
    return own


_watched, _twin = np.random.MT19937(0), np.random.MT19937(0)


def _watch_numpy(_own: object) -> Callable[[], bool]:
    """Return a function that says whether numpy has drawn: it compares numpy's generator with a fresh copy."""
    set_bit_generator(_watched)

    def is_drawn() -> bool:
        if _watched.random_raw() == _twin.random_raw():
            return False
        _twin.state = _watched.state
        return True

    return is_drawn


def _watch_torch(own: Tensor) -> Callable[[], bool]:
    before = own.numpy().tobytes()  # comparing bytes is faster than comparing tensors
    return lambda: torch.get_rng_state().numpy().tobytes() != before


_GENERATORS: Final = (
    _Generator(
        "python",
        random.seed,
        lambda: random.getrandbits(64),
        _python.take_out,
        _python.put_in,
        _python.watch,
    ),
    _Generator(
        "numpy",
        lambda seed: np.random.seed(seed % 2**32),
        lambda: np.random.bytes(8),
        _exchange_numpy,
        set_bit_generator,
        _watch_numpy,
    ),
    _Generator(
        "torch",
        torch.default_generator.manual_seed,
        lambda: torch.empty((), dtype=torch.int64, device="cpu").random_().item(),
        torch.get_rng_state,
        torch.set_rng_state,
        _watch_torch,
    ),
)


@dataclass(slots=True)
class SampleRandomness:
    """Seeds the random generators for each sample, and restores the program's random states afterwards."""

    used: frozenset[str] | None = None  # names of the used generators; None before the first run

    def run(self, work: Callable[[Reseed | None], T]) -> T:
        """Call ``work`` with a function that seeds the random generators for one sample; return ``work``'s result.

        ``work`` gets None if it draws from no generator, and runs again if it has drawn from a generator that was
        not known before.
        """
        own = [generator.save() for generator in _GENERATORS]
        try:
            while True:
                before = self.used
                result = self._find_used(work) if before is None else self._watch(work, before, own)
                if before is None or self.used == before:
                    return result
        finally:
            _restore(own)

    def _watch(self, work: Callable[[Reseed | None], T], used: frozenset[str], own: list[Any]) -> T:
        """Run ``work`` with seeds for the generators ``used``; add other generators in use to ``self.used``."""
        pairs = zip(_GENERATORS, own, strict=True)
        watched = {it.name: it.watch(state) for it, state in pairs if it.name not in used}
        try:
            return work(_reseed(it for it in _GENERATORS if it.name in used) if used else None)
        finally:
            self.used = used.union([name for name, is_drawn in watched.items() if is_drawn()])

    def _find_used(self, work: Callable[[Reseed | None], T]) -> T:
        """Run ``work``, seed all generators for each sample, and record which generators it draws from."""
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
    """Call ``work`` with a function that seeds all random generators; then restore the generators' states."""
    restore = remember_states()
    try:
        return work(_reseed(_GENERATORS))
    finally:
        restore()


def seed_all(number: int) -> None:
    """Give all random generators the 64-bit number ``number`` as seed."""
    _reseed(_GENERATORS)(number)


def remember_states() -> Callable[[], None]:
    """Save the present random states, and return a function that restores these states. Until the function is
    called, the generators continue from other states.
    """
    return partial(_restore, [generator.save() for generator in _GENERATORS])


def _restore(own: list[Any]) -> None:
    for generator, state in zip(_GENERATORS, own, strict=True):
        generator.restore(state)


def _reseed(generators: Iterable[_Generator]) -> Reseed:
    seeds = [generator.seed for generator in generators]
    if len(seeds) == 1:
        return seeds[0]  # type: ignore[return-value] # the result of a call is not used

    def reseed(number: int) -> None:
        for seed in seeds:
            seed(number)

    return reseed


def sample_seeds(indices: list[int], *, seed: int, epoch: int, what: int = 0) -> list[int]:
    """Return a 64-bit seed for each sample index; it also depends on seed, epoch and the purpose ``what``."""
    words = np.array(indices, dtype=np.uint64) * np.uint64(GOLDEN) + _key(seed, epoch, what)
    seeds: list[int] = scramble(words).tolist()
    return seeds


@lru_cache(maxsize=8)
def _key(*ingredients: int) -> np.uint64:
    return np.uint64(round_keys(*ingredients)[0])


def draws_nothing(dataset: object) -> bool:
    """Whether ``dataset`` is of a type that draws no random numbers, such as a list or a TensorDataset."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    return type(dataset) in (TensorDataset, torch.Tensor, np.ndarray, list, tuple, range)
