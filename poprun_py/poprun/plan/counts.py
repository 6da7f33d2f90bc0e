"""The counts of instances, replicas and hosts: which fit together, and the nearest ones that do.

Pure arithmetic. Replicas divide over instances, instances over hosts, and every count is at least 1. Each error
says what was asked, the rule it breaks, and the nearest legal choices on either side.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from poprun.errors import PlanError

MAX_COUNT: Final = 2**31 - 1
"""Ranks are 32-bit numbers in MPI and torch."""

_NUM_CHOICES: Final = 3


def check_count(option: str, count: int, *, minimum: int = 1) -> None:
    """Check that the value of ``option`` lies between ``minimum`` and ``MAX_COUNT``."""
    if count < minimum:
        raise PlanError(f"{option} {count} is not possible: it must be at least {minimum}")
    if count > MAX_COUNT:
        raise PlanError(f"{option} {count} is not possible: it can be at most {MAX_COUNT}")


def check_counts(*, num_instances: int, num_replicas: int | None, num_hosts: int) -> None:
    """Check that instances divide over hosts and replicas over instances; no replicas is one each."""
    check_count("--num-instances", num_instances)
    if num_replicas is not None:
        check_count("--num-replicas", num_replicas)
    if num_instances % num_hosts:
        raise PlanError(_instances_over_hosts(num_instances, num_replicas, num_hosts))
    if num_replicas is not None and num_replicas % num_instances:
        raise PlanError(_replicas_over_instances(num_instances, num_replicas, num_hosts))


def legal_instances(num_replicas: int, num_hosts: int) -> list[int]:
    """The numbers of instances, ascending, that divide the replicas and are divided by the hosts."""
    return [count for count in _divisors(num_replicas) if count % num_hosts == 0]


def _replicas_over_instances(num_instances: int, num_replicas: int, num_hosts: int) -> str:
    replicas = _multiples_around(num_replicas, num_instances)
    instances = _nearest(legal_instances(num_replicas, num_hosts), num_instances)
    nearest = _either(_choices(replicas, "replica"), _choices(instances, "instance"))
    if num_replicas < num_instances:
        return (
            f"--num-instances {num_instances} is more than --num-replicas {num_replicas}: "
            f"each instance needs a replica; nearest: {nearest}"
        )
    return (
        f"--num-replicas {num_replicas} does not divide over --num-instances {num_instances}; nearest: {nearest}"
    )


def _instances_over_hosts(num_instances: int, num_replicas: int | None, num_hosts: int) -> str:
    if num_replicas is None:
        instances = _multiples_around(num_instances, num_hosts)
    else:
        instances = _nearest(legal_instances(num_replicas, num_hosts), num_instances)
    hosts = _nearest((count for count in _divisors(num_instances) if count < num_hosts), num_hosts)
    nearest = _either(_choices(instances, "instance"), _choices(hosts, "host"))
    return (
        f"--num-instances {num_instances} does not divide over the {num_hosts} hosts of --host; nearest: {nearest}"
    )


def _divisors(number: int) -> Iterator[int]:
    """Every divisor of ``number``, ascending."""
    small = [count for count in range(1, int(number**0.5) + 1) if number % count == 0]
    yield from small
    yield from (number // count for count in reversed(small) if count * count != number)


def _multiples_around(number: int, step: int) -> list[int]:
    """The largest multiple of ``step`` up to ``number`` and the next one; 0 is left out."""
    below = number // step * step
    return [count for count in (below, below + step) if 0 < count <= MAX_COUNT]


def _nearest(counts: Iterable[int], wanted: int) -> list[int]:
    """The three of ``counts`` that are closest to ``wanted``, ascending."""
    return sorted(sorted(counts, key=lambda count: abs(count - wanted))[:_NUM_CHOICES])


def _choices(counts: list[int], noun: str) -> str:
    """Counts in words, such as ``4 or 8 replicas``; an empty text for no counts."""
    if not counts:
        return ""
    *others, last = map(str, counts)
    words = f"{', '.join(others)} or {last}" if others else last
    return f"{words} {noun}" if counts == [1] else f"{words} {noun}s"


def _either(first: str, second: str) -> str:
    return ", or ".join(filter(None, (first, second)))
