"""The table of all options of poprun. To add one: a row here, and a field for it where its value is used."""

from typing import Final

from poprun.cli.option import Option
from poprun.cli.options.asked import CONFIGURATION, GENERIC
from poprun.cli.options.shown import DEBUG, ENDING, OUTPUT
from poprun.cli.options.started import MPI, PLACEMENT
from poprun.cli.options.vipu import VIPU

OPTIONS: Final[tuple[Option, ...]] = (
    *GENERIC,
    *CONFIGURATION,
    *VIPU,
    *MPI,
    *PLACEMENT,
    *ENDING,
    *OUTPUT,
    *DEBUG,
)
"""Every option but ``--help``, in the order of the help page."""

BY_NAME: Final = {option.name: option for option in OPTIONS}

EXAMPLES: Final = """\
Examples:
  poprun --num-instances 2 --num-replicas 4 python train.py --epochs 3
  poprun -H 'node[0-3]' -n 8 --num-replicas 16 --dry-run python train.py
"""
