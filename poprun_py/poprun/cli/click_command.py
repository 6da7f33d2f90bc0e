"""The click command that the table of options makes: it takes PopRun's spellings and has two help pages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import click

from poprun.cli.option import BOOLEANS, HELP, HELP_ALL, Option
from poprun.errors import UsageError

_PROGRAM: Final = "program"
_HELP_ROWS: Final = (
    (f"-h, {HELP}", "Show the options that most jobs use, and exit."),
    (HELP_ALL, "Show this page and exit."),
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


class PoprunCommand(click.Command):
    """The command of the ``poprun`` program; it knows texts only, what they mean is the table's business.

    Args:
        options: The table.
        common: What the short help page says of the options that most jobs use, by their names.
        intro: What both pages say above the options.
        examples: What both say below them.
    """

    def __init__(self, options: Sequence[Option], common: Mapping[str, str], *, intro: str, examples: str) -> None:
        super().__init__(
            name="poprun",
            params=[*map(_parameter, options), _help_all(), _program()],
            help=intro,
            epilog=examples,
            context_settings={
                "allow_interspersed_args": False,
                "help_option_names": ["-h", HELP],
                "max_content_width": 80,
            },
        )
        self._options = options
        self._common = common

    def texts(self, words: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
        """What ``words`` give to each option, by its name, and the program's words behind them.

        Raises:
            UsageError: If an option is unknown or misspelled, or lacks its value.
            click.exceptions.Exit: After a help page was printed.
        """
        with self.make_context("poprun", list(words)) as ctx:
            program = tuple(ctx.params[_PROGRAM])
            given = {option.name: ctx.params[option.parameter] for option in self._options}
        return {name: _texts(value) for name, value in given.items() if value}, program

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of the command line, spelled out."""
        return super().parse_args(ctx, normalise(args, self._vocabulary()))

    def _vocabulary(self) -> Vocabulary:
        switches = frozenset(f"--{option.name}" for option in self._options if option.kind.is_switch)
        flags = frozenset(f"--{option.name}" for option in self._options if option.kind.is_counted)
        names = frozenset(f"--{option.name}" for option in self._options)
        short = {f"-{option.short}": f"--{option.name}" for option in self._options if option.short}
        return Vocabulary(
            valued=names - switches - flags,
            switches=switches,
            flags=flags | {HELP, HELP_ALL},
            short=short | {"-h": HELP},
            clusters={"--vv": "-vv"},
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that most jobs use."""
        del ctx
        by_name = {option.name: option for option in self._options}
        rows = [(_usage(by_name[name], is_brief=True), text) for name, text in self._common.items()]
        _write_sections(formatter, {"Options that most jobs use": rows})

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they stand, and where the other options are."""
        del ctx
        formatter.write(
            f"\n{self.epilog}\npoprun {HELP_ALL} shows all {len(self._options) + len(_HELP_ROWS)} options.\n"
        )

    def whole_page(self, ctx: click.Context) -> str:
        """The help page with all options, group by group in the order of the table."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        sections: dict[str, list[tuple[str, str]]] = {self._options[0].group: list(_HELP_ROWS)}
        for option in self._options:
            sections.setdefault(option.group, []).append((_usage(option), option.help))
        _write_sections(formatter, sections)
        formatter.write(f"\n{self.epilog}")
        return formatter.getvalue().rstrip("\n")


def _write_sections(formatter: click.HelpFormatter, sections: Mapping[str, Iterable[tuple[str, str]]]) -> None:
    """Write tables of options and their meaning, all with columns of the same width."""
    widest = max(len(usage) for rows in sections.values() for usage, _ in rows)
    for heading, rows in sections.items():
        with formatter.section(heading):
            formatter.write_dl([(usage.ljust(widest), text) for usage, text in rows], col_max=widest)


def _parameter(option: Option) -> click.Option:
    names = [f"--{option.name}", *([f"-{option.short}"] if option.short else [])]
    if option.kind.is_counted:
        return click.Option(names, count=True)
    return click.Option(names, multiple=True, type=click.UNPROCESSED)


def _help_all() -> click.Option:
    def show(ctx: click.Context, _option: click.Parameter, is_asked: bool) -> None:  # noqa: FBT001 - click's form
        if is_asked and isinstance(ctx.command, PoprunCommand):
            click.echo(ctx.command.whole_page(ctx))
            ctx.exit()

    return click.Option([HELP_ALL], is_flag=True, is_eager=True, expose_value=False, callback=show)


def _program() -> click.Argument:
    return click.Argument(
        [_PROGRAM], nargs=-1, required=False, type=click.UNPROCESSED, metavar="PROGRAM [ARGS]..."
    )


def _texts(value: int | Sequence[str]) -> tuple[str, ...]:
    """What click has found: the texts of a repeated option, or how often a counted one was written."""
    return (str(value),) if isinstance(value, int) else tuple(value)


def _usage(option: Option, *, is_brief: bool = False) -> str:
    """How a help page writes an option: ``-n, --num-instances N``, ``--[no-]dry-run``, briefly ``--dry-run``."""
    short = f"-{option.short}, " if option.short else ""
    if option.kind.is_switch:
        return f"{short}--{'' if is_brief else '[no-]'}{option.name}"
    return f"{short}--{option.name} {option.kind.metavar}".rstrip()
