"""The two help pages of poprun, which click formats."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import click

from poprun.cli.option import HELP, HELP_ALL, Option
from poprun.cli.options import COMMON, EXAMPLES, INTRO, OPTIONS

_HELP_ROWS: Final = (
    (f"-h, {HELP}", "Show the options that most jobs use, and exit."),
    (HELP_ALL, "Show this page and exit."),
)


def help_page(name: str) -> str:
    """The page that the option ``name`` shows, ``--help`` or ``--help-all``, for a terminal of any width."""
    command = _HelpPages(OPTIONS, COMMON)
    context = click.Context(command, info_name="poprun", max_content_width=80)
    return f"{command.whole_page(context) if name == HELP_ALL else command.get_help(context)}\n"


class _HelpPages(click.Command):
    """The command as click knows it: what it is for, and its words; poprun reads them by itself.

    Args:
        options: The table.
        common: What the short page says of the options that most jobs use, by their names.
    """

    def __init__(self, options: Sequence[Option], common: Mapping[str, str]) -> None:
        program = click.Argument(["program"], nargs=-1, required=False, metavar="PROGRAM [ARGS]...")
        super().__init__(name="poprun", params=[program], help=INTRO, epilog=EXAMPLES)
        self._options = options
        self._common = common

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


def _usage(option: Option, *, is_brief: bool = False) -> str:
    """How a help page writes an option: ``-n, --num-instances N``, ``--[no-]dry-run``, briefly ``--dry-run``."""
    short = f"-{option.short}, " if option.short else ""
    if option.kind.is_switch:
        return f"{short}--{'' if is_brief else '[no-]'}{option.name}"
    return f"{short}--{option.name} {option.kind.metavar}".rstrip()
