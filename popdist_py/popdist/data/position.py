"""Where an iteration over epochs stands, and the proof that all instances have made the same reader."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from popdist import context
from popdist.errors import DatasetError, seed_number, whole_number

ReaderState: TypeAlias = dict[str, int | bool]


@dataclass(slots=True, kw_only=True)
class EpochPosition:
    """The place of one reader (a sampler or a loader) in its endless row of epochs.

    Attributes:
        reader: What messages call the reader.
        identity: What the meaning of a position depends on: the seed, and of a dataset with a length that and
            whether it is shuffled.
        epoch: The one that is being read, or that will be read next.
        position: How many positions of its order were read.
        is_running: Whether the epoch is being read, so that the next start is that of the next epoch.
    """

    reader: str
    identity: dict[str, int | bool]
    epoch: int = 0
    position: int = 0
    is_running: bool = False

    def __post_init__(self) -> None:
        self.identity["seed"] = seed_number(self.identity["seed"], DatasetError)

    def start(self) -> None:
        """Begin the next epoch, or go on with the one that was loaded."""
        if self.is_running:
            self.jump(self.epoch + 1)
        self.is_running = True

    def jump(self, epoch: int) -> None:
        """Make ``epoch`` the next one, from its start."""
        self.epoch, self.position, self.is_running = epoch, 0, False

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, from its start; a no-op if it is the next one already.

        Raises:
            DatasetError: If it is no whole number from 0 up.
        """
        epoch = whole_number("epoch", epoch, DatasetError, minimum=0)
        if self.is_running or epoch != self.epoch:
            self.jump(epoch)

    def state_dict(self) -> ReaderState:
        """Everything to remember, in plain numbers."""
        return self.identity | {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Stand where ``state`` was taken.

        Raises:
            DatasetError: If ``state`` is none of a reader, or one of another dataset length, order or seed.
        """
        own = self.state_dict()
        if not _is_state(state, own):
            raise DatasetError(f"{state!r} is no state of a {self.reader}, such as {own}")
        if differing := [name for name in self.identity if state[name] != own[name]]:
            loaded, found = ({name: values[name] for name in differing} for values in (state, own))
            raise DatasetError(
                f"the state was taken with {loaded}, this {self.reader} has {found}: a position in one order "
                "means nothing in the other; make it as it was made then, or start a new epoch"
            )
        self.jump(int(state["epoch"]))
        self.position = int(state["position"])


def _is_state(state: object, own: ReaderState) -> bool:
    """Whether ``state`` has the entries of ``own``, and tells a place that there can be."""
    if not isinstance(state, Mapping) or state.keys() != own.keys():
        return False
    if not all(isinstance(value, int) for value in state.values()):
        return False
    return bool(state["epoch"] >= 0 and 0 <= state["position"] <= own.get("length", math.inf))


class Agreement:
    """Is proven once: when it is made, or, if that is before ``init()``, when it is next asked for.

    Args:
        text: What must be the same on every instance, in words.

    Raises:
        CollectiveError: If the instances differ, or do not all make one.
    """

    def __init__(self, text: str) -> None:
        self._text: str | None = text
        self.prove()

    def prove(self) -> None:
        """Compare with the others, unless that has been done; before ``init()`` nobody can be asked.

        Raises:
            CollectiveError: If the instances differ, or do not all ask.
        """
        if self._text is not None and context.is_initialized():
            text, self._text = self._text, None
            context.current_group().agree(text)
