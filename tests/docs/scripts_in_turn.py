"""Run scripts one after the other, each in a fork of a process that has imported what is slow to import.

``scripts_in_turn.py 'PORT SCRIPT WORD...'...``: each script finds ``MASTER_PORT`` set to its own port, so that no
process of one meets one of another.
"""

import gc
import os
import re
import runpy
import shlex
import socket
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from tests.running import Finished, Poprun

SLOW = ("accelerate", "lightning.fabric", "poptorch", "torch._dynamo")
"""The last one torch imports with the first optimizer."""


RESULT = re.compile(r"world size (?P<world_size>\d+), (test accuracy|evaluation loss) (?P<metric>[\d.]+)%?")

RANK = re.compile(r"^rank (?P<rank>\d) of 2: (?P<weights>.*)$", re.MULTILINE)


def trained(finished: Finished) -> list[float]:
    """What the scripts of other libraries tell of their models: rank 0 alone tells it, of both ranks."""
    found = [*RESULT.finditer(finished.out)]
    assert [it["world_size"] for it in found] == ["2"] * len(found)
    return [float(it["metric"]) for it in found]


def agree(finished: Finished) -> bool:
    """Whether ``examples/plain_ddp.py`` ran on both ranks, and gave them the same weights."""
    told = {it["rank"]: it["weights"] for it in RANK.finditer(finished.out)}
    return told.keys() == {"0", "1"} and told["0"] == told["1"]


def run_in_turn(
    poprun: Poprun,
    commands: Iterable[tuple[Path | str, ...]],
    *,
    program: tuple[str, ...] = ("-m", __name__),
    search: Iterable[str] = (),
    cwd: Path | None = None,
) -> Finished:
    """Run these scripts with their words in one job of two instances.

    Args:
        poprun: What starts it.
        commands: Scripts and their words.
        program: What calls :func:`main`; some do more afterwards.
        search: More places of modules.
        cwd: Where it runs.
    """
    with ExitStack() as held:
        words = []
        for command in commands:
            port = held.enter_context(socket.socket())
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("127.0.0.1", 0))
            words.append(shlex.join(map(str, (port.getsockname()[1], *command))))
        return poprun(
            *("-n", "2", "--tag-output=no", str(poprun.python), "-W", "ignore", *program, *words),
            env={"PYTHONPATH": os.pathsep.join([*search, *(path or "." for path in sys.path)])},
            cwd=cwd,
        )


def main(commands: list[str]) -> None:
    """Fork for each script and wait for its end; the first one that fails ends this program, too."""
    for name in SLOW:
        import_module(name)
    gc.freeze()  # a collection in a fork would write to every page that it shares with us
    for command in commands:
        child = os.fork()
        if not child:
            os.environ["MASTER_PORT"], *sys.argv = shlex.split(command)
            sys.path.insert(0, os.path.dirname(sys.argv[0]))  # noqa: PTH120 - as Python itself does it
            runpy.run_path(sys.argv[0], run_name="__main__")
            sys.stdout.flush()
            os._exit(0)  # torch 2.13 may abort a process that ends right after a collective
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
