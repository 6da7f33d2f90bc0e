"""Random numbers belong to the replica: what it draws does not depend on the process it lives in.

Each replica owns a state of every generator that programs draw from unasked: Python's, numpy's, and torch's for
the CPU and for the model's CUDA device. It is put in place for the replica's micro batches only, so a dropout mask
is the same however replicas are dealt to instances, and outside the loop the program's own states go on as if
nothing had been drawn. (But for numpy's second half of a pair of normal numbers, which is drawn anew.)
"""

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from popdist.data import process_generators
from popdist.data.process_generators import PythonState, States, TorchState, exchange
from popdist.errors import WeightsError

_CPU: Final = torch.device("cpu")


class _States(States):
    """A state of all generators: that of a replica while it does not draw, or that of the program meanwhile.

    Attributes:
        cuda: Of the generator of a CUDA device; None as long as there is none.
    """

    __slots__ = ("cuda",)

    def __init__(self, python: PythonState, numpy: bytes, torch: TorchState, cuda: Tensor | None = None) -> None:
        super().__init__(python, numpy, torch)
        self.cuda = cuda

    def go_on_from(self, other: "_States", ordinal: int) -> None:
        """Become the state of a CUDA device's generator now, and let it go on from ``other``, if that has one."""
        self.cuda = torch.cuda.default_generators[ordinal].get_state()
        if other.cuda is not None:
            torch.cuda.default_generators[ordinal].set_state(other.cuda)


class ReplicaRandomness:
    """The random states of this instance's replicas.

    Args:
        seed: Seeds every replica's states, together with its job-wide number; None has them
            draw from the program's.
        replicas: Job-wide numbers of this instance's replicas.
    """

    def __init__(self, seed: int | None, replicas: range) -> None:
        self.seed = seed
        self._states = {} if seed is None else {replica: _seeded(seed, replica) for replica in replicas}
        self._scopes = {replica: RandomScope(self._states, replica, None) for replica in self._states}

    def of(self, replica: int, device: torch.device) -> "RandomScope":
        """What to enter for a micro batch of ``replica`` on a model whose parameters lie on ``device``."""
        if self.seed is None:
            return _ProgramScope(self._states, replica, None)
        if device == _CPU or device.type != "cuda":
            return self._scopes[replica]
        if self._states[replica].cuda is None:
            state = torch.Generator(device).manual_seed(_number(self.seed, replica, "cuda")).get_state()
            self._states[replica].cuda = state
        return RandomScope(self._states, replica, device.index)

    def state_dict(self) -> dict[str, dict[str, object]]:
        """The states of this instance's replicas: job-wide number, as text → tensors and numbers.

        The states of the whole job are the union over its instances.
        """
        return {str(replica): _as_values(states) for replica, states in self._states.items()}

    def load_state_dict(self, state_dict: Mapping[Any, Mapping[str, Any]]) -> None:
        """Take the states of this instance's replicas out of ``state_dict``, which may hold those of others.

        A replica that is not in it keeps its state: a job may go on with more replicas than it had.

        Raises:
            WeightsError: If an entry is not one that :meth:`state_dict` wrote; then no state has changed.
        """
        try:
            found = {int(replica): values for replica, values in state_dict.items()}
            taken = {replica: _from_values(found[replica]) for replica in self._states if replica in found}
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise WeightsError(f"these are no random states of replicas: {error!r}") from error
        self._states.update(taken)


class RandomScope:
    """Puts a replica's states in place when it is entered, and the program's own ones when it is left.

    Scopes need not be left in the order of a stack: of two loops side by side, each micro batch's scope is
    left after the other one was entered. The states that were put in place last are those that draw.
    """

    _entered: ClassVar[list["RandomScope"]] = []

    __slots__ = ("_ordinal", "_replica", "_states")

    def __init__(self, states: dict[int, _States], replica: int, ordinal: int | None) -> None:
        self._states = states
        self._replica = replica
        self._ordinal = ordinal

    @classmethod
    def is_entered(cls) -> bool:
        """Whether the process is some replica at the moment."""
        return bool(cls._entered)

    def __enter__(self) -> None:
        if self._entered:
            self._entered[-1].take_back()
        self._entered.append(self)
        if self._ordinal is None:
            exchange(_programs, self._states[self._replica])  # as put_in_place(), with one call less
        else:
            self.put_in_place()

    def __exit__(self, *_error: object) -> None:
        was_last = self._entered[-1] is self
        self._entered.remove(self)
        if was_last:
            if self._ordinal is None:
                exchange(self._states[self._replica], _programs)  # as take_back()
            else:
                self.take_back()
            if self._entered:
                self._entered[-1].put_in_place()

    def put_in_place(self) -> None:
        """Let the generators go on from the replica's states."""
        states = self._states[self._replica]
        exchange(_programs, states)
        if self._ordinal is not None:
            _programs.go_on_from(states, self._ordinal)

    def take_back(self) -> None:
        """Let them go on where they were, and keep what the replica's states have come to."""
        states = self._states[self._replica]
        exchange(states, _programs)
        if self._ordinal is not None:
            states.go_on_from(_programs, self._ordinal)


class _ProgramScope(RandomScope):
    """Leaves the program's own states in place."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Nothing changes."""

    def __exit__(self, *_error: object) -> None:
        """Nothing has changed."""


def _number(seed: int, replica: int, generator: str) -> int:
    """A seed of 63 bits that nobody else has."""
    digest = hashlib.blake2b(f"{seed} {replica} {generator}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _seeded(seed: int, replica: int) -> _States:
    return _States(
        process_generators.seeded_python_state(_number(seed, replica, "python")),
        process_generators.numpy_row(np.random.MT19937(_number(seed, replica, "numpy"))),
        process_generators.seeded_torch_state(_number(seed, replica, "torch")),
    )


_programs: Final = _seeded(0, 0)
"""The program's own, while a replica draws."""


def _as_values(states: _States) -> dict[str, object]:
    numbers, gauss = process_generators.as_numbers(states.python)
    *words, position = process_generators.NUMPY_ROW.unpack(states.numpy)
    return {
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": gauss,
        "numpy": torch.tensor([position, *words], dtype=torch.int64),
        "torch": process_generators.as_torch_tensor(states.torch),
        "cuda": None if states.cuda is None else states.cuda.clone(),
    }


def _from_values(values: Mapping[str, Any]) -> _States:
    position, *key = values["numpy"].tolist()
    generator = np.random.MT19937()
    generator.state = {
        "bit_generator": "MT19937",
        "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
    }
    return _States(
        process_generators.from_numbers(values["python"].tolist(), values["python_gauss"]),
        process_generators.numpy_row(generator),
        process_generators.from_torch_tensor(values["torch"]),
        cuda=None if values["cuda"] is None else values["cuda"].clone(),
    )
