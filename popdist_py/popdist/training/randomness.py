"""Random numbers belong to the replica: what it draws does not depend on the process it lives in.

Each replica owns a state of every generator that programs draw from unasked: Python's, numpy's, and torch's for
the CPU and for the model's CUDA device. It is put in place for the replica's micro batches only, so a dropout mask
is the same however replicas are dealt to instances. Outside the loop the program's own states go on as if nothing
had been drawn, except for numpy's second half of a pair of normal numbers, which is drawn anew.
"""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

from popdist.errors import WeightsError

_CPU: Final = torch.device("cpu")


@dataclass(slots=True)
class _States:
    """The states of all generators: those of a replica while it does not draw, or the program's meanwhile.

    numpy's is the bit generator itself, because reading its state takes longer than all the rest. ``cuda`` is None
    until a CUDA device is used.
    """

    python: tuple[Any, ...]
    numpy: Any
    torch: Tensor
    cuda: Tensor | None = None


class ReplicaRandomness:
    """The random states of this instance's replicas."""

    def __init__(self, seed: int | None, replicas: range) -> None:
        self.seed = seed
        self._states = {} if seed is None else {replica: _seeded(seed, replica) for replica in replicas}
        self._scopes = {replica: RandomScope(self._states, replica, None) for replica in self._states}

    def of(self, replica: int, device: torch.device) -> "RandomScope":
        """The context for a micro batch of ``replica`` on a model whose parameters are on ``device``."""
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
            loaded = {replica: _from_values(found[replica]) for replica in self._states if replica in found}
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise WeightsError(f"these are no random states of replicas: {error!r}") from error
        self._states.update(loaded)


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
            self._entered[-1]._take_back()  # noqa: SLF001 - another scope
        self._entered.append(self)
        self._put_in_place()

    def __exit__(self, *_error: object) -> None:
        was_last = self._entered[-1] is self
        self._entered.remove(self)
        if was_last:
            self._take_back()
            if self._entered:
                self._entered[-1]._put_in_place()  # noqa: SLF001 - as above

    def _put_in_place(self) -> None:
        """Save the program's states, and let the generators continue from the replica's."""
        _exchange(_programs, self._states[self._replica], self._ordinal)

    def _take_back(self) -> None:
        """Restore the program's states, and keep those of the replica."""
        _exchange(self._states[self._replica], _programs, self._ordinal)


class _ProgramScope(RandomScope):
    """Leaves the program's own states in place."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_error: object) -> None:
        """Do nothing."""


def _exchange(out: _States, into: _States, ordinal: int | None) -> None:
    """Save the generators' states in ``out``, and let them continue from those of ``into``."""
    out.python, out.numpy, out.torch = random.getstate(), get_bit_generator(), torch.get_rng_state()
    random.setstate(into.python)
    set_bit_generator(into.numpy)
    torch.set_rng_state(into.torch)
    if ordinal is not None:
        out.cuda = torch.cuda.default_generators[ordinal].get_state()
        if into.cuda is not None:
            torch.cuda.default_generators[ordinal].set_state(into.cuda)


def _number(seed: int, replica: int, generator: str) -> int:
    """A seed of 63 bits that no other replica and no other generator has."""
    digest = hashlib.blake2b(f"{seed} {replica} {generator}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _seeded(seed: int, replica: int) -> _States:
    return _States(
        random.Random(_number(seed, replica, "python")).getstate(),  # noqa: S311 - for training, not for secrets
        np.random.MT19937(_number(seed, replica, "numpy")),
        torch.Generator().manual_seed(_number(seed, replica, "torch")).get_state(),
    )


_programs: Final = _seeded(0, 0)
"""The program's own states, while a replica draws."""


def _as_values(states: _States) -> dict[str, object]:
    version, numbers, gauss = states.python
    return {
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
        "python_gauss": gauss,
        "numpy": _numbers_of(states.numpy),
        "torch": states.torch.clone(),
        "cuda": None if states.cuda is None else states.cuda.clone(),
    }


def _numbers_of(bits: Any) -> Tensor | None:  # noqa: ANN401 - numpy's stubs do not know what it has
    """The state of a Mersenne Twister; None of another bit generator that the program has set."""
    if not isinstance(bits, np.random.MT19937):
        return None
    state: Any = bits.state["state"]
    return torch.tensor([state["pos"], *state["key"].tolist()], dtype=torch.int64)


def _from_values(values: Mapping[str, Any]) -> _States:
    version, *numbers = values["python"].tolist()
    python = random.Random()  # noqa: S311 - as above
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
    cuda = None if values["cuda"] is None else values["cuda"].clone()
    return _States(python.getstate(), bits, generator.get_state(), cuda)
