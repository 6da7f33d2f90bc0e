"""What the values of options may be, beyond what click knows."""

from typing import Final

import click

from poprun.errors import UsageError
from poprun.ranges import parse_numbers

AUTO: Final = "auto"
OFF: Final = "off"


class InstanceCount(click.ParamType[int | None]):
    """A whole number, or ``auto``, which becomes None."""

    name = "count"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """The number that ``value`` is.

        Raises:
            UsageError: If it is neither a whole number nor ``auto``.
        """
        del param, ctx
        if value == AUTO:
            return None
        try:
            return int(str(value))
        except ValueError:
            raise UsageError(
                f"--num-instances {_shown(value)}: give a whole number, or auto for one per free GPU"
            ) from None


class WholeNumber(click.ParamType[int]):
    """A whole number."""

    name = "integer"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number that ``value`` is.

        Raises:
            UsageError: If it is none.
        """
        del ctx
        try:
            return int(str(value))
        except ValueError:
            raise UsageError(f"{_name(param)} {_shown(value)}: give a whole number") from None


class Seconds(click.ParamType[float]):
    """A number of seconds."""

    name = "seconds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number that ``value`` is.

        Raises:
            UsageError: If it is none.
        """
        del ctx
        try:
            return float(str(value))
        except ValueError:
            raise UsageError(f"{_name(param)} {_shown(value)}: give a number of seconds, such as 90") from None


class OneOf(click.Choice[str]):
    """One of a few words."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word that ``value`` is.

        Raises:
            UsageError: If it is none of them.
        """
        del ctx
        if value not in self.choices:
            raise UsageError(f"{_name(param)} {_shown(value)}: give one of {', '.join(self.choices)}")
        return value


class InstanceList(click.ParamType[tuple[int, ...]]):
    """Instances in range notation, such as ``0,4-7``."""

    name = "instances"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers that ``value`` lists.

        Raises:
            UsageError: If it is no list of ascending numbers.
        """
        del ctx
        try:
            numbers = parse_numbers(str(value))
        except ValueError as error:
            raise UsageError(f"{_name(param)} {value}: {error}") from None
        if not numbers:
            raise UsageError(f"{_name(param)} names no instance: give one or more, such as 0,4-7")
        return numbers


class SecondsOrOff(click.ParamType[float | None]):
    """A number of seconds, or ``off``, which becomes None."""

    name = "seconds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        """The number that ``value`` is.

        Raises:
            UsageError: If it is neither a number nor ``off``.
        """
        del ctx
        if value == OFF:
            return None
        try:
            return float(str(value))
        except ValueError:
            raise UsageError(f"{_name(param)} {_shown(value)}: give a number of seconds, or off") from None


def _shown(value: object) -> str:
    return str(value) or "''"


def _name(param: click.Parameter | None) -> str:
    return "" if param is None else param.opts[0]
