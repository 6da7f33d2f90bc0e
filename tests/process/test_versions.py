"""What ``--version`` prints."""

import json
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from popdist.ground.contract import VERSION
from poprun.hosts.doctor.facts import DEPENDENCIES, version_text
from poprun.text.screen import VersionFormat

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_text_is_one_line() -> None:
    """As it has always been."""
    assert version_text(VersionFormat.TEXT, {}) == f"poprun {VERSION}\n"


def test_the_full_formats_say_the_same() -> None:
    """poprun, popdist, Python, every dependency of it and of torch's programs, and the MPI that would be used."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = (project["optional-dependencies"][name] for name in ("torch", "mpich"))
    required = {re.split(r"\W", name)[0] for name in chain(project["dependencies"], *extras)} - {"mpich"}
    versions = json.loads(version_text(VersionFormat.FULL_JSON, {}))
    lines = [line.split(maxsplit=1) for line in version_text(VersionFormat.FULL_TEXT, {}).splitlines()]

    assert sorted(DEPENDENCIES) == sorted(required)
    assert list(versions) == ["poprun", "popdist", "python", *DEPENDENCIES, "mpi"]
    assert [[name, found or "not found"] for name, found in versions.items()] == lines
    assert (versions["poprun"], versions["popdist"]) == (VERSION, VERSION)
    assert re.match(r"\d+\.\d+", versions["torch"])


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dependency that is not installed has no version, and the others have theirs."""
    monkeypatch.setattr("poprun.hosts.doctor.facts.DEPENDENCIES", ("click", "no-such-distribution"))
    versions = json.loads(version_text(VersionFormat.FULL_JSON, {}))

    assert versions["no-such-distribution"] is None
    assert versions["click"]
