"""An option of poprun, a row of the table in `poprun.cli.options`, and the kinds of value that there are. Pure.

The help pages, the words of the command line, the ``POPRUN_*`` variables and the keys of a file of options follow
from the rows, and a value is read alike wherever it is written.
"""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from poprun.errors import PoprunError, UsageError
from poprun.text.host_names import parse_hosts
from poprun.text.ranges import parse_numbers

LINE: Final = "line"
"""The section of the values that stay on the command line: what is printed, and what is read from files."""

REQUEST: Final = "request"
"""The section of the fields of a :class:`LaunchRequest` itself."""

VARIABLE_PREFIX: Final = "POPRUN_"

HELP_ALL: Final = "--help-all"

COMPLETION: Final = "_POPRUN_COMPLETE"
"""What a shell's script sets to ask for completions; who wants a script calls with ``bash_source`` in it."""

BOOLEANS: Final = dict.fromkeys(("yes", "on", "1", "true"), True) | dict.fromkeys(
    ("no", "off", "0", "false"), False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of value, such as a number of seconds."""

    metavar: str
    read: Callable[[str], Any]  # the ValueError that it raises says what to write instead
    read_all: Callable[[Sequence[str]], Any] | None = None  # of what may be repeated; else the last text counts
    is_switch: bool = False  # on without a value; --no-… is off
    is_counted: bool = False  # without a value: how often it is written counts
    choices: tuple[str, ...] = ()  # all values, where they are few

    def value(self, texts: Sequence[str]) -> Any:  # noqa: ANN401 - whatever the kind makes of them
        """What ``texts``, one or more in the order in which they were given, stand for."""
        return self.read_all(texts) if self.read_all else self.read(texts[-1])


def _number(convert: Callable[[str], float], cure: str, *, none: str = "") -> Callable[[str], float | None]:
    """What reads a number, or the word ``none`` as no number."""

    def read(text: str) -> float | None:
        try:
            return None if none and text == none else convert(text)
        except ValueError:
            raise ValueError(cure) from None

    return read


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


NUMBER: Final = Kind(metavar="N", read=_number(int, "give a whole number"))
NUMBER_OR_AUTO: Final = Kind(
    metavar="N|auto", read=_number(int, "give a whole number, or auto for one per free GPU", none="auto")
)
SECONDS: Final = Kind(metavar="SECONDS", read=_number(float, "give a number of seconds, such as 90"))
SECONDS_OR_OFF: Final = Kind(
    metavar="SECONDS|off", read=_number(float, "give a number of seconds, or off", none="off")
)
INSTANCES: Final = Kind(metavar="N", read=_instances)
SWITCH: Final = Kind(metavar="", read=_boolean, is_switch=True)
FLAG: Final = Kind(metavar="", read=lambda text: text != "0", is_counted=True)
COUNTED: Final = Kind(metavar="", read=NUMBER.read, is_counted=True)
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


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line.

    ``field`` is the value that it sets, as ``section.name``. Sections are ``request``, whose names are fields of a
    :class:`LaunchRequest`, its fields that hold settings (``output``, ``ending``, ``vipu``, ``remote``), and
    ``line``. It is empty for an option that is accepted and has no effect; ``why_no_effect`` then says why.
    """

    name: str
    field: str
    kind: Kind
    help: str  # with the default, where it is neither a number nor a name that the request has
    short: str = ""
    is_local: bool = False  # no file of options and no variable holds it
    goes_with_plan: bool = False
    why_no_effect: str = ""
    group: str = ""

    @property
    def variable(self) -> str:
        """The variable that sets the option where no flag does."""
        return VARIABLE_PREFIX + self.name.replace("-", "_").upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionValue:
    """The texts that somebody has given to an option, once for each time it was written."""

    option: Option
    texts: tuple[str, ...]
    place: str = ""  # such as POPRUN_HOST or job.yaml:3; empty for the command line

    def value(self) -> Any:  # noqa: ANN401 - whatever the option's kind makes of it
        """The value that the texts stand for; the error if they stand for none says where they were written."""
        where = f"{self.place}: " if self.place else ""
        try:
            return self.option.kind.value(self.texts)
        except ValueError as error:
            raise UsageError(f"{where}--{self.option.name} {' '.join(self.texts) or repr('')}: {error}") from None
        except PoprunError as error:
            raise type(error)(f"{where}{error}") from None


def values_by_section(given: Iterable[OptionValue]) -> dict[str, dict[str, Any]]:
    """The values that ``given`` sets, by section and name of their fields; the later of two counts."""
    values: dict[str, dict[str, Any]] = {}
    for one in given:
        section, _, name = one.option.field.partition(".")
        value = one.value()
        if section:
            values.setdefault(section, {})[name] = value
    return values
