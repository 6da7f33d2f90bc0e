"""The click command that the table of options makes: it takes PopRun's spellings and has two help pages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import click

from poprun.cli.option import HELP, HELP_ALL, Option, Vocabulary, normalise

_PROGRAM: Final = "program"
_HELP_ROWS: Final = (
    (f"-h, {HELP}", "Show the options that most jobs use, and exit."),
    (HELP_ALL, "Show this page and exit."),
)


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
