"""The errors of popdist, and the checks of what its calls are given.

``except popdist.PopdistError`` catches everything this package raises on purpose. What it only warns of is a
:class:`PopdistWarning`.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Final, SupportsFloat, SupportsIndex


class PopdistError(Exception):
    """Base of every error that popdist raises on purpose."""


class ContractError(PopdistError):
    """The environment promises a job and does not describe one completely and consistently."""


class NotInitializedError(PopdistError):
    """A call that needs the other instances came before ``init()`` or after ``finalize()``."""


class BackendError(PopdistError, RuntimeError):
    """The instances could not be connected, or one of them was lost; a RuntimeError, as torch's own is."""


class CollectiveError(PopdistError, RuntimeError):
    """The instances disagree on the collective they are in, and who brought what; a RuntimeError, as in torch."""


class MicroBatchError(CollectiveError):
    """An instance left its ``micro_batches`` loop early, so the step has no gradient anywhere."""


class BatchError(PopdistError):
    """A batch cannot be split into the micro batches of this instance's replicas."""


class GradientError(PopdistError):
    """A gradient is not finite, would be lost, or differs between instances; the message names the parameter."""


class DatasetError(PopdistError):
    """A dataset cannot be dealt to the replicas of this job."""


class WeightsError(PopdistError):
    """The weights of some instances differ, or were written where each replica would write them."""


class OptimizerError(PopdistError):
    """An optimizer cannot be sharded, or its parameters are no longer where it has put them."""


class CheckpointError(PopdistError):
    """A checkpoint cannot be written or read, or is one of something else than it is loaded into."""


class StoreError(PopdistError):
    """What a model in phases stores cannot be kept, read or written, or is that of another model."""


class DescriptionError(PopdistError):
    """A module cannot be measured without its weights, or on the device that was asked for."""


class OnnxError(PopdistError):
    """An ONNX file cannot be read or written, or torch cannot compute what is in it."""


class LaunchError(PopdistError):
    """A function cannot be launched, or an instance brought neither its value nor its exception."""


class InstallationError(PopdistError, ImportError):
    """A library that popdist needs is not installed, or is one with which popdist cannot work."""


class PopdistWarning(UserWarning):
    """Something works, and perhaps not as expected: other bits, or an older checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a group's ranks are called in messages: the number of each, in rank order, and their noun."""

    members: tuple[int, ...]
    noun: str = "rank"
    place: str = ""  # of replicas' instances that hold the same part of theirs: `` (stage 0, shard 1)``

    def of(self, ranks: Iterable[int], *, max_runs: int | None = 6) -> str:
        """The members of these ranks in words."""
        return name_instances((self.members[rank] for rank in ranks), self.noun, max_runs=max_runs) + self.place


_SMALLEST_SEED, _LARGEST_SEED = -(2**63), 2**64 - 1
"""The seeds that torch's generators take."""


MOST_PARTS = 2**20
"""Local replicas, and micro batches of each in a step: what has more is a mistake, and would take hours."""

MOST_TOKENS = 2**31 - 1
"""Of a row."""


def whole_number(
    what: str, value: object, error: type[PopdistError], *, minimum: int = 1, maximum: int | None = None
) -> int:
    """``value``, which the caller named ``what``, as an int; an ``error`` if it is none or out of its range."""
    if type(value) is int and value >= minimum and (maximum is None or value <= maximum):
        return value  # every step comes here: to ask for the protocol takes ten microseconds
    number = _as_whole(value)
    if number is None or number < minimum:
        raise error(f"{what}={value!r} must be a whole number of at least {minimum}")
    if maximum is not None and number > maximum:
        raise error(f"{what}={value!r} must be a whole number of at most {maximum}")
    return number


def check_flags(error: type[PopdistError], **flags: object) -> None:
    """An ``error`` if one is neither True nor False: a text such as ``"no"`` would count as True."""
    for what, value in flags.items():
        if value is not True and value is not False and type(value).__name__ not in ("bool", "bool_"):  # numpy's
            raise error(f"{what}={value!r} must be True or False")


def check_callable(error: type[PopdistError], **given: object) -> None:
    """An ``error`` if one is neither None nor a function."""
    for what, value in given.items():
        if value is not None and not callable(value):
            raise error(f"{what}={value!r} must be a function")


def seed_number(value: object, error: type[PopdistError]) -> int:
    """``value`` as a seed; an ``error`` if torch takes no such seed."""
    number = _as_whole(value)
    if number is None or not _SMALLEST_SEED <= number <= _LARGEST_SEED:
        raise error(f"seed={value!r} must be a whole number from -2**63 to 2**64 - 1")
    return number


def as_float(value: object) -> float:
    """``value`` as a float; NaN if it is no number."""
    if type(value) is float:  # each micro batch has one, and what follows takes microseconds
        return value
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _as_whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def name_first(names: Sequence[str], most: int = 3) -> str:
    """The first ``most`` names in words, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def runs_of(numbers: Iterable[int]) -> list[range]:
    """The runs of consecutive numbers among ``numbers``, ascending."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def name_instances(instances: Iterable[int], noun: str = "instance", *, max_runs: int | None = 6) -> str:
    """The instances in words: ``instances 0 to 2 and 5``; of more than ``max_runs`` runs the bounds only."""
    runs = runs_of(instances)
    if max_runs is not None and len(runs) > max_runs:
        return f"{sum(map(len, runs))} {noun}s from {runs[0][0]} to {runs[-1][-1]}"
    words = [word for run in runs for word in ([f"{run[0]} to {run[-1]}"] if run[2:] else map(str, run))]
    listed = " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
    return f"{noun} {listed}" if listed.isdecimal() else f"{noun}s {listed}"


_OF_ALL: Final = re.compile(
    r"(?:^|, in )(checkpoint\.\w+|Mean\.compute|weighted_mean|all_reduce|all_gather|gather|broadcast\w*|barrier)\("
)
"""The calls of all instances that programs make within ``if is_main():``, as headers or errors name them."""


def remedy_of_lone_call(calls: Iterable[str]) -> str:
    """Return what to write if programs make one of ``calls`` on one instance only; an empty text if not."""
    found = [match[1] for call in calls if (match := _OF_ALL.search(call))]
    if len(found) != 1:
        return ""
    (name,) = found
    if name.startswith("checkpoint."):
        writes = "; only the first replica writes" if name == "checkpoint.save" else ""
        return f"call {name}() on all instances, outside of `if popdist.is_main():`{writes}"
    return (
        f"call {name}() on all instances, and print or save the result within `if popdist.is_main():`; what only "
        "some compute goes into popdist.execute_on_instances({0}, function)"
    )
