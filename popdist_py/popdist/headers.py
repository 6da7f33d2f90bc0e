"""The header that an instance sends before a collective: a fixed number of bytes that tell what it will do.

Every instance sends its header to every other one and compares. The text is what a person would write, such as
``all_reduce(float32[3, 4] on cpu, op='sum')``, and equal texts mean equal collectives; so the same words serve the
comparison and the message of the error. Pure: no torch, no network.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

MAX_NUMBERS: Final = 32
"""How many integers a header carries beside its text."""

TEXT_BYTES: Final = 248
"""Room for the text; a longer one is cut and ends in a digest of the whole."""

HEADER_BYTES: Final = 8 * (1 + MAX_NUMBERS) + TEXT_BYTES
"""Length of a header: a word that counts the numbers, room for them, and the text."""

_TEXT_AT: Final = HEADER_BYTES - TEXT_BYTES

_PREEMPTED_AT: Final = 4
"""The byte that says whether the sender was asked to leave; those before it count the numbers."""

_FORMS: Final = [struct.Struct(f"<i?3x{count}q{8 * (MAX_NUMBERS - count)}x") for count in range(1 + MAX_NUMBERS)]
"""Of what stands before the text, by how many numbers there are."""

_WORD: Final = struct.Struct("=q")
_FLOAT: Final = struct.Struct("=d")


def pack(text: str, numbers: Sequence[int] = (), *, is_preempted: bool = False) -> bytes:
    """A header, of ``HEADER_BYTES``.

    Args:
        text: What is about to be done, in words.
        numbers: What the instance adds to that, as signed 64-bit integers.
        is_preempted: Whether the instance was asked to leave.

    Raises:
        ValueError: If there are more than ``MAX_NUMBERS`` numbers, or one does not fit 64 bits.
    """
    count = len(numbers)
    if count > MAX_NUMBERS:
        raise ValueError(f"a header carries at most {MAX_NUMBERS} numbers, not {count}")
    try:
        return _FORMS[count].pack(count, is_preempted, *numbers) + _bytes_of(text)
    except struct.error:
        raise ValueError(f"a header carries 64-bit integers, not {list(numbers)}") from None


def unpack(received: Sequence[bytes]) -> list[list[int]] | None:
    """The numbers of each of these headers, at least one; None if they do not have the same text.

    Equal headers share one list, so it is not to be written into.
    """
    first, *others = received
    if others.count(first) == len(others):  # as most of the time
        return [_numbers_of(first)] * len(received)
    text = first[_TEXT_AT:]
    return [_numbers_of(it) for it in received] if all(it.endswith(text) for it in others) else None


def text_of(header: bytes) -> str:
    """The text of a header, cut as :func:`pack` cut it."""
    return header[_TEXT_AT:].rstrip(b"\0").decode(errors="replace")


def _numbers_of(header: bytes) -> list[int]:
    _, _, *numbers = _FORMS[header[0]].unpack_from(header)  # the first byte is enough to count them
    return numbers


def are_some_preempted(received: Sequence[bytes]) -> bool:
    """Whether the sender of one of these headers was asked to leave."""
    return any(header[_PREEMPTED_AT] for header in received)


def as_words(numbers: Iterable[float]) -> list[int]:
    """Floats as integers that a header can carry; every bit is kept."""
    return [_WORD.unpack(_FLOAT.pack(number))[0] for number in numbers]


def as_floats(words: Iterable[int]) -> list[float]:
    """Inverse of :func:`as_words`."""
    return [_FLOAT.unpack(_WORD.pack(word))[0] for word in words]


@lru_cache(maxsize=64)
def _bytes_of(text: str) -> bytes:
    """``text``, cut if need be, as it stands in a header: a step says the same in every step."""
    return _fit(text.encode()).ljust(TEXT_BYTES, b"\0")


def _fit(text: bytes) -> bytes:
    if len(text) <= TEXT_BYTES:
        return text
    digest = hashlib.sha256(text).hexdigest()[:32].encode()
    return text[: TEXT_BYTES - len(digest) - 4] + b"... " + digest


def disagreement(texts: Mapping[int, str]) -> str | None:
    """Which instances brought which text, one line for each; None when all texts are equal."""
    owners: dict[str, list[int]] = {}
    for instance, text in texts.items():
        owners.setdefault(text, []).append(instance)
    if len(owners) == 1:
        return None
    lines = [f"  {name_instances(instances)}: {text}" for text, instances in owners.items()]
    return "the instances are not in the same collective:\n" + "\n".join(lines)


def name_instances(instances: Iterable[int], noun: str = "instance") -> str:
    """The instances in words: ``instance 3``, ``instances 0 to 2 and 5``; runs of three or more are folded."""
    runs: list[list[int]] = []
    for instance in sorted(instances):
        if runs and instance == runs[-1][-1] + 1:
            runs[-1].append(instance)
        else:
            runs.append([instance])
    words = [word for run in runs for word in ([f"{run[0]} to {run[-1]}"] if run[2:] else map(str, run))]
    listed = " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
    return f"{noun} {listed}" if listed.isdecimal() else f"{noun}s {listed}"
