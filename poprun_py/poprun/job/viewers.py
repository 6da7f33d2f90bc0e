"""Who looks at a running job: monitors at the control socket, which are sent a view of it now and then.

A monitor that does not read is let go: looking at a job never holds it up.
"""

import socket
from typing import TYPE_CHECKING, Final

from poprun.messages.control import encode

if TYPE_CHECKING:
    from poprun.messages.link import Link
    from poprun.messages.view import JobView

_INTERVAL_SECONDS: Final = 0.5


class Viewers:
    """The monitors of a job."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._next_seconds = 0.0

    def add(self, link: "Link") -> None:
        """Let a monitor look from now on."""
        link.connection.setblocking(False)  # noqa: FBT003 - it takes no keywords
        self._links.append(link)
        self._next_seconds = 0.0

    def close(self) -> None:
        """Hang up: there is nothing more to see."""
        for link in self._links:
            link.close()
        self._links = []

    def are_due(self, now_seconds: float) -> bool:
        """Whether there are any, and it is time for a view."""
        return bool(self._links) and now_seconds >= self._next_seconds

    def show(self, view: "JobView", now_seconds: float) -> None:
        """Send all monitors a view."""
        self._next_seconds = now_seconds + _INTERVAL_SECONDS
        data = encode(view.to_message())
        for link in tuple(self._links):
            try:
                is_whole = link.connection.send(data, socket.MSG_NOSIGNAL) == len(data)
            except OSError:
                is_whole = False
            if not is_whole:
                self._links.remove(link)
                link.close()
