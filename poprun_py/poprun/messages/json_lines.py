"""Messages as JSON objects, one a line, and what cuts a stream of bytes into lines.

Standard library only, for the agents' bare interpreter; not the package `json`, whose regular expressions take
longer to load than all that a shim does, but the part of it in C, with the arguments that `json` itself gives it.
"""

from __future__ import annotations

from _json import encode_basestring_ascii, make_encoder, make_scanner

MAX_MESSAGE_BYTES = 8 * 1024 * 1024  # room for the largest environment that Linux lets a program have
Message = dict[str, object]

_BLANKS = " \t\r"


class ProtocolError(Exception):
    """The error when the other side sent something that is no message."""


class _Grammar:
    """What the scanner asks for, as `json.JSONDecoder` has it: Python's own numbers, no hooks."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def _refuse(value: object) -> object:
    raise TypeError(f"{type(value).__name__} has no JSON")


_scan = make_scanner(_Grammar)  # type: ignore[arg-type]  # it asks for these attributes, and no more
_encode = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)  # noqa: FBT003


def encode(message: Message) -> bytes:
    """One message as a line of bytes."""
    return "".join(_encode(message, 0)).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line; a ProtocolError if it is no JSON object."""
    try:
        text = line.decode().strip(_BLANKS)
        message, end = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration):
        raise ProtocolError(f"a control message is no JSON: {line[:80]!r}") from None
    if end != len(text):
        raise ProtocolError(f"a control message is no JSON: {line[:80]!r}")
    if not isinstance(message, dict):
        raise ProtocolError(f"a control message is no object: {line[:80]!r}")
    return message


class LineReader:
    """Cuts a byte stream into lines, and drops those that grow too long."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_too_long = False

    def feed(self, data: bytes) -> tuple[list[bytes], int]:
        """Every line that ``data`` completes, without its ending, and how many were too long and are lost."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        num_lost = 0
        if self._is_too_long and lines:
            lines.pop(0)
            self._is_too_long = False
            num_lost = 1
        kept = [line for line in lines if len(line) <= MAX_MESSAGE_BYTES]
        if len(self._rest) > MAX_MESSAGE_BYTES:
            self._rest, self._is_too_long = b"", True
        elif self._is_too_long:
            self._rest = b""
        return kept, num_lost + len(lines) - len(kept)
