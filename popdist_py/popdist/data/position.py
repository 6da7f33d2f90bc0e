"""The position of a sampler or loader in its epochs, and the check that all instances made the same one."""

import math
from collections.abc import Mapping
from typing import TypeAlias

from popdist import context
from popdist.errors import DatasetError, seed_number, whole_number

ReaderState: TypeAlias = dict[str, int | bool]


class EpochPosition:
    """The position of one reader, a sampler or a loader, in its endless sequence of epochs.

    Each time that it is started, set or loaded it gets a new number, and what an older iteration reads then counts
    no more.
    """

    def __init__(self, reader: str, identity: ReaderState, agreement: str) -> None:
        """``identity`` is what a position depends on; all instances must have the same ``agreement``, in words."""
        self.identity = identity | {"seed": seed_number(identity["seed"], DatasetError)}
        self.epoch = 0
        self.num_read = 0
        self._reader = reader
        self._is_running = False
        self._number = 0
        self._agreement: str | None = agreement
        self._agree()

    def _agree(self) -> None:
        """Compare the agreement with that of other instances, once and after ``init()``."""
        if self._agreement is not None and context.is_initialized():
            agreement, self._agreement = self._agreement, None
            context.current_group().agree(agreement)

    def start(self) -> int:
        """Begin the next epoch, or continue the one that was loaded, and return the number of this iteration."""
        self._agree()
        if self._is_running:
            self._jump(self.epoch + 1)
        self._is_running = True
        self._number += 1
        return self._number

    def read_to(self, position: int, number: int) -> None:
        """Record that iteration ``number`` has read all samples before ``position``."""
        if number == self._number:
            self.num_read = position

    def end_epoch(self, number: int) -> None:
        """Record that iteration ``number`` has read its epoch to the end."""
        if number == self._number:
            self._jump(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`EpochReader.set_epoch`."""
        epoch = whole_number("epoch", epoch, DatasetError, minimum=0)
        if self._is_running or epoch != self.epoch:
            self._jump(epoch)
        self._number += 1

    def state_dict(self) -> ReaderState:
        """See :meth:`EpochReader.state_dict`."""
        return self.identity | {"epoch": self.epoch, "position": self.num_read}

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """See :meth:`EpochReader.load_state_dict`."""
        own = self.state_dict()
        if not _is_state(state, own):
            raise DatasetError(f"{state!r} is no state of a {self._reader}, such as {own}")
        if differing := [name for name in self.identity if state[name] != own[name]]:
            loaded, found = ({name: values[name] for name in differing} for values in (state, own))
            raise DatasetError(
                f"the state was taken with {loaded}, this {self._reader} has {found}: a position in one order "
                "means nothing in the other; make it as it was made then, or start a new epoch"
            )
        self._jump(int(state["epoch"]))
        self.num_read = int(state["position"])
        self._number += 1

    def _jump(self, epoch: int) -> None:
        self.epoch, self.num_read, self._is_running = epoch, 0, False


class EpochReader:
    """The public methods that samplers and loaders have in common: epochs, and states to resume from."""

    _position: EpochPosition

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be iterated, from its start; a no-op if it is the next one already.

        So a loop may set its epoch each time, also after :meth:`load_state_dict` in the middle of that epoch.

        Raises:
            DatasetError: If it is no whole number from 0 up.
        """
        self._position.set_epoch(epoch)

    def state_dict(self) -> ReaderState:
        """Where the reading stands, in plain numbers: equal on all instances at the same step.

        A loader counts the batches that the loop received, whatever its workers have read ahead. A sampler counts
        what it has yielded: the workers of a DataLoader around it run ahead of the loop, so have none.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue where ``state`` was taken: the next iteration yields the rest of its epoch, which may be empty.

        The job may have another number of instances and replicas, another micro batch size, accumulation and
        number of workers: no sample is lost or seen twice. (Only then, and only when less than one sample a
        replica remains, may the batch of an instance be empty.)

        Raises:
            DatasetError: If ``state`` is none of such a reader, or one of another dataset length, order or seed.
        """
        self._position.load_state_dict(state)


def _is_state(state: object, own: ReaderState) -> bool:
    """Whether ``state`` has the entries of ``own``, and its position is within the epoch."""
    if not isinstance(state, Mapping) or state.keys() != own.keys():
        return False
    if not all(isinstance(value, int) for value in state.values()):
        return False
    return bool(state["epoch"] >= 0 and 0 <= state["position"] <= own.get("length", math.inf))
