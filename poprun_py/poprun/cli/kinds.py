"""What the value of an option may be: text in, a value or a :class:`ValueError` that says what to write instead.

Pure. The same text is read from the command line, from a ``POPRUN_*`` variable and from a file of options.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from poprun.cli.spelling import BOOLEANS
from poprun.text.host_names import parse_hosts
from poprun.text.ranges import parse_numbers

AUTO: Final = "auto"
OFF: Final = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of value.

    Attributes:
        metavar: How the help page calls it.
        read: The value that a text stands for; a :class:`ValueError` says what to write instead.
        read_all: For an option that may be repeated: the value that all its texts together stand for. The last
            text counts where this is None.
        is_switch: Whether the option is on without a value, and ``--no-…`` is off.
        choices: All values that there are, if they are few.
        is_counted: Whether the option takes no value and how often it is written counts.
    """

    metavar: str
    read: Callable[[str], Any]
    read_all: Callable[[Sequence[str]], Any] | None = None
    is_switch: bool = False
    choices: tuple[str, ...] = ()
    is_counted: bool = False

    def value(self, texts: Sequence[str]) -> Any:  # noqa: ANN401 - whatever the kind makes of them
        """What ``texts``, in the order in which they were given, stand for. At least one.

        Raises:
            ValueError: If they stand for nothing.
            PlanError: If they name hosts that cannot be.
        """
        return self.read_all(texts) if self.read_all else self.read(texts[-1])


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("give a whole number") from None


def _number_or_auto(text: str) -> int | None:
    try:
        return None if text == AUTO else int(text)
    except ValueError:
        raise ValueError("give a whole number, or auto for one per free GPU") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("give a number of seconds, such as 90") from None


def _seconds_or_off(text: str) -> float | None:
    try:
        return None if text == OFF else float(text)
    except ValueError:
        raise ValueError("give a number of seconds, or off") from None


def _instances(text: str) -> tuple[int, ...]:
    numbers = parse_numbers(text)
    if not numbers:
        raise ValueError("name one instance or more, such as 0,4-7")
    return numbers


def _boolean(text: str) -> bool:
    if text.lower() not in BOOLEANS:
        raise ValueError("give yes or no")
    return BOOLEANS[text.lower()]


def _name(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("give a name")
    return text


def _words(texts: Sequence[str]) -> tuple[str, ...]:
    """The words of each text, as a shell splits them."""
    try:
        return tuple(word for text in texts for word in _split(text))
    except ValueError as error:
        raise ValueError(str(error).lower()) from None


def _split(text: str) -> list[str]:
    """The words of ``text``, whose lines may go on; quotes around all of it, meant for a shell, are taken off."""
    words = shlex.split(text.replace("\\\n", " "))
    is_quoted = len(words) == 1 and words[0].lstrip().startswith("-") and " " in words[0].strip()
    return shlex.split(words[0]) if is_quoted else words


def _words_of_instances(texts: Sequence[str]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Pairs of an instance and its words, from texts such as ``0:"-x A=1"``."""
    pairs = []
    for text in texts:
        index, colon, words = text.partition(":")
        if not colon or not index.strip().isdecimal():
            raise ValueError(f"{text!r} names no instance: write 0:'-x NAME=value'")
        pairs.append((int(index), _words([words])))
    return tuple(pairs)


def _hosts(texts: Sequence[str]) -> tuple[str, ...]:
    return parse_hosts(",".join(texts))


def _subnet(text: str) -> str:
    from ipaddress import ip_network  # noqa: PLC0415 - jobs of one machine have no subnet

    try:
        return str(ip_network(text, strict=False))
    except ValueError:
        raise ValueError("give a subnet, such as 10.1.0.0/16") from None


NUMBER: Final = Kind(metavar="N", read=_number)
NUMBER_OR_AUTO: Final = Kind(metavar="N|auto", read=_number_or_auto)
SECONDS: Final = Kind(metavar="SECONDS", read=_seconds)
SECONDS_OR_OFF: Final = Kind(metavar="SECONDS|off", read=_seconds_or_off)
INSTANCES: Final = Kind(metavar="N", read=_instances)
SWITCH: Final = Kind(metavar="", read=_boolean, is_switch=True)
FLAG: Final = Kind(metavar="", read=lambda text: text != "0", is_counted=True)
COUNTED: Final = Kind(metavar="", read=_number, is_counted=True)
NAME: Final = Kind(metavar="NAME", read=_name)
TEXT: Final = Kind(metavar="TEXT", read=str)
FILE: Final = Kind(metavar="FILE", read=str)
FOLDER: Final = Kind(metavar="DIR", read=str)
HOSTS: Final = Kind(metavar="HOSTS", read=str, read_all=_hosts)
SUBNET: Final = Kind(metavar="CIDR", read=_subnet)
WORDS: Final = Kind(metavar="ARGS", read=str, read_all=_words)
WORDS_OF_INSTANCES: Final = Kind(metavar="N:ARGS", read=str, read_all=_words_of_instances)


def one_of(choices: type[Enum], metavar: str = "") -> Kind:
    """The kind of the values of ``choices``; without a ``metavar`` the help page lists them."""
    names = [choice.value for choice in choices]

    def read(text: str) -> Enum:
        if text not in names:
            raise ValueError(f"give one of {', '.join(names)}")
        return choices(text)

    return Kind(metavar=metavar or f"[{'|'.join(names)}]", read=read, choices=tuple(names))
