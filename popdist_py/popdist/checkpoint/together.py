"""What the instances of a job do together: one of them writes and reads, and an error on one is raised on all."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from popdist import context
from popdist.collectives import send_bytes
from popdist.errors import CheckpointError, CollectiveError, name_instances
from popdist.groups import Group

WRITER: Final = 0
"""The instance that writes manifests, and reads them."""


def whole_job(call: str) -> Group:
    """The group of all instances of the job; an error within ``execute_on_instances``."""
    group = context.current_group()
    num_instances = context.environment().contract.num_instances
    if len(group.instances) < num_instances:
        raise CollectiveError(
            f"{call} among {name_instances(group.instances)}: all {num_instances} instances of the job take part, "
            "so call it outside of execute_on_instances"
        )
    return group


def is_writer(group: Group) -> bool:
    """Whether this instance is the one that writes manifests."""
    return group.backend.instance_index == WRITER


@contextmanager
def together(group: Group, text: str) -> Iterator[None]:
    """Run the block, which waits for nobody, on every instance: an error on one of them is raised on each."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are told, and it is raised below
        failure = error
    words = "" if failure is None else f"{failure}" or type(failure).__name__
    message = words.encode(errors="backslashreplace")  # the name of a file may be no text
    lengths = [length for (length,) in group.start(text, [len(message)]).wait()]
    failed = [instance for instance, length in enumerate(lengths) if length]
    if failed:
        told = send_bytes(group, message, lengths[failed[0]], failed[0])
        raise failure or CheckpointError(f"{name_instances(failed)} failed: {told.decode(errors='replace')}")


def broadcast_bytes(group: Group, text: str, data: bytes) -> bytes:
    """The writer's ``data``, on every instance."""
    (length,) = group.start(text, [len(data)]).wait()[WRITER]
    return send_bytes(group, data, length, WRITER)


def broadcast_tensors(group: Group, text: str, tensors: Iterable[Tensor]) -> None:
    """Overwrite dense CPU tensors, of the same shapes and order on all instances, with the writer's."""
    group.agree(text)
    for tensor in tensors:
        in_memory_order = tensor.as_strided((tensor.numel(),), (1,))
        group.backend.broadcast(in_memory_order, WRITER)
