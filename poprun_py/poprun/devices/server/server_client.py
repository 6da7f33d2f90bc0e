"""The client of a server of virtual IPUs: all its commands, and the secret token that both sides know."""

import os
import secrets
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from popdist.ground.trusted_paths import opened_parent
from poprun.devices.pool.records import Partition, PoolState
from poprun.devices.server.server_connection import ServerAddress, call_server
from poprun.devices.server.server_messages import (
    LeaseAnswer,
    LeaseKey,
    LeaseRequest,
    NewPartition,
    Nothing,
    PartitionName,
    ServedPool,
)
from poprun.errors import PlanError, ServerError
from poprun.launch.process.process_tree import user_name
from poprun.plan.inventory import Cluster
from poprun.text.fields import Record, read_record, write_record

TOKEN_VARIABLE: Final = "POPRUN_VIPU_TOKEN_FILE"  # noqa: S105 - this is the name of a variable, no secret

_TOKEN_BYTES: Final = 32
_LEAST_LETTERS: Final = 32
_MOST_LETTERS: Final = 512
_OTHERS: Final = 0o077
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def token_file(environ: Mapping[str, str]) -> str:
    """Return the path of the server's secret token: the value of a variable, or a file in the user's settings."""
    named = environ.get(TOKEN_VARIABLE)
    settings = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.abspath(named or os.path.join(settings, "poprun", "vipu-token"))


def read_token(file: str) -> str:
    """Return the server's secret token in ``file``. Raises ServerError if others own or can read ``file``."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:
            status = os.fstat(descriptor)
            text = opened.read(_MOST_LETTERS + 2).strip()
    except FileNotFoundError:
        raise ServerError(
            f"there is no token of a server of virtual IPUs at {file}: vipu serve makes one where it runs; copy "
            f"it from there, or name its file with {TOKEN_VARIABLE}"
        ) from None
    except OSError as error:
        raise ServerError(f"token {file}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ServerError(f"token {file}: this is no plain file")
    if status.st_uid not in (os.geteuid(), 0):
        raise ServerError(f"token {file}: it belongs to {user_name(status.st_uid)}: make a copy of your own")
    if status.st_mode & _OTHERS:
        raise ServerError(f"token {file}: others may read it: chmod 600 {file}")
    if not (_LEAST_LETTERS <= len(text) <= _MOST_LETTERS and text.isalnum()):
        raise ServerError(f"token {file}: it holds no token, which is {_LEAST_LETTERS} or more letters and digits")
    return text.decode()


def make_token(file: str) -> bool:
    """Make a random secret token in ``file``, which only this user can read. Return False if ``file`` exists."""
    if os.path.lexists(file):
        return False
    unfinished = f".vipu-token-{secrets.token_hex(_TOKEN_BYTES)}"
    try:
        with opened_parent(file, makes=True) as (folder, name):
            descriptor = os.open(unfinished, _NEW, 0o600, dir_fd=folder)
            try:
                with open(descriptor, "w", encoding="ascii") as opened:
                    opened.write(secrets.token_hex(_TOKEN_BYTES) + "\n")
                with suppress(FileExistsError):
                    os.link(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                os.unlink(unfinished, dir_fd=folder)
    except OSError as error:
        raise ServerError(f"token {file} cannot be made: {error.strerror}") from None
    return True


class RemotePool:
    """A server's record of leases on virtual IPUs, which ``client`` (user@host) reads and changes over HTTP."""

    def __init__(self, server: ServerAddress, client: str) -> None:
        self.server = server
        self._client = client

    def served(self) -> ServedPool:
        """Return the server's description of itself: virtual IPUs, partitions, leases and duration of leases."""
        return self._call("pool", Nothing(), ServedPool)

    def cluster(self) -> Cluster:
        """Return the cluster of virtual IPUs that the server leases to jobs."""
        return self.served().cluster

    def state(self) -> PoolState:
        """Return the partitions and leases that the server has now."""
        return self.served().state

    def create_partition(self, name: str, size: int, *, allocation: str | None, cluster: str | None) -> Partition:
        """Make a partition, a set of ``size`` free IPUs called ``name``, and return it."""
        request = NewPartition(name=name, size=size, allocation=allocation, cluster=cluster, user=self._client)
        return self._call("create-partition", request, Partition)

    def reset_partition(self, name: str) -> Partition:
        """Choose new IPUs for the partition (set of IPUs) called ``name``, and return the changed partition."""
        return self._call("reset-partition", PartitionName(name=name), Partition)

    def remove_partition(self, name: str) -> None:
        """Remove the partition (set of IPUs) called ``name``. Raises an error if a job uses the partition."""
        self._call("remove-partition", PartitionName(name=name), Nothing)

    def request_lease(self, request: LeaseRequest) -> LeaseAnswer:
        """Send a request for IPUs to the server; return the granted IPUs, or how long to wait."""
        return self._call("take-lease", request, LeaseAnswer)

    def end_lease(self, key: str) -> None:
        """End the lease ``key`` at the server, which releases its IPUs; do nothing if it has ended."""
        self._call("end-lease", LeaseKey(key=key), Nothing)

    def _call(self, command: str, question: object, kind: type[Record]) -> Record:
        answer = call_server(self.server, command, write_record(question))
        try:
            return read_record(kind, answer, "the answer", noun="this message")
        except PlanError as error:
            raise ServerError(
                f"the server of virtual IPUs at {self.server} answers what makes no sense: {error}"
            ) from None


def pool_at(host: str, port: int, timeout_seconds: float) -> RemotePool:
    """Return a client of the pool (record of leases) at ``host`` and ``port``, for this process's user."""
    token = read_token(token_file(os.environ))
    server = ServerAddress(host=host, port=port, token=token, timeout_seconds=timeout_seconds)
    return RemotePool(server, f"{user_name(os.getuid())}@{socket.gethostname()}")
