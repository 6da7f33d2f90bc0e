"""Files that a user names are read within bounds, and whatever is beyond them is an error at once."""

import io
import os
import sys
from pathlib import Path

import pytest

from poprun.cli.command_line import NOT_LOCAL
from poprun.cli.config_file import read_config
from poprun.errors import PlanError, UsageError
from poprun.plan.plan_file import read_plan
from poprun.plan.pods import read_pod
from poprun.text.input_files import MAX_BYTES, MAX_DEPTH, parse_json, parse_yaml, read_text
from poprun.text.ranges import read_host_file

LAUGHS = "\n".join(
    [
        'a0: &a0 "ha"',
        *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)),
        "num-replicas: *a39",
    ]
)


def nested(depth: int) -> str:
    """Lists that stand so deep in each other, in JSON and in YAML."""
    return "[" * depth + "]" * depth


def in_mappings(depth: int) -> str:
    """Mappings that stand so deep in each other, with a number inside."""
    return '{"a": ' * depth + "1" + "}" * depth


def test_what_is_longer_than_any_such_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read to its end, which may never come; the longest that may be is read."""
    with pytest.raises(UsageError, match=r"^--plan /dev/zero: longer than 4 MB"):
        read_text("/dev/zero", "--plan")
    (tmp_path / "long").write_text("é" * (MAX_BYTES // 2))
    assert len(read_text(str(tmp_path / "long"), "")) == MAX_BYTES // 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" " * (MAX_BYTES + 1))))
    with pytest.raises(UsageError, match="longer than 4 MB"):
        read_text("-", "")
    with pytest.raises(UsageError, match=r"--hostfile /dev/zero: longer than 4 MB"):
        read_host_file("/dev/zero")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n: " + "1" * 10_000, "a number has thousands of digits"),
        ("n: " + "1" * 1_000_000, "longer than 1 MB, which no such file is"),
        ("{" + '"n": ' + "1" * 10_000 + "}", "a number has thousands of digits"),
    ],
)
def test_a_number_of_many_digits(text: str, message: str) -> None:
    """In plain words, and at once: YAML is read slowly."""
    for read in (parse_json if text.startswith("{") else parse_yaml, lambda text: read_plan(text, "plan")):
        with pytest.raises((ValueError, PlanError), match=message):
            read(text)


def test_a_pipe_is_read(tmp_path: Path) -> None:
    """As a shell makes it of <(...)."""
    reader, writer = os.pipe()
    os.write(writer, b"host: a\n")
    os.close(writer)
    assert read_text(f"/dev/fd/{reader}", "") == "host: a\n"
    os.close(reader)


@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
def test_how_deep_values_stand_in_each_other(parse: type) -> None:
    """Up to a bound they are read; beyond it, however far, the error says so."""
    for make in (nested, in_mappings):
        assert parse(make(MAX_DEPTH)) is not None
        for depth in (MAX_DEPTH + 1, 900, 100_000):
            with pytest.raises(ValueError, match="more than 32 lists and mappings in each other"):
                parse(make(depth))


@pytest.mark.parametrize("text", [LAUGHS, '{"version": ' + nested(500) + "}", "version: " + nested(500)])
def test_files_that_stand_for_more_than_there_is_memory(text: str) -> None:
    """A plan, a pod and a file of options: one line that says what is wrong."""
    what = "more than 32 lists and mappings in each other|the alias [*]a0, which is not read here"
    with pytest.raises(PlanError, match=what):
        read_plan(text, "plan.yaml")
    with pytest.raises(PlanError, match=what):
        read_pod(text, "pod.yaml")
    with pytest.raises(UsageError, match=what):
        read_config(text, "job.yaml", NOT_LOCAL)
