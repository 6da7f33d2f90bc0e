"""The execution of code on some instances only, such as printing, downloading or saving by the first instance."""

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
    """Whether this is instance 0, which prints and saves; True outside a job. Needs no ``init()``.

    Raises:
        ContractError: If the environment describes a job incompletely.
    """
    return instance_index() == 0


def execute_on_instances(
    instances: Iterable[int], fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> R | None:
    """Call ``fn`` on some instances; the other instances return None at once.

    Inside ``fn`` collectives are limited to the listed instances: ``barrier()`` waits only for the listed
    instances, ``all_gather()`` has one row for each of them, and a ``root`` must be listed. Queries such as
    ``num_instances()`` still describe the whole job. No instance waits for another instance here: call
    ``barrier()`` afterwards if the other instances need the result of ``fn``. If several instances share a
    replica, the numbers are numbers of replicas, and all instances of a listed replica call ``fn``.

    Args:
        instances: Job-wide numbers of the instances, in any order; equal on each listed instance. At least one.
        fn: The function to call.
        *args: Positional arguments of ``fn``.
        **kwargs: Keyword arguments of ``fn``.

    Returns:
        The result of ``fn`` on the listed instances; None on the other instances.

    Raises:
        CollectiveError: If ``instances`` is empty or has a number of no instance, or ``fn`` cannot be called;
            inside another ``execute_on_instances``, if an instance is not listed there.
        NotInitializedError: Before ``popdist.init()``.
    """
    job = current_job()
    if not isinstance(instances, Iterable):
        raise CollectiveError(
            f"execute_on_instances({instances!r}, ...): expected a set of instances, such as {{0}}"
        )
    if not callable(fn):
        raise CollectiveError(f"execute_on_instances(..., {fn!r}): expected a function to call")
    listed, group, contract = list(instances), data_parallel_group(), job.environment.contract
    if not listed or any(instance not in group.instances for instance in listed):
        asked, noun = ", ".join(map(str, listed)), group.backend.names.noun
        raise CollectiveError(
            f"execute_on_instances({{{asked}}}, ...): expected one or several of "
            f"{name_instances(group.instances, noun)}"
        )
    if len(group.instances) == contract.layout.num_instances:
        _prepare()
    if contract.data_parallel_index not in listed:
        return None
    with limited_to(tuple(sorted(set(listed)))):
        return fn(*args, **kwargs)


_preparations: Final[list[WeakMethod[Callable[[], None]]]] = []
"""The methods given to ``before_execute_on_instances``, in the order of registration."""


def before_execute_on_instances(method: Callable[[], None]) -> None:
    """Register ``method``, which all instances call first whenever the program calls ``execute_on_instances``.

    An example is a result that some instances will need, but that only all instances together can compute: a whole
    state that is cut into shards. Every instance, listed or not, calls ``method`` outside the limits, so
    that ``method`` may call collectives. All instances must register the same methods in the same order. In a
    nested ``execute_on_instances`` no method is called, because other instances have already gone on.

    Args:
        method: A method without arguments; unregistered when its object is deleted.
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
    """A context whose block runs first on the first instance of each host, then on all other instances.

    Use it for work that each host needs once: ``with popdist.first_on_host(): dataset = download(folder)``. The
    first instance fills the cache, and the other instances find a full cache. All instances of the job must enter
    the block, and the block must call no collective. The other instances wait at most the ``timeout_seconds`` of
    ``popdist.init()``.

    Raises:
        CollectiveError: If the block failed on the first instance of any host: that instance raises its own
            exception, and every other instance raises this error and does not run the block. Or if the instances
            make other calls.
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
    """Send the other instances the message that this instance has failed in the call ``text``."""
    group.start(text, [True])


def end_together(group: Group, text: str, failure: str) -> None:
    """Wait until all instances have ended the call ``text``; raise CollectiveError if an instance has failed."""
    ends = zip(group.instances, group.start(text, [False]).wait(), strict=True)
    if failed := [instance for instance, (has_failed,) in ends if has_failed]:
        wait_for_first_error()
        raise CollectiveError(failure.format(group.name(failed)))
