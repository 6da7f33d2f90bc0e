"""The template of what stands before each line of output: ``--tag-format``. Pure.

It is the field notation of Python's ``str.format``, less what a tag has no use for: a field is a name and at most
a width, such as ``{instance:>3}``, and ``{{`` and ``}}`` stand for braces.
"""

import re
from collections.abc import Mapping
from typing import Final

from poprun.errors import PlanError

TAG_FIELDS: Final = ("instance", "local_instance", "host", "replicas", "stream")
"""What a template may name."""

PIPE_TAG: Final = "[1,{instance}]<{stream}>:"
"""PopRun's own tag, which tools read."""

TERMINAL_TAG: Final = "[{instance}] "
"""The short one, for people."""

_PIECE: Final = re.compile(r"\{\{|\}\}|\{(?P<name>[a-z_]*)(?::(?P<width>[<>^]?[1-9][0-9]?))?\}|(?P<brace>[{}])")


def check_tag_format(template: str) -> None:
    """See that ``template`` can be filled.

    Raises:
        PlanError: If it names what there is not, or a brace has no partner.
    """
    fields = ", ".join(f"{{{name}}}" for name in TAG_FIELDS)
    for piece in _PIECE.finditer(template):
        if piece["brace"]:
            raise PlanError(
                f"--tag-format {template!r}: there is no field at {template[piece.start() :]!r}; there are "
                f"{fields}, each with a width if you like, such as {{instance:>3}}, and {{{{ }}}} for braces"
            )
        if piece["name"] is not None and piece["name"] not in TAG_FIELDS:
            raise PlanError(f"--tag-format {template!r}: there is no {piece[0]}; there are {fields}")


def fill_tag(template: str, values: Mapping[str, str]) -> str:
    """``template``, which has been checked, with a value for every one of ``TAG_FIELDS``."""
    return template.format_map(values)
