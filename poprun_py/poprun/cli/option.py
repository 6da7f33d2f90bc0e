"""One option of poprun, a row of the table in `poprun.cli.options`: its spellings, and what its value may be.

Unique prefixes (`--num-inst 2`), booleans with a value (`--print-topology=yes`, `--print-topology yes`) or with
`no-` in front, short options and clusters of them, and `--vv`. Pure: words in, words out. The walk ends at the
first word that is no option: that is the program, and every word after it is the program's.

A boolean word directly after a switch is its value. For the program `true` or `yes`, write `--` before it.

Pure. The same text is read from the command line, from a ``POPRUN_*`` variable and from a file of options.

The help page, the words of the command line, the ``POPRUN_*`` variables and the keys of a file of options follow
from it.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Any, Final

from poprun.errors import PoprunError, UsageError
from poprun.text.host_names import parse_hosts
from poprun.text.ranges import parse_numbers

BOOLEANS: Final = dict.fromkeys(("yes", "on", "1", "true"), True) | dict.fromkeys(
    ("no", "off", "0", "false"), False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The long options of a command, each with its two dashes.

    Attributes:
        valued: Options that take a value.
        switches: Options that are on or off, and take a value only if one is written.
        flags: Options that take no value.
        short: The long option of each short one, which stands here with its one dash.
        clusters: Long spellings of a cluster of short options.
    """

    valued: frozenset[str]
    switches: frozenset[str]
    flags: frozenset[str]
    short: Mapping[str, str]
    clusters: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """Every long option that may be written, ``--no-…`` of the switches among them."""
        return sorted({*self.valued, *self.switches, *self.flags, *map(_negated, self.switches), *self.clusters})


def normalise(words: list[str], vocabulary: Vocabulary) -> list[str]:
    """``words`` with each option of poprun as one long word: ``--name``, or ``--name=value``.

    The program's own words are left as they are, with ``--`` before them.

    Raises:
        UsageError: If an option is unknown, its prefix ambiguous, its value missing or too much, or a switch has a
            value that is no boolean.
    """
    return list(_walk(words, vocabulary))


def _walk(words: list[str], vocabulary: Vocabulary) -> Iterator[str]:
    """Spell out option after option; a cluster is spelled out and read again."""
    rest = list(reversed(words))
    while rest and rest[-1].startswith("-") and rest[-1] not in ("-", "--"):
        word = rest.pop()
        if word in vocabulary.clusters:
            word = vocabulary.clusters[word]
        if word.startswith("--"):
            yield _long(word, rest, vocabulary)
        else:
            rest.extend(reversed(_short(word, vocabulary)))
    if rest and rest[-1] == "--":
        rest.pop()
    if rest:
        yield "--"
        yield from reversed(rest)


def _long(word: str, rest: list[str], vocabulary: Vocabulary) -> str:
    """A long option spelled out; its value is taken from ``rest``, whose last word comes next."""
    written, equals, value = word.partition("=")
    name = _complete(written, vocabulary)
    if name in vocabulary.flags:
        if equals:
            raise UsageError(f"{written} takes no value, and {value!r} was given: write {name}")
        return name
    if name not in vocabulary.valued:
        return _switch(name, value if equals else _spelt_boolean(rest), vocabulary)
    if not equals and not rest:
        raise UsageError(f"{written} needs a value: write {name}=VALUE")
    return f"{name}={value if equals else rest.pop()}"


def _switch(name: str, value: str, vocabulary: Vocabulary) -> str:
    """A switch with its value; ``--no-x`` becomes ``--x`` with the opposite."""
    if value.lower() not in BOOLEANS:
        raise UsageError(f"{name}={value} is neither yes nor no: write {name}=yes or {name}=no")
    is_on = BOOLEANS[value.lower()]
    if name not in vocabulary.switches:
        name, is_on = _negated(name), not is_on
    return f"{name}={'yes' if is_on else 'no'}"


def _spelt_boolean(rest: list[str]) -> str:
    """The boolean word that comes next, taken from ``rest``; a switch alone is on."""
    return rest.pop() if rest and rest[-1].lower() in BOOLEANS else "yes"


def _short(word: str, vocabulary: Vocabulary) -> list[str]:
    """The long options of a cluster of short ones: ``-vn2`` is ``--verbose --num-instances=2``."""
    spelled: list[str] = []
    long = f"-{word.partition('=')[0]}"
    if long in vocabulary.names and long not in vocabulary.clusters:
        raise UsageError(_unknown(word, vocabulary))
    for position, letter in enumerate(word[1:], start=1):
        name = vocabulary.short.get(f"-{letter}")
        if name is None:
            raise UsageError(_unknown(word if position == 1 else f"-{letter}", vocabulary))
        value = word[position + 1 :]
        if name in vocabulary.valued and value:
            return [*spelled, f"{name}={value.removeprefix('=')}"]
        spelled.append(name)
    return spelled


