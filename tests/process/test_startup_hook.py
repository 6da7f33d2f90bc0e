"""What poprun has every Python program do when it starts, seen from the program: next to nothing."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.running import Poprun, run

LOOK = """
import json, os, subprocess, sys
caught = next(line for line in open("/proc/self/status") if line.startswith("SigCgt:"))
is_listening = int(caught.split()[1], 16) >> 39 > 0
has_module = "sitecustomize" in sys.modules
print(json.dumps({"path": sys.path, "has_module": has_module, "is_listening": is_listening}))
"""
"""Signals from 40 up are nobody's but the hook's."""

FAMILY = (
    LOOK
    + """
if sys.argv[1:]:
    sys.stdout.flush()
    subprocess.run([sys.executable, sys.argv[0]], close_fds=sys.argv[1] == "close", check=True)
"""
)


def look(poprun: Poprun, *words: str, env: dict[str, str] | None = None) -> list[Any]:
    """What the program and its child, if any, have seen."""
    finished = poprun("--launcher", "local", *words, env=env).succeeded()
    return [json.loads(line) for line in finished.out.splitlines()]


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The program's file."""
    file = tmp_path / "look.py"
    file.write_text(FAMILY)
    return str(file)


@pytest.mark.parametrize("has_own", [True, False])
def test_a_program_sees_nothing_of_the_hook(
    poprun: Poprun, tmp_path: Path, program: str, *, has_own: bool
) -> None:
    """Its path and its modules are those that it has without poprun, its own ``sitecustomize`` included."""
    (tmp_path / "own").mkdir()
    if has_own:
        (tmp_path / "own" / "sitecustomize.py").write_text("print('\"mine\"', flush=True)")
    places = [str(tmp_path / "own"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(places)}

    outside = run([sys.executable, program], env=env).succeeded().out.splitlines()
    inside = look(poprun, sys.executable, program, env=env)

    assert inside[:-1] == (["mine", "mine"] if has_own else [])  # poprun is a program in Python, too
    found = inside[-1]
    assert found.pop("is_listening")
    assert found == {name: value for name, value in json.loads(outside[-1]).items() if name != "is_listening"}


def test_a_hook_of_the_users_own_that_fails_fails_as_without_us(
    poprun: Poprun, tmp_path: Path, program: str
) -> None:
    """Python says so and goes on."""
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('mine')")
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}

    inside = poprun("--launcher", "local", sys.executable, program, env=env).succeeded()

    assert inside.err == run([sys.executable, program], env=env).err * 2  # poprun says it, too
    assert json.loads(inside.out)["is_listening"]


@pytest.mark.parametrize(("option", "is_listening"), [("-u", True), ("-I", False), ("-E", False), ("-S", False)])
def test_an_isolated_python_has_no_hook(poprun: Poprun, program: str, option: str, *, is_listening: bool) -> None:
    """And runs all the same."""
    assert look(poprun, sys.executable, option, program)[0]["is_listening"] is is_listening


@pytest.mark.parametrize("descriptors", ["close", "keep"])
def test_a_helper_does_not_take_the_place_of_the_program(poprun: Poprun, program: str, descriptors: str) -> None:
    """Whether or not it inherits the descriptor of the page."""
    found = look(poprun, sys.executable, program, descriptors)

    assert [one["is_listening"] for one in found] == [True, False]


def test_the_program_behind_a_shell_is_found(poprun: Poprun, program: str) -> None:
    """The one that ran before it has ended."""
    found = look(poprun, "sh", "-c", f"{sys.executable} {program}; {sys.executable} {program}; true")

    assert [one["is_listening"] for one in found] == [True, True]
