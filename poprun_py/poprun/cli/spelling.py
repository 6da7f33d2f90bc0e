"""The spellings of an option that PopRun's users write, brought to the one that click reads.

Unique prefixes (`--num-inst 2`), booleans with a value (`--print-topology=yes`, `--print-topology yes`) or with
`no-` in front, short options and clusters of them, and `--vv`. Pure: words in, words out. The walk ends at the
first word that is no option: that is the program, and every word after it is the program's.

A boolean word directly after a switch is its value. For the program `true` or `yes`, write `--` before it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from poprun.errors import UsageError

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
        return _switch(name, value if equals else _boolean(rest), vocabulary)
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


def _boolean(rest: list[str]) -> str:
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
    cure = f"did you mean {nearest[0]}?" if nearest else "poprun --help lists the options"
    return f"there is no option {written}: {cure}"
