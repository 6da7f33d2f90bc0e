"""Messages between the ranks of a group on several hosts, over gloo.

gloo says of a lost peer only that a connection was closed, and a rank that gives up closes all of its own
connections. So a rank that finds a loss writes it into the group's store first: a rank that is cut off by that
reads there which one was lost.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from popdist.errors import BackendError, PopdistError
from popdist.host_memory.barriers import Names
from popdist.host_memory.host_collectives import as_bytes

_FAILURE: Final = "failure"
_SHORTEST_SECONDS: Final = 0.001


class HostMessages:
    """The messages of a rank to and from all others of its group. One thread at a time.

    The timeout may be changed between collectives.
    """

    def __init__(
        self,
        gloo: Any,  # noqa: ANN401 - torch's stubs lack the calls that take lists of tensors
        store: Store,
        rank: int,
        names: Names,
        timeout_seconds: float,
    ) -> None:
        self._gloo = gloo
        self._store = store
        self._rank = rank
        self._names = names
        self.timeout_seconds = timeout_seconds
        self._failure: str | None = None

    def swap(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Send to some ranks and receive from some, as by :meth:`start`, and wait for it."""
        self.start(sent, received)()

    def start(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Callable[[], None]:
        """Send contiguous tensors to some ranks and receive from some; a function that waits for all of them.

        All ranks make the same calls in the same order. A tensor without elements is neither sent nor awaited.
        """
        works = []
        for tensors, begin in ((received, self._receive), (sent, self._send)):
            works += [
                (rank, begin(rank, tensor))
                for rank, tensor in tensors.items()
                if tensor.numel() and rank != self._rank
            ]
        return partial(self._wait, works)

    def _wait(self, works: Sequence[tuple[int, Any]]) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        for rank, work in works:
            with self._naming(rank):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), _SHORTEST_SECONDS)))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Do a collective in the block: what goes wrong in it ends the group on all hosts, with one reason."""
        if self._failure is not None:
            raise BackendError(self._failure)
        try:
            yield
        except PopdistError as error:
            self._failure = self._agree_on(str(error))
            self._gloo = None
            raise BackendError(self._failure) from error

    def close(self) -> None:
        """Drop the connections."""
        self._gloo = None
        self._failure = self._failure or f"this {self._names.noun} has left the group"

    def _receive(self, rank: int, tensor: Tensor) -> Any:  # noqa: ANN401 - a work of torch's
        with self._naming(rank):
            return self._gloo.recv([as_bytes(tensor)], rank, 0)

    def _send(self, rank: int, tensor: Tensor) -> Any:  # noqa: ANN401 - as above
        with self._naming(rank):
            return self._gloo.send([as_bytes(tensor)], rank, 0)

    @contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            name = self._names.of([rank])
            late = f"{name} did not come within the timeout of {self.timeout_seconds:g} seconds"
            lost = f"the connection to {name} was closed: it ended or was lost"
            raise BackendError(late if "timed out" in str(error).lower() else lost) from error

    def _agree_on(self, reason: str) -> str:
        """The first reason that a rank gave; this rank's where the store has gone with the rank that kept it."""
        with suppress(RuntimeError):
            if self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE), "utf-8")
            self._store.set(_FAILURE, reason)
        return reason
