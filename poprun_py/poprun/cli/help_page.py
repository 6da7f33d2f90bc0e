"""The help pages of poprun, made from the table of options."""

from collections.abc import Mapping, Sequence

import click

from poprun.cli.options import COMMON, EXAMPLES, HELP_ALL, INTRO, OPTIONS, Option


def help_page(*, is_whole: bool) -> str:
    """Return the help page: with all options if ``is_whole``, otherwise with the options that most jobs use."""
    program = click.Argument(["program"], nargs=-1, metavar="PROGRAM [ARGS]...")
    command = click.Command("poprun", params=[program], help=INTRO, add_help_option=False)
    context = click.Context(command, info_name="poprun", max_content_width=80)
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
    """Write to ``formatter`` one table of options per section; the columns of all tables have the same width."""
    widest = max(len(usage) for rows in sections.values() for usage, _ in rows)
    for heading, rows in sections.items():
        with formatter.section(heading):
            formatter.write_dl([(usage.ljust(widest), text) for usage, text in rows], col_max=widest)


def _usage(option: Option) -> str:
    """Return an option as a help page shows it, such as ``-n, --num-instances N`` or ``--[no-]dry-run``."""
    short = f"-{option.short}, " if option.short else ""
    negation = "[no-]" if option.kind.is_switch else ""
    return f"{short}--{negation}{option.name} {option.kind.metavar}".rstrip()
