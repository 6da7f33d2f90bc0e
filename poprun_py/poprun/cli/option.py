"""One option of poprun: a row of the table in `poprun.cli.options`, from which everything else is made.

The help page, the words of the command line, the ``POPRUN_*`` variables and the keys of a file of options follow
from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from poprun.cli.kinds import Kind
from poprun.errors import PoprunError, UsageError

LINE: Final = "line"
"""The section of the values that stay on the command line: what is printed, and what is read from files."""

REQUEST: Final = "request"
"""The section of the fields of a :class:`LaunchRequest` itself."""

VARIABLE_PREFIX: Final = "POPRUN_"

COMPLETION: Final = "_POPRUN_COMPLETE"
"""What a shell's script sets to ask for completions; who wants a script calls with ``bash_source`` in it."""


class Group(StrEnum):
    """The parts of the help page, in its order, which is PopRun's."""

    GENERIC = "Generic"
    CONFIGURATION = "Configuration"
    VIPU = "V-IPU"
    MPI = "MPI"
    PLACEMENT = "Placement"
    ENDING = "Ending"
    OUTPUT = "Output"
    DEBUG = "Debug"


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: Its long name without dashes.
        field: The value that it sets, as ``section.name``. Sections are ``request``, whose names are fields of
            :class:`LaunchRequest`, those of its fields that hold settings (``output``, ``ending``, ``vipu``), and
            ``line``; empty for an option that is accepted and has no effect here.
        kind: What its value may be.
        help: Its line on the help page. Defaults are named here only; the values live in ``LaunchRequest``.
        short: Its one letter, or empty.
        is_local: Whether it is given on the command line only: no file of options and no variable holds it.
        goes_with_plan: Whether it may stand beside ``--plan``.
        why_no_effect: Why it has no effect, for an option that has none.
        group: Where it stands on the help page.
    """

    name: str
    field: str
    kind: Kind
    help: str
    short: str = ""
    is_local: bool = False
    goes_with_plan: bool = False
    why_no_effect: str = ""
    group: Group = Group.GENERIC

    @property
    def parameter(self) -> str:
        """Its name as an identifier."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The variable that sets it where neither a flag does."""
        return VARIABLE_PREFIX + self.parameter.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value that somebody has given to an option.

    Attributes:
        option: Which one.
        texts: What was written, once for each time it was.
        place: Where, such as ``POPRUN_HOST`` or ``job.yaml:3``; empty for the command line.
    """

    option: Option
    texts: tuple[str, ...]
    place: str = ""

    def value(self) -> Any:  # noqa: ANN401 - whatever the option's kind makes of it
        """The value that the texts stand for.

        Raises:
            PoprunError: If they stand for none; the message says where they were written.
        """
        label = f"--{self.option.name} {' '.join(self.texts) or repr('')}"
        try:
            return self.option.kind.value(self.texts)
        except ValueError as error:
            raise UsageError(f"{self._where()}{label}: {error}") from None
        except PoprunError as error:
            raise type(error)(f"{self._where()}{error}") from None

    def shown(self) -> str:
        """The texts as one, for people."""
        return " ".join(self.texts)

    def _where(self) -> str:
        return f"{self.place}: " if self.place else ""


def grouped(group: Group, *options: Option) -> tuple[Option, ...]:
    """``options`` as those of ``group``."""
    return tuple(replace(option, group=group) for option in options)


def values_by_section(given: Iterable[Given]) -> dict[str, dict[str, Any]]:
    """The values that ``given`` sets, by section and name of their fields; of two for one field the later counts.

    Raises:
        PoprunError: If a text stands for no value.
    """
    values: dict[str, dict[str, Any]] = {}
    for one in given:
        section, _, name = one.option.field.partition(".")
        value = one.value()
        if section:
            values.setdefault(section, {})[name] = value
    return values
