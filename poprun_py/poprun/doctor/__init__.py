"""What poprun would use on this machine, and what is missing: `poprun --doctor`.

`symptoms` looks at the machine, `diagnosis` says what it means, `report` writes that down.
"""

from enum import StrEnum


class ReportFormat(StrEnum):
    """How the findings are written: for a person, or for a program."""

    TABLE = "table"
    JSON = "json"
