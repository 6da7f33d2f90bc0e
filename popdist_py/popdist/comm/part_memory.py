"""Some of the instances of a host in its memory, for what they send each other in `execute_on_instances`.

They begin to share it when they first have data for each other: before, nobody knows that they will. All of them
come to that place together, as their headers prove, and they tell each other where their pages are as they tell
headers. No store is asked: the instance that keeps it may have left.
"""

from contextlib import suppress

from popdist.comm.connections import Mesh
from popdist.comm.header_exchanges import HostExchange
from popdist.errors import BackendError
from popdist.headers import NUM_WORDS
from popdist.host_memory.host_collectives import HostCollectives
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.mailboxes import Mailboxes
from popdist.host_memory.segments import PAGE_BYTES
from popdist.host_memory.shared_blocks import Reservation

_NO_ROOM = -1


class Parts:
    """The sets of instances that this one is in.

    Args:
        mesh: The connections of the job.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._made: dict[tuple[int, ...], HostCollectives | None] = {}
        self._failures: dict[tuple[int, ...], str] = {}

    def of(self, instances: tuple[int, ...]) -> HostCollectives | None:
        """The collectives of some instances, which all ask for them at the same time.

        Returns:
            None on all of them where the job does not share a host's memory, or one of them has no room.

        Raises:
            BackendError: If one was lost or did not come in time, now or when they first asked.
        """
        if instances in self._failures:
            raise BackendError(self._failures[instances])
        if instances not in self._made:
            try:
                self._made[instances] = self._make(instances)
            except BackendError as error:
                self._failures[instances] = str(error)
                raise
        return self._made[instances]

    def close(self) -> None:
        """Leave all of them: the others see it."""
        for made in self._made.values():
            if made is not None:
                made.close()

    def _make(self, instances: tuple[int, ...]) -> HostCollectives | None:
        host, mailboxes = self._mesh.host, self._mesh.mailboxes
        if host is None or mailboxes is None:
            return None
        page, part = _page_of(host.group), None
        offsets = self._tell(mailboxes, instances, _NO_ROOM if page is None else page.offset)
        if page is not None and _NO_ROOM not in offsets:
            with suppress(OSError, ValueError):
                part = host.group.part(instances, page, offsets)
        have_all = all(self._tell(mailboxes, instances, int(part is not None)))
        return _collectives_of(part) if part is not None and have_all else None

    def _tell(self, mailboxes: Mailboxes, instances: tuple[int, ...], number: int) -> list[int]:
        """What each of them tells."""
        words = [number] + [0] * (NUM_WORDS - 1)
        return [first for first, *_ in HostExchange(self._mesh, mailboxes, instances, words).wait()]


def _page_of(group: HostGroup) -> Reservation | None:
    with suppress(BackendError):
        return group.reserve(PAGE_BYTES)
    return None


def _collectives_of(part: HostGroup) -> HostCollectives | None:
    """None on all instances of the part where one has no room for what they send."""
    try:
        return HostCollectives(part)
    except BackendError:
        part.flags.raise_failure()
        return None
