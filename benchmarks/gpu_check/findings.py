"""What the process of a part finds, written to a file as it is found: so it is there if the part does not end."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpu_check.outcomes import Found, Requirement


class Findings:
    """Collects what must hold, figures, and what was left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = Found()

    def require(self, what: str, holds: object, found: object = "") -> None:
        """Record whether ``what`` holds, and what was found."""
        added = Requirement(what=what, holds=bool(holds), found=str(found))
        self._write(replace(self._found, requirements=(*self._found.requirements, added)))

    def measure(self, **figures: Any) -> None:
        """Record figures by name; an underscore in a name stands for a blank."""
        named = {name.replace("_", " "): value for name, value in figures.items()}
        self._write(replace(self._found, figures={**self._found.figures, **named}))

    def skip(self, what: str) -> None:
        """Record that something was left out, and why."""
        self._write(replace(self._found, skipped=(*self._found.skipped, what)))

    def _write(self, found: Found) -> None:
        self._found = found
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(asdict(found)), encoding="utf-8")
        written.replace(self._path)
