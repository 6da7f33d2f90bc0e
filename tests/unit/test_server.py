"""The server of virtual IPUs reads no more of a request than it may have, however it comes."""

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from starlette.exceptions import HTTPException

from poprun.devices.server.server import MAX_BODY_BYTES, _body


class ComingRequest:
    """A request whose body comes in pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.headers: dict[str, str] = {}
        self._pieces = pieces

    async def stream(self) -> AsyncIterator[bytes]:
        """One piece after the other."""
        for piece in self._pieces:
            yield piece


def read(*pieces: bytes) -> bytes:
    """The body that comes in ``pieces``."""
    request: Any = ComingRequest(*pieces)
    return anyio.run(_body, request)


def test_a_body_may_come_in_pieces() -> None:
    """As long as all of them together are not too many."""
    assert read(b"a", b"", b"bc") == b"abc"
    assert len(read(bytes(MAX_BODY_BYTES - 1), b"x")) == MAX_BODY_BYTES


def test_small_pieces_add_up() -> None:
    """Each of them fits, and the body does not."""
    with pytest.raises(HTTPException, match=f"{MAX_BODY_BYTES} bytes at most") as refused:
        read(bytes(MAX_BODY_BYTES), b"x")
    assert refused.value.status_code == 413
