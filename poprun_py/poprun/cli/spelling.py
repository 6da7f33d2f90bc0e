"""The words of a command line: options in all spellings of PopRun's users, and the program behind them. Pure."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from poprun.cli.option import BOOLEANS, HELP, HELP_ALL, Option
from poprun.errors import UsageError


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

    The walk ends at the first word that is no option: that is the program, and every word after it is the
    program's. They are left as they are, with ``--`` before them. A boolean word directly after a switch is its
    value; for the program ``true`` one writes ``--`` before it.

    Raises:
        UsageError: If an option is unknown, its prefix ambiguous, its value missing or too much, or a switch has a
            value that is no boolean.
    """
    spelled: list[str] = []
    rest = list(reversed(words))
    while rest and rest[-1].startswith("-") and rest[-1] not in ("-", "--"):
        word = rest.pop()
        word = vocabulary.clusters.get(word, word)
        if word.startswith("--"):
            spelled.append(_long(word, rest, vocabulary))
        else:
            rest.extend(reversed(_short(word, vocabulary)))
    if rest and rest[-1] == "--":
        rest.pop()
    return [*spelled, "--", *reversed(rest)] if rest else spelled


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


def vocabulary_of(options: Iterable[Option]) -> Vocabulary:
    """The vocabulary of a command with ``options`` and the two that show its help pages."""
    options = tuple(options)
    switches = frozenset(f"--{option.name}" for option in options if option.kind.is_switch)
    flags = frozenset(f"--{option.name}" for option in options if option.kind.is_counted)
    names = frozenset(f"--{option.name}" for option in options)
    short = {f"-{option.short}": f"--{option.name}" for option in options if option.short}
    return Vocabulary(
        valued=names - switches - flags,
        switches=switches,
        flags=flags | {HELP, HELP_ALL},
        short=short | {"-h": HELP},
        clusters={"--vv": "-vv"},
    )


def texts_of(spelled: Sequence[str], flags: Container[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """What words that are spelled out give to each option, by its name without dashes, and the program's words.

    Args:
        spelled: What :func:`normalise` has made of a command line.
        flags: The options that take no value: of each, its one text is how often it was written.
    """
    end = spelled.index("--") if "--" in spelled else len(spelled)
    found: dict[str, list[str]] = {}
    for word in spelled[:end]:
        name, _, value = word.partition("=")
        found.setdefault(name, []).append(value)
    texts = {
        name.removeprefix("--"): (str(len(values)),) if name in flags else tuple(values)
        for name, values in found.items()
    }
    return texts, tuple(spelled[end + 1 :])