def _complete(written: str, vocabulary: Vocabulary) -> str:
    """The one option that ``written`` is, or begins."""
    names = vocabulary.names
    if written in names:
        return written
    candidates = [name for name in names if name.startswith(written)]
    if not candidates:
        raise UsageError(_unknown(written, vocabulary))
    if len(candidates) > 1:
        raise UsageError(f"{written} is the beginning of {' and of '.join(candidates)}: write one of them")
    return candidates[0]


def _negated(name: str) -> str:
    """``--no-x`` of ``--x``, and ``--x`` of ``--no-x``."""
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else f"--no-{name.removeprefix('--')}"


def _unknown(written: str, vocabulary: Vocabulary) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake pays for it

    nearest = get_close_matches(f"--{written.lstrip('-')}", vocabulary.names, n=1, cutoff=0.7)
    cure = f"did you mean {nearest[0]}?" if nearest else f"poprun {HELP_ALL} lists the options"
    return f"there is no option {written}: {cure}"


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


LINE: Final = "line"
"""The section of the values that stay on the command line: what is printed, and what is read from files."""

REQUEST: Final = "request"
"""The section of the fields of a :class:`LaunchRequest` itself."""

VARIABLE_PREFIX: Final = "POPRUN_"

HELP: Final = "--help"
HELP_ALL: Final = "--help-all"

COMPLETION: Final = "_POPRUN_COMPLETE"
"""What a shell's script sets to ask for completions; who wants a script calls with ``bash_source`` in it."""


class Group(StrEnum):
    """The parts of the help page, in its order, which is PopRun's."""

    GENERIC = "Generic"
    CONFIGURATION = "Configuration"
    VIPU = "V-IPU"
    MPI = "MPI"
    PLACEMENT = "Placement"
    ENDING = "Ending"
    OUTPUT = "Output"
    DEBUG = "Debug"


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: Its long name without dashes.
        field: The value that it sets, as ``section.name``. Sections are ``request``, whose names are fields of
            :class:`LaunchRequest`, those of its fields that hold settings (``output``, ``ending``, ``vipu``), and
            ``line``; empty for an option that is accepted and has no effect here.
        kind: What its value may be.
        help: Its line on the help page. Defaults are named here only; the values live in ``LaunchRequest``.
        short: Its one letter, or empty.
        is_local: Whether it is given on the command line only: no file of options and no variable holds it.
        goes_with_plan: Whether it may stand beside ``--plan``.
        why_no_effect: Why it has no effect, for an option that has none.
        group: Where it stands on the help page.
    """

    name: str
    field: str
    kind: Kind
    help: str
    short: str = ""
    is_local: bool = False
    goes_with_plan: bool = False
    why_no_effect: str = ""
    group: Group = Group.GENERIC

    @property
    def parameter(self) -> str:
        """Its name as an identifier."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The variable that sets it where neither a flag does."""
        return VARIABLE_PREFIX + self.parameter.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value that somebody has given to an option.

    Attributes:
        option: Which one.
        texts: What was written, once for each time it was.
        place: Where, such as ``POPRUN_HOST`` or ``job.yaml:3``; empty for the command line.
    """

    option: Option
    texts: tuple[str, ...]
    place: str = ""

    def value(self) -> Any:  # noqa: ANN401 - whatever the option's kind makes of it
        """The value that the texts stand for.

        Raises:
            PoprunError: If they stand for none; the message says where they were written.
        """
        label = f"--{self.option.name} {' '.join(self.texts) or repr('')}"
        try:
            return self.option.kind.value(self.texts)
        except ValueError as error:
            raise UsageError(f"{self._where()}{label}: {error}") from None
        except PoprunError as error:
            raise type(error)(f"{self._where()}{error}") from None

    def shown(self) -> str:
        """The texts as one, for people."""
        return " ".join(self.texts)

    def _where(self) -> str:
        return f"{self.place}: " if self.place else ""


def grouped(group: Group, *options: Option) -> tuple[Option, ...]:
    """``options`` as those of ``group``."""
    return tuple(replace(option, group=group) for option in options)


def values_by_section(given: Iterable[Given]) -> dict[str, dict[str, Any]]:
    """The values that ``given`` sets, by section and name of their fields; of two for one field the later counts.

    Raises:
        PoprunError: If a text stands for no value.
    """
    values: dict[str, dict[str, Any]] = {}
    for one in given:
        section, _, name = one.option.field.partition(".")
        value = one.value()
        if section:
            values.setdefault(section, {})[name] = value
    return values
