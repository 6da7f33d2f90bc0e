"""The header that an instance sends before a collective: a fixed number of integers that tell what it will do.

Every instance sends its header to every other one and compares. The text is what a person would write, such as
``all_reduce(float32[3, 4] on cpu, op='sum')``, and equal texts mean equal collectives; so the same words serve the
comparison and the message of the error. Pure: no torch, no network.
"""

import hashlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

MAX_NUMBERS: Final = 32
"""How many integers a header carries beside its text."""

TEXT_BYTES: Final = 248
"""Room for the text; a longer one is cut and ends in a digest of the whole."""

NUM_WORDS: Final = 1 + MAX_NUMBERS + TEXT_BYTES // 8
"""Length of a header, in 64-bit integers."""

_PREEMPTED: Final = 1 << 32
"""Added to the first word, which counts the numbers."""


def pack(text: str, numbers: Sequence[int] = (), *, is_preempted: bool = False) -> list[int]:
    """A header as ``NUM_WORDS`` signed 64-bit integers.

    Args:
        text: What is about to be done, in words.
        numbers: What the instance adds to that.
        is_preempted: Whether the instance was asked to leave.

    Raises:
        ValueError: If there are more than ``MAX_NUMBERS`` numbers, or one does not fit 64 bits.
    """
    if len(numbers) > MAX_NUMBERS:
        raise ValueError(f"a header carries at most {MAX_NUMBERS} numbers, not {len(numbers)}")
    try:
        words = array("q", numbers).tolist()
    except (OverflowError, TypeError):
        raise ValueError(f"a header carries 64-bit integers, not {list(numbers)}") from None
    first = len(words) + is_preempted * _PREEMPTED
    return [first, *words, *[0] * (MAX_NUMBERS - len(words)), *_words_of(text)]


def unpack(words: Sequence[int]) -> tuple[str, list[int]]:
    """The text (cut as :func:`pack` cut it) and the numbers of a header."""
    return _text_of(tuple(words[1 + MAX_NUMBERS :])), list(words[1 : 1 + words[0] % _PREEMPTED])


def is_preempted(words: Sequence[int]) -> bool:
    """Whether the sender of a header was asked to leave."""
    return words[0] >= _PREEMPTED


def as_words(numbers: Collection[float]) -> list[int]:
    """Floats as integers that a header can carry; every bit is kept."""
    return array("q", array("d", numbers).tobytes()).tolist()


def as_floats(words: Sequence[int]) -> list[float]:
    """Inverse of :func:`as_words`."""
    return array("d", array("q", words).tobytes()).tolist()


@lru_cache(maxsize=64)
def _words_of(text: str) -> list[int]:
    """``text``, cut if need be, as the words of a header: a step says the same in every step."""
    return array("q", _fit(text.encode()).ljust(TEXT_BYTES, b"\0")).tolist()


@lru_cache(maxsize=64)
def _text_of(words: tuple[int, ...]) -> str:
    """The inverse of :func:`_words_of`."""
    return array("q", words).tobytes().rstrip(b"\0").decode(errors="replace")


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
