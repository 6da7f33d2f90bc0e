"""The errors of popdist, and checks of the arguments of popdist's functions.

``except popdist.PopdistError`` catches every error that this package raises deliberately. Its warnings are of the
class :class:`PopdistWarning`.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Final, SupportsFloat, SupportsIndex


class PopdistError(Exception):
    """Base class of every error that popdist raises deliberately."""


class ContractError(PopdistError):
    """The environment variables describe a job incompletely or contradict each other."""


class NotInitializedError(PopdistError):
    """A function that needs other instances was called before ``init()`` or after ``finalize()``."""


class BackendError(PopdistError, RuntimeError):
    """The instances could not be connected, or an instance was lost; a RuntimeError, like torch's own error."""


class CollectiveError(PopdistError, RuntimeError):
    """Instances called different collectives; the message shows each call. A RuntimeError, like torch's error."""


class MicroBatchError(CollectiveError):
    """An instance left its ``micro_batches`` loop early, so no instance has a gradient of this step."""


class BatchError(PopdistError):
    """A batch cannot be split into the micro batches of this instance's replicas."""


class GradientError(PopdistError):
    """A gradient is not finite, differs between instances, or would be lost before an optimizer has used it."""


class DatasetError(PopdistError):
    """A dataset cannot be divided among the replicas of this job, or its samples cannot be packed into rows."""


class WeightsError(PopdistError):
    """Weights or buffers differ between instances, or a forward pass outside of a step has written buffers."""


class OptimizerError(PopdistError):
    """An optimizer cannot be sharded, or its parameters were moved to other memory."""


class CheckpointError(PopdistError):
    """A checkpoint cannot be written or read, or does not belong to the object that it is loaded into."""


class StoreError(PopdistError):
    """The stored weights of a model trained layer by layer cannot be used, or belong to another model."""


class DescriptionError(PopdistError):
    """``describe`` cannot measure a module without its weights, or cannot measure on the requested device."""


class OnnxError(PopdistError):
    """An ONNX file cannot be read or written, or torch cannot compute its operations."""


class LaunchError(PopdistError):
    """A function cannot be launched, or an instance ended without a result and without an exception."""


class InstallationError(PopdistError, ImportError):
    """A library that popdist needs is not installed, or popdist cannot work with its version."""


class PopdistWarning(UserWarning):
    """A warning that something works, but perhaps not as expected: for example with other rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a group's ranks in messages: a noun, such as ``instance``, and each rank's job-wide number."""

    members: tuple[int, ...]
    noun: str = "rank"
    place: str = ""  # of the instances with the same part of other replicas: `` (stage 0, shard 1)``

    def of(self, ranks: Iterable[int], *, max_runs: int | None = 6) -> str:
        """Return the names of the group's processes with the ranks ``ranks``: ``instances 0 to 2 and 5``."""
        return name_instances((self.members[rank] for rank in ranks), self.noun, max_runs=max_runs) + self.place


_SMALLEST_SEED, _LARGEST_SEED = -(2**63), 2**64 - 1
"""The smallest and the largest seed that torch's generators accept."""


MOST_PARTS = 2**20
"""The largest number of an instance's replicas, or of a replica's micro batches in a step; more takes hours."""

MOST_TOKENS = 2**31 - 1
"""The largest number of tokens of a packed row."""


def whole_number(
    what: str, value: object, error: type[Exception], *, minimum: int = 1, maximum: int | None = None
) -> int:
    """Return ``value`` as an int; raise ``error`` if it is not whole, or not from ``minimum`` to ``maximum``."""
    if type(value) is int and value >= minimum and (maximum is None or value <= maximum):
        return value  # the usual case, because the check of the protocol takes ten microseconds
    number = _as_whole(value)
    if number is None or number < minimum:
        raise error(f"{what}={value!r} must be a whole number of at least {minimum}")
    if maximum is not None and number > maximum:
        raise error(f"{what}={value!r} must be a whole number of at most {maximum}")
    return number


def check_flags(error: type[PopdistError], **flags: object) -> None:
    """Raise ``error`` if a flag is not True or False, because a text such as ``"no"`` would count as True."""
    for what, value in flags.items():
        if value is not True and value is not False and type(value).__name__ not in ("bool", "bool_"):  # numpy's
            raise error(f"{what}={value!r} must be True or False")


def check_callable(error: type[PopdistError], **given: object) -> None:
    """Raise ``error`` if an argument is neither None nor a function."""
    for what, value in given.items():
        if value is not None and not callable(value):
            raise error(f"{what}={value!r} must be a function")


def seed_number(value: object, error: type[Exception]) -> int:
    """Return the seed ``value`` as an int; raise ``error`` if torch does not accept this seed."""
    number = _as_whole(value)
    if number is None or not _SMALLEST_SEED <= number <= _LARGEST_SEED:
        raise error(f"seed={value!r} must be a whole number from -2**63 to 2**64 - 1")
    return number


def as_float(value: object) -> float:
    """Return ``value`` as a float; return NaN if ``value`` is no number."""
    if type(value) is float:  # the usual case for each micro batch, because the other checks take microseconds
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
    """Return the first ``most`` of ``names`` as text, with the number of the other names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Return the ranges of consecutive numbers in ``numbers``, ascending."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def name_instances(instances: Iterable[int], noun: str = "instance", *, max_runs: int | None = 6) -> str:
    """Return text as ``instances 0 to 2 and 5``; above ``max_runs`` ranges, ``9 instances from 0 to 40``."""
    runs = runs_of(instances)
    if max_runs is not None and len(runs) > max_runs:
        return f"{sum(map(len, runs))} {noun}s from {runs[0][0]} to {runs[-1][-1]}"
    words = [word for run in runs for word in ([f"{run[0]} to {run[-1]}"] if run[2:] else map(str, run))]
    listed = " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
    return f"{noun} {listed}" if listed.isdecimal() else f"{noun}s {listed}"


_OF_ALL: Final = (
    r"(?:^|, in )(checkpoint\.\w+|Mean\.compute|weighted_mean|all_reduce|all_gather|gather|broadcast\w*|barrier)\("
)
"""A pattern of calls that all instances must make, but that programs often make inside ``if is_main():``."""


def remedy_of_lone_call(calls: Iterable[str]) -> str:
    """Return advice if one of ``calls`` is a collective that is often called on one instance; else empty text."""
    found = [match[1] for call in calls if (match := re.search(_OF_ALL, call))]
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
