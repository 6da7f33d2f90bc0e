"""poprun as a command of click: the words of a command line taken apart, and the two help pages.

click reads one word at a time, so that what PopRun's users write has its place in between: beginnings of names,
``--vv``, a boolean word behind a switch. Whatever stands behind the first word that is no option is the program's.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import click

from poprun.cli.options import BOOLEANS, COMMON, EXAMPLES, HELP_ALL, INTRO, OPTIONS, Option
from poprun.errors import UsageError

_NEXT: Final = "\0"
"""Stands for the words behind the one that click reads; no program can be given such a word."""


class _Parameter(click.Option):
    """An option of the table as an option of click; a switch has a second one for ``--no-…``."""

    def __init__(self, option: Option, *, is_negated: bool = False) -> None:
        self.option = option
        self.is_negated = is_negated
        short = [f"-{option.short}"] if option.short and not is_negated else []
        super().__init__([f"--{'no-' if is_negated else ''}{option.name}", *short], count=option.kind.is_counted)


@cache
def _command() -> click.Command:
    switches = [option for option in OPTIONS if option.kind.is_switch]
    options = [*map(_Parameter, OPTIONS), *(_Parameter(option, is_negated=True) for option in switches)]
    program = click.Argument(["program"], nargs=-1, metavar="PROGRAM [ARGS]...")
    return click.Command("poprun", params=[*options, program], help=INTRO, add_help_option=False)


@cache
def _parse() -> Callable[[list[str]], tuple[dict[str, Any], list[str], list[click.Parameter]]]:
    return _command().make_parser(click.Context(_command())).parse_args


@cache
def long_names() -> tuple[str, ...]:
    """Every long option that may be written, ``--no-…`` of the switches among them."""
    return tuple(sorted(name for one in _command().params for name in one.opts if name.startswith("--")))


def read_words(words: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Read options up to the program: the texts given to each option, by its name, and the words of the program.

    An option that takes no value has one text: how often it was written.
    """
    rest = deque(words)
    texts: dict[Option, list[str]] = {}
    while begins_with_option(rest):
        for option, text in take_options(rest):
            if text is None:
                raise UsageError(f"--{option.name} needs a value: write --{option.name}=VALUE")
            texts.setdefault(option, []).append(text)
    if rest and rest[0] == "--":
        rest.popleft()
    found = {
        option.name: (str(len(given)),) if option.kind.is_counted else tuple(given)
        for option, given in texts.items()
    }
    return found, tuple(rest)


def begins_with_option(words: Sequence[str]) -> bool:
    """Whether the first of ``words`` is an option, not the program or the ``--`` before it."""
    return bool(words) and words[0].startswith("-") and words[0] not in ("-", "--")


def take_options(words: deque[str]) -> list[tuple[Option, str | None]]:
    """Take the first word from ``words``, and its value if that is the next word; its options with their texts.

    Short options may share a word, as in ``-vn2``. The text of an option whose value is missing is None.
    """
    written, equals, value = words.popleft().partition("=")
    name = "-vv" if written == "--vv" else _whole_name(written)
    try:
        texts, _, order = _parse()([f"{name}{equals}{value}", _NEXT])
    except click.NoSuchOption as error:
        raise _unknown(written if written.startswith(error.option_name) else error.option_name) from None
    except click.BadOptionUsage:
        raise UsageError(f"{written} takes no value, and {value!r} was given: write {name}") from None
    found = []
    for parameter in order:
        if isinstance(parameter, _Parameter):
            text = "" if parameter.option.kind.is_counted else texts[str(parameter.name)]
            if not name.startswith("--"):
                text = text.removeprefix("=")
            found.append((parameter.option, _whole_text(parameter, text, words)))
    return found


def _whole_text(parameter: _Parameter, text: str, words: deque[str]) -> str | None:
    """The text of an option: ``text``, or what follows it in ``words`` where ``text`` is :data:`_NEXT`.

    A switch takes a following word only if that is a boolean. Its text is always yes or no.
    """
    if not parameter.option.kind.is_switch:
        return text if text != _NEXT else words.popleft() if words else None
    if text == _NEXT:
        text = words.popleft() if words and words[0].lower() in BOOLEANS else "yes"
    if text.lower() not in BOOLEANS:
        name = parameter.opts[0]
        raise UsageError(f"{name}={text} is neither yes nor no: write {name}=yes or {name}=no")
    return "yes" if BOOLEANS[text.lower()] != parameter.is_negated else "no"


def _whole_name(written: str) -> str:
    """The one long option that equals ``written`` or begins with it; short options are returned unchanged."""
    if not written.startswith("--"):
        if f"-{written}" in long_names():
            raise _unknown(written)
        return written
    candidates = [name for name in long_names() if name.startswith(written)]
    if written in candidates:
        return written
    if len(candidates) > 1:
        raise UsageError(f"{written} is the beginning of {' and of '.join(candidates)}: write one of them")
    if not candidates:
        raise _unknown(written)
    return candidates[0]


def _unknown(written: str) -> UsageError:
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake pays for it

    nearest = get_close_matches(f"--{written.lstrip('-')}", long_names(), n=1, cutoff=0.7)
    cure = f"did you mean {nearest[0]}?" if nearest else f"poprun {HELP_ALL} lists the options"
    return UsageError(f"there is no option {written}: {cure}")


def help_page(*, is_whole: bool) -> str:
    """The help page: of all options, or of those that most jobs use."""
    context = click.Context(_command(), info_name="poprun", max_content_width=80)
    formatter = context.make_formatter()
    context.command.format_usage(context, formatter)
    context.command.format_help_text(context, formatter)
    if is_whole:
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in OPTIONS:
            sections.setdefault(option.group, []).append((_usage(option), option.help))
        _write_sections(formatter, sections)
        end = ""
    else:
        by_name = {option.name: option for option in OPTIONS}
        rows = [
            (_usage(by_name[name]).replace("[no-]", ""), by_name[name].help.partition(" [default: ")[0])
            for name in COMMON
        ]
        _write_sections(formatter, {"Options that most jobs use": rows})
        end = f"\npoprun {HELP_ALL} shows all {len(OPTIONS)} options.\n"
    formatter.write(f"\n{EXAMPLES}{end}")
    return formatter.getvalue()


def _write_sections(formatter: click.HelpFormatter, sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Write tables of options and their meaning, all with columns of the same width."""
    widest = max(len(usage) for rows in sections.values() for usage, _ in rows)
    for heading, rows in sections.items():
        with formatter.section(heading):
            formatter.write_dl([(usage.ljust(widest), text) for usage, text in rows], col_max=widest)


def _usage(option: Option) -> str:
    """How a help page writes an option: ``-n, --num-instances N``, ``--[no-]dry-run``."""
    short = f"-{option.short}, " if option.short else ""
    negation = "[no-]" if option.kind.is_switch else ""
    return f"{short}--{negation}{option.name} {option.kind.metavar}".rstrip()
