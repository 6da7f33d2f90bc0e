"""Programs as they are written, and scripts for Lightning Fabric, which are told of devices they leave open."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from poprun.errors import PoprunError, ProgramNotExecutableError, ProgramNotFoundError, UsageError
from poprun.hosts.probe.program import fabric_variables, resolve_program, script_of

NOBODY = 23456

OPEN = {"LT_DEVICES": "2", "LT_NUM_NODES": "3", "LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu"}


def variables(
    folder: Path, text: str, *, user: dict[str, str] | None = None, on_cpu: bool = True
) -> dict[str, str]:
    """What a script with this text is told in a job of three hosts with two instances each."""
    (folder / "train.py").write_text(text)
    words = ("/usr/bin/python", "-u", "train.py", "other.py")
    return fabric_variables(words, str(folder), (2, 3), user or {}, on_cpu=on_cpu)


def test_a_script_that_leaves_its_devices_open_is_told_what_fabric_run_tells(tmp_path: Path) -> None:
    """One that launches by itself must not hear that it was launched; one that names the accelerator keeps it."""
    assert variables(tmp_path, "fabric = Fabric()") == OPEN
    assert variables(tmp_path, "fabric = L.Fabric(precision=16)") == OPEN
    assert "LT_ACCELERATOR" not in variables(tmp_path, "Fabric()", on_cpu=False)
    assert "LT_ACCELERATOR" not in variables(tmp_path, "Fabric('cuda')")
    assert "LT_CLI_USED" not in variables(tmp_path, "fabric = Fabric()\nfabric.launch()")


@pytest.mark.parametrize(
    "text",
    [
        "Fabric(devices=2)",
        "Fabric('cpu', 'ddp', 2)",
        "Fabric(num_nodes=1)",
        "Fabric(**options)",
        "Fabric(",
        "import Fabric",
        "",
    ],
)
def test_a_script_that_says_what_it_wants_is_left_alone(tmp_path: Path, text: str) -> None:
    """So is one that cannot be read."""
    assert variables(tmp_path, text) == {}


def test_whoever_sets_a_variable_of_fabric_sets_them_all(tmp_path: Path) -> None:
    """And a job of one instance, or without such a file, needs none."""
    assert variables(tmp_path, "Fabric()", user={"LT_DEVICES": "1"}) == {}
    assert fabric_variables(("python", "train.py"), str(tmp_path), (1, 1), {}, on_cpu=True) == {}
    assert fabric_variables(("python", "absent.py"), str(tmp_path), (2, 1), {}, on_cpu=True) == {}


@pytest.mark.parametrize(
    ("words", "script"),
    [
        ("python train.py --lr 1", "train.py"),
        ("/usr/bin/python3.11 -u -X dev -W error train.py -", "train.py"),
        ("python -", "-"),
        ("python -u", "-"),
        ("python", "-"),
        ("python -m train", ""),
        ("python -Ic pass", ""),
        ("python --version", ""),
        ("python -s - a", "-"),
        ("bash -s a", "-"),
        ("bash run.sh", "run.sh"),
        ("python -Wignore x.py", "x.py"),
        ("python -uXdev -W ignore x.py", "x.py"),
        ("bash -o pipefail x.sh", "x.sh"),
        ("bash -eo pipefail --norc x.sh", "x.sh"),
        ("bash --rcfile a x.sh", "x.sh"),
        ("bash -lc true", ""),
        ("echo", ""),
        ("", ""),
    ],
)
def test_the_script_of_a_program(words: str, script: str) -> None:
    """Its file, or a stroke where the interpreter reads it from its input."""
    assert script_of(words.split()) == script


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (
            ("python train.py", "-v"),
            UsageError,
            "write its words without quotes around them all: poprun [OPTIONS]",
        ),
        (("FOO=1", "python", "a b.py"), UsageError, "write poprun [OPTIONS] env FOO=1 python 'a b.py'"),
    ],
)
def test_words_that_are_no_program(words: tuple[str, ...], kind: type[PoprunError], message: str) -> None:
    """What a shell would have taken apart is not looked for."""
    with pytest.raises(kind) as caught:
        resolve_program(words, "/", "/usr/bin")
    assert message in str(caught.value)


@contextmanager
def another_user() -> Iterator[None]:
    """The block runs as a user who owns nothing, where this process may become one."""
    user = os.getuid()
    os.setresuid(NOBODY, NOBODY, user) if user == 0 else None
    try:
        yield
    finally:
        os.setresuid(user, user, user)


def test_a_program_that_this_user_may_not_reach(tmp_path: Path) -> None:
    """It names the closed folder; a folder on PATH that is closed is named, too, and is no proof of a program."""
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").symlink_to(closed / "python")
    script = tmp_path / "script"
    script.write_text(f"#!{closed}/python\n")
    script.chmod(0o755)
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    closed.chmod(0)
    with another_user():
        for words, path in (
            ((str(closed / "python"),), "/usr/bin"),
            (("python",), str(tmp_path)),
            ((str(script),), "/usr/bin"),
        ):
            with pytest.raises(ProgramNotExecutableError, match=f"the folder {closed} is closed to you: have it"):
                resolve_program(words, "/", path)
        with pytest.raises(ProgramNotFoundError, match=f"in /; {closed} on it is closed to you"):
            resolve_program(("pythn",), "/", str(closed))
    closed.chmod(0o755)
