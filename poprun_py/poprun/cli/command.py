"""A click command that takes PopRun's spellings and shows its options in groups."""

from typing import Any

import click

from poprun.cli.spelling import Vocabulary, normalise


class GroupedOption(click.Option):
    """An option that the help page shows in the group ``section``."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:  # noqa: ANN401 - click.Option's own
        super().__init__(*args, **kwargs)
        self.section = section


class Switch(GroupedOption):
    """An option that is on or off: ``--x``, ``--no-x``, ``--x=yes``, ``--x no``; None when it is not given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - click.Option's own
        super().__init__(*args, type=click.BOOL, **kwargs)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option as ``--[no-]x``."""
        record = super().get_help_record(ctx)
        return record and (f"--[no-]{self.opts[0].removeprefix('--')}", record[1])


class PoprunCommand(click.Command):
    """The command of the ``poprun`` program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of the command line.

        Raises:
            UsageError: If an option is unknown or misspelled.
        """
        return super().parse_args(ctx, normalise(args, self.vocabulary(ctx)))

    def vocabulary(self, ctx: click.Context) -> Vocabulary:
        """Every option of this command, by what may follow it."""
        options = {_long_name(param): param for param in self.get_params(ctx) if isinstance(param, click.Option)}
        switches = frozenset(name for name, option in options.items() if isinstance(option, Switch))
        flags = frozenset(name for name, option in options.items() if option.is_flag or option.count)
        return Vocabulary(
            valued=frozenset(options) - switches - flags,
            switches=switches,
            flags=flags,
            short={name: long for long, option in options.items() for name in option.opts if name != long},
            clusters={"--vv": "-vv"},
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, group by group in the order in which they were declared."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                section = param.section if isinstance(param, GroupedOption) else "Other"
                sections.setdefault(section, []).append(record)
        widest = max(len(names) for records in sections.values() for names, _ in records)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl([(names.ljust(widest), text) for names, text in records], col_max=widest)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they stand."""
        del ctx
        formatter.write(f"\n{self.epilog}")


def _long_name(option: click.Option) -> str:
    return next(name for name in option.opts if name.startswith("--"))
