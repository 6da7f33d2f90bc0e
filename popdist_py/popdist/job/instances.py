"""Work for some instances only: what the first one does for all, such as printing, downloading or saving."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar
from weakref import WeakMethod

from popdist.errors import CollectiveError, name_instances
from popdist.exchange.groups import Group, wait_for_first_error
from popdist.job.context import current_job, data_parallel_group, instance_index, limited_to, local_instance_index

P = ParamSpec("P")
R = TypeVar("R")


def is_main() -> bool:
    """Whether this is instance 0, the one that prints and saves. True outside a job; needs no ``init()``.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    return instance_index() == 0


def execute_on_instances(
    instances: Iterable[int], fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> R | None:
    """Call ``fn`` on some instances; the others go on at once.

    Within ``fn`` the collectives are limited to the listed instances: ``barrier()`` waits for those alone,
    ``all_gather()`` has a row for each of them, a ``root`` must be one of them. Queries such as
    ``num_instances()`` still tell of the whole job. No instance waits for another one here: call ``barrier()``
    afterwards where the others need what ``fn`` made. Where several instances share a replica, the numbers are
    those of replicas, and all instances of each of them call ``fn``.

    Args:
        instances: Job-wide numbers of the instances, in any order; the same on each of those listed. At least one.
        fn: What to call.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What ``fn`` returned, on the listed instances; None on the others.

    Raises:
        CollectiveError: If there is no number, or one that is no instance here, or ``fn`` cannot be called; within
            another ``execute_on_instances``, if one is not listed there.
        NotInitializedError: Before ``popdist.init()``.
    """
    job = current_job()
    if not isinstance(instances, Iterable):
        raise CollectiveError(
            f"execute_on_instances({instances!r}, ...): expected a set of instances, such as {{0}}"
        )
    if not callable(fn):
        raise CollectiveError(f"execute_on_instances(..., {fn!r}): expected a function to call")
    given, group, contract = list(instances), data_parallel_group(), job.environment.contract
    if not given or any(instance not in group.instances for instance in given):
        asked, noun = ", ".join(map(str, given)), group.backend.names.noun
        raise CollectiveError(
            f"execute_on_instances({{{asked}}}, ...): expected one or several of "
            f"{name_instances(group.instances, noun)}"
        )
    if len(group.instances) == contract.layout.num_instances:
        _prepare()
    if contract.data_parallel_index not in given:
        return None
    with limited_to(tuple(sorted(set(given)))):
        return fn(*args, **kwargs)


_preparations: Final[list[WeakMethod[Callable[[], None]]]] = []
"""What ``before_execute_on_instances`` was given, in this order."""


def before_execute_on_instances(method: Callable[[], None]) -> None:
    """Have all instances call ``method`` first, whenever the program calls ``execute_on_instances``.

    For what some instances will ask for that only all of them can give, such as the whole of a state that is cut
    into shards. It is called on every instance, listed or not, outside the limits, and may call collectives. All
    instances register alike, in the same order. Nothing is called where some instances have gone on already.

    Args:
        method: Of an object, without arguments; forgotten together with the object.
    """
    _preparations.append(WeakMethod(method))


def _prepare() -> None:
    _preparations[:] = [reference for reference in _preparations if reference() is not None]
    for reference in tuple(_preparations):
        method = reference()
        if method is not None:
            method()


@contextmanager
def first_on_host() -> Iterator[None]:
    """Run the block on one instance of each host first, and on the others of the host when it has ended there.

    For what a host needs once: ``with popdist.first_on_host(): dataset = download(folder)``. The first instance
    fills the cache, and the others find it full. All instances of the job enter the block together; no collective
    may be called in it. The others wait for it no longer than the ``timeout_seconds`` of ``popdist.init()``.

    Raises:
        CollectiveError: If the block failed on the first instance of any host: there its own exception goes on,
            and every other instance raises this one and does not run the block. Or if they do other things.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    group, text = current_job().group, "first_on_host()"
    failure = "the block of first_on_host() failed on {} (see the error there), so no other instance ran it"
    if local_instance_index():
        end_together(group, text, failure)
        yield
        return
    try:
        yield
    except BaseException:
        end_in_failure(group, text)
        raise
    end_together(group, text, failure)


def end_in_failure(group: Group, text: str) -> None:
    """Tell the others that this instance has failed in ``text``."""
    group.start(text, [True])


def end_together(group: Group, text: str, failure: str) -> None:
    """Wait until all instances have ended ``text``; a CollectiveError, ``failure``, if some have failed."""
    ends = zip(group.instances, group.start(text, [False]).wait(), strict=True)
    if failed := [instance for instance, (has_failed,) in ends if has_failed]:
        wait_for_first_error()
        raise CollectiveError(failure.format(group.name(failed)))
