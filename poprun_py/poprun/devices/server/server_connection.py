"""Communication with a server of virtual IPUs: a client sends one command and receives the answer.

This module imports little, because the small process that renews a lease (`renewal`) imports it too.
"""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from poprun.devices.server.token_proofs import CHALLENGE, authorization
from poprun.errors import (
    IpusTakenError,
    LeaseEndedError,
    PartitionError,
    PlanError,
    PoolError,
    PoprunError,
    ServerError,
    ServerLostError,
    UsageError,
)
from poprun.text.screen import visible

VERSION: Final = 2
VERSION_HEADER: Final = "Vipu-Version"
PATH: Final = "/v1/"

_LONGEST_ANSWER_BYTES: Final = 16 * 2**20
_OK: Final = 200
_KINDS: Final[Mapping[str, tuple[type[PoprunError], int]]] = {
    "plan": (PlanError, 400),
    "usage": (UsageError, 400),
    "partition": (PartitionError, 409),
    "taken": (IpusTakenError, 409),
    "ended": (LeaseEndedError, 410),
    "pool": (PoolError, 503),
    "busy": (ServerLostError, 503),
}
"""The errors that a server can send, by the name in its answer, each with the answer's HTTP status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The address of a server of virtual IPUs, with the secret token that server and clients know."""

    host: str
    port: int
    token: str  # the secret that server and clients share
    timeout_seconds: float  # how long the server may take to answer

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def describe_error(error: PoprunError) -> tuple[str, int]:
    """Return the name and the HTTP status with which the server reports ``error`` to a client."""
    known = ((kind, status) for kind, (raised, status) in _KINDS.items() if type(error) is raised)
    return next(known, ("plan", 400))


def call_server(server: ServerAddress, command: str, values: Mapping[str, object]) -> object:
    """Send ``command`` with ``values`` to a server, and return its answer. Raises the error in the answer."""
    # After a ServerLostError another attempt may succeed; after any other ServerError no attempt can succeed.
    challenge = str(_answer_of(server, CHALLENGE, "{}", "")).partition("\n")[0]
    body = json.dumps(values)
    return _answer_of(server, command, body, authorization(server.token, challenge, command, body))


def _answer_of(server: ServerAddress, command: str, body: str, proof: str) -> object:
    """Send a command with its proof to a server, and return its parsed answer. Raises the server's error."""
    status, version, text = _exchange(server, command, body, proof)
    if version != str(VERSION):
        version = visible(version[:20])
        raise ServerError(
            f"{server} is no server of virtual IPUs that this poprun knows "
            f"({f'it speaks version {version}, this poprun {VERSION}' if version else 'another program'}): "
            "check host and port, and have the same poprun on both sides"
        )
    try:
        answer: object = json.loads(text)
    except (ValueError, RecursionError):
        raise ServerError(f"the server of virtual IPUs at {server} answers with what is no JSON") from None
    if status == _OK:
        return answer
    fields = answer if isinstance(answer, dict) else {}
    problem = visible(str(fields.get("error", f"status {status}")))
    raised, _ = _KINDS.get(str(fields.get("kind", "")), (ServerError, status))
    if issubclass(raised, ServerError):
        problem = f"the server of virtual IPUs at {server} refuses: {problem}"
    raise raised(problem)


def _exchange(server: ServerAddress, command: str, body: str, proof: str) -> tuple[int, str, bytes]:
    """Send a command over HTTP; return the answer's status, protocol version and body."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=server.timeout_seconds)
    headers = {"Authorization": proof, "Content-Type": "application/json", "Connection": "close"}
    try:
        connection.request("POST", f"{PATH}{command}", body.encode(), headers)
        answer = connection.getresponse()
        text = answer.read(_LONGEST_ANSWER_BYTES + 1)
    except TimeoutError:
        raise ServerLostError(
            f"the server of virtual IPUs at {server} does not answer within {server.timeout_seconds:g} s: see "
            "that it runs there (vipu serve), or give it longer with --vipu-server-timeout"
        ) from None
    except OSError as error:
        raise ServerLostError(
            f"there is no server of virtual IPUs at {server} ({error.strerror or error}): start one there with "
            "vipu serve, or name another host and port"
        ) from None
    except (http.client.HTTPException, ValueError) as error:
        raise ServerError(
            f"what listens at {server} is no server of virtual IPUs ({type(error).__name__}): check host and port"
        ) from None
    finally:
        connection.close()
    if len(text) > _LONGEST_ANSWER_BYTES:
        raise ServerError(f"the server of virtual IPUs at {server} answers with too much")
    return answer.status, answer.headers.get(VERSION_HEADER, ""), text
