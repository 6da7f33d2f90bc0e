"""Being an instance of a job without a job: as far as queries go, in this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from popdist.ground.contract import Contract

T = TypeVar("T")


@contextmanager
def instance(index: int, num_instances: int, num_replicas: int) -> Iterator[None]:
    """Be instance ``index`` of a job."""
    contract = Contract(num_instances=num_instances, instance_index=index, num_replicas=num_replicas)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in contract.to_env().items():
            environment.setenv(name, value)
        yield


def on_instances(split: tuple[int, int], make: Callable[[], T]) -> list[T]:
    """What ``make`` gives on every instance of a job of ``split``: instances and replicas."""
    made = []
    for index in range(split[0]):
        with instance(index, *split):
            made.append(make())
    return made
