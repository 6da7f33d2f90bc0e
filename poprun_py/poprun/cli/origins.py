"""Where the values of options come from: a file, then ``POPRUN_*`` variables, then flags; the last wins.

Only :func:`read_config_file` touches the machine.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from poprun.cli.option import LINE, REQUEST, VARIABLE_PREFIX, Given
from poprun.cli.options import OPTIONS
from poprun.errors import UsageError
from poprun.plan.request import LaunchRequest

NOT_LOCAL: Final = {option.name: option for option in OPTIONS if not option.is_local}
"""What variables and files may hold, by name."""


def from_words(texts: Mapping[str, tuple[str, ...]]) -> Iterator[Given]:
    """The options that the command line gives ``texts``."""
    return (Given(option=option, texts=texts[option.name]) for option in OPTIONS if option.name in texts)


def from_variables(environ: Mapping[str, str]) -> Iterator[Given]:
    """The options that variables of ``environ`` give; an empty variable gives nothing."""
    for option in NOT_LOCAL.values():
        text = environ.get(option.variable)
        if text:
            yield Given(option=option, texts=(text,), place=option.variable)


def read_config_file(path: str) -> tuple[Given, ...]:
    """The options that the file at ``path`` gives.

    Raises:
        UsageError: If it cannot be read, or is no file of options; the message names the line.
    """
    from poprun.cli.config_file import read_config  # noqa: PLC0415 - yaml is expensive, and most jobs have no file

    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--import-config {path}: {getattr(error, 'strerror', None) or error}") from None
    return read_config(text, path, NOT_LOCAL)


def layered(*layers: Iterable[Given]) -> tuple[Given, ...]:
    """What holds when each of ``layers`` overrides those before it, in the order of the table.

    Of two options for one field the stronger layer's counts, and within a layer the one further down in the table.
    """
    found = {
        one.option.field or one.option.name: one for layer in layers for one in sorted(layer, key=_place_in_table)
    }
    return tuple(sorted(found.values(), key=_place_in_table))


def _place_in_table(one: Given) -> int:
    return OPTIONS.index(one.option)


def origins(given: Iterable[Given], *, with_defaults: bool) -> tuple[tuple[str, str, str], ...]:
    """Name, value and origin of every option in ``given``, or of every option that there is."""
    by_name = {one.option.name: one for one in given}
    defaults = LaunchRequest()
    rows = []
    for option in OPTIONS:
        one = by_name.get(option.name)
        section, _, name = option.field.partition(".")
        if one is not None:
            rows.append((option.name, one.shown(), one.place or "command line"))
        elif with_defaults and section and section != LINE:
            holder = defaults if section == REQUEST else getattr(defaults, section)
            rows.append((option.name, _shown(getattr(holder, name)), "default"))
    return tuple(rows)


def _shown(value: object) -> str:
    """A default as it would be written."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else "none" if value in (None, ()) else str(value)


def misspelled_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A warning for each variable that is almost an option's."""
    known = {option.variable for option in OPTIONS}
    unknown = [name for name in environ if name.startswith(VARIABLE_PREFIX) and name not in known]
    if not unknown:
        return
    from difflib import get_close_matches  # noqa: PLC0415 - hardly anybody has such a variable

    for name in unknown:
        for nearest in get_close_matches(name, known, n=1, cutoff=0.9):
            yield f"{name} sets no option: did you mean {nearest}?"
