"""The click command that the table of options makes: it takes PopRun's spellings and shows options in groups."""

from collections.abc import Sequence

import click

from poprun.cli.option import Option, Vocabulary, normalise

_PROGRAM = "program"


class PoprunCommand(click.Command):
    """The command of the ``poprun`` program; it knows texts only, what they mean is the table's business."""

    def __init__(self, options: Sequence[Option], *, intro: str, examples: str) -> None:
        super().__init__(
            name="poprun",
            params=[*map(_parameter, options), _program()],
            help=intro,
            epilog=examples,
            context_settings={
                "allow_interspersed_args": False,
                "help_option_names": ["-h", "--help"],
                "max_content_width": 80,
            },
        )
        self._options = options

    def texts(self, words: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
        """What ``words`` give to each option, by its name, and the program's words behind them.

        Raises:
            UsageError: If an option is unknown or misspelled, or lacks its value.
            click.exceptions.Exit: After ``--help`` has printed the page.
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
            flags=flags | {"--help"},
            short=short | {"-h": "--help"},
            clusters={"--vv": "-vv"},
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, group by group in the order in which they were declared."""
        help_option = self.get_help_option(ctx)
        page = help_option and help_option.get_help_record(ctx)
        sections: dict[str, list[tuple[str, str]]] = {self._options[0].group: [page] if page else []}
        for option in self._options:
            sections.setdefault(option.group, []).append((_usage(option), option.help))
        widest = max(len(usage) for records in sections.values() for usage, _ in records)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl([(usage.ljust(widest), text) for usage, text in records], col_max=widest)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they stand."""
        del ctx
        formatter.write(f"\n{self.epilog}")


def _parameter(option: Option) -> click.Option:
    names = [f"--{option.name}", *([f"-{option.short}"] if option.short else [])]
    if option.kind.is_counted:
        return click.Option(names, count=True)
    return click.Option(names, multiple=True, type=click.UNPROCESSED)


def _texts(value: int | Sequence[str]) -> tuple[str, ...]:
    """What click has found: the texts of a repeated option, or how often a counted one was written."""
    return (str(value),) if isinstance(value, int) else tuple(value)


def _program() -> click.Argument:
    return click.Argument(
        [_PROGRAM], nargs=-1, required=False, type=click.UNPROCESSED, metavar="PROGRAM [ARGS]..."
    )


def _usage(option: Option) -> str:
    """How the help page writes an option: ``-n, --num-instances N``, ``--[no-]dry-run``."""
    short = f"-{option.short}, " if option.short else ""
    if option.kind.is_switch:
        return f"{short}--[no-]{option.name}"
    return f"{short}--{option.name} {option.kind.metavar}".rstrip()
