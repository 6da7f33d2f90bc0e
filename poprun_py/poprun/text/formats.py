"""The forms in which poprun prints what it was asked for: a plan, a cluster's job, its findings, its version.

They stand below the packages that write them, so that reading a command line loads none of those.
"""

from enum import StrEnum


class TopologyFormat(StrEnum):
    """How a plan is written: for a person, as PopRun writes it, for a program, or as a picture."""

    TABLE = "table"
    TEXT = "text"
    JSON = "json"
    YAML = "yaml"
    SVG = "svg"
    HTML = "html"
    MERMAID = "mermaid"


class EmitKind(StrEnum):
    """The engines of clusters for which a plan can be written."""

    MPIJOB = "mpijob"
    JOBSET = "jobset"
    SBATCH = "sbatch"


class ReportFormat(StrEnum):
    """How the findings of ``--doctor`` are written: for a person, or for a program."""

    TABLE = "table"
    JSON = "json"


class VersionFormat(StrEnum):
    """How much ``--version`` prints, and for whom."""

    TEXT = "text"
    FULL_TEXT = "full-text"
    FULL_JSON = "full-json"
