"""What ``-v`` adds to the table: where options come from, the commands, the variables of the first instance."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """How a plan is going to be carried out.

    Attributes:
        command: argv of the first command that poprun starts.
        num_commands: How many such commands there are.
        origins: Name, value and origin of each option that was given, or of all.
        environment: What is added to the environment of instance 0.
    """

    command: tuple[str, ...]
    num_commands: int
    origins: tuple[tuple[str, str, str], ...]
    environment: Mapping[str, str]
