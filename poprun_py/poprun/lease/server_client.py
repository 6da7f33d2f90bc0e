"""All that a client asks of a server of virtual IPUs; what the pool of this machine answers is answered alike."""

from poprun.errors import PlanError, ServerError
from poprun.lease.server_connection import ServerAddress, ask
from poprun.lease.server_messages import (
    LeaseAnswer,
    LeaseRequest,
    ServedPool,
    read_answer,
    read_partition,
    read_pool,
    reader,
    request_to_dict,
)
from poprun.plan.inventory import Cluster
from poprun.pool.records import Partition, PoolState


class RemotePool:
    """The pool that a server hands out.

    Every method raises :class:`~poprun.errors.ServerError` when the server cannot be used, and what the pool of
    this machine would raise.

    Args:
        server: Where it is.
        client: Who asks, as ``user@host``.
    """

    def __init__(self, server: ServerAddress, client: str) -> None:
        self.server = server
        self._client = client

    def served(self) -> ServedPool:
        """All that it tells."""
        answer = ask(self.server, "pool", {})
        try:
            return read_pool(answer, "the answer")
        except PlanError as error:
            raise self._senseless(error) from None

    def cluster(self) -> Cluster:
        """What it hands out."""
        return self.served().cluster

    def state(self) -> PoolState:
        """What stands in it now."""
        return self.served().state

    def create_partition(self, name: str, size: int, *, allocation: str | None, cluster: str | None) -> Partition:
        """Make a partition of free IPUs."""
        values = {"name": name, "size": size, "allocation": allocation, "cluster": cluster, "user": self._client}
        return self._partition(ask(self.server, "create-partition", values))

    def reset_partition(self, name: str) -> Partition:
        """Choose the IPUs of a partition anew."""
        return self._partition(ask(self.server, "reset-partition", {"name": name}))

    def remove_partition(self, name: str) -> None:
        """Remove a partition that nobody uses."""
        ask(self.server, "remove-partition", {"name": name})

    def take_lease(self, request: LeaseRequest) -> LeaseAnswer:
        """Stand in the queue, or take what is asked for when it is free; asked again, it is the same lease."""
        answer = ask(self.server, "take-lease", request_to_dict(request))
        try:
            return read_answer(answer, "the answer")
        except PlanError as error:
            raise self._senseless(error) from None

    def end_lease(self, key: str) -> None:
        """Give back what the lease of that key holds; one that has ended already is no error."""
        ask(self.server, "end-lease", {"key": key})

    def _partition(self, answer: object) -> Partition:
        try:
            return read_partition(reader(answer, "the answer"))
        except PlanError as error:
            raise self._senseless(error) from None

    def _senseless(self, error: PlanError) -> ServerError:
        return ServerError(f"the server of virtual IPUs at {self.server} answers what makes no sense: {error}")
