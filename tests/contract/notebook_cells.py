"""Cells of a notebook that launch functions, run by nbclient as a front end would: ``python -m`` this module.

A cell is right when it raises what it should, and shows what it should. Words are the numbers of the cells to run.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.docs.markdown import ROOT, blocks
from tests.running import DEADLINE_SECONDS

SETUP = f"""
import os, signal, sys, threading, time
from functools import partial
import psutil, torch
import popdist

torch.set_num_threads(2)
_ = torch.ones(1000, 1000) @ torch.ones(1000, 1000)

def state():
    signals = [signal.getsignal(number) for number in range(1, signal.NSIG)]
    running = psutil.Process().children(recursive=True), threading.enumerate(), torch.get_num_threads()
    return dict(os.environ), os.getcwd(), sys.path[:], signals, *running

before = state()
launch = partial(popdist.launch, num_instances=2, launcher="local", timeout={DEADLINE_SECONDS:g})
"""

LIVE = """
def answered():
    print("asked", flush=True)
    while not os.path.exists("answer"):
        time.sleep(0.01)
    os.remove("answer")
    return "answered"

assert launch(answered, num_instances=1) == ["answered"]
"""

BARS = """
def count():
    from tqdm.auto import tqdm
    return sum(tqdm(range(5), desc=f"bar {popdist.instance_index()}"))

assert launch(count) == [10, 10]
"""

RAISED = """
class MyError(Exception):
    pass

def fail():
    if popdist.instance_index() == 1:
        raise MyError("mine")  # the source
    time.sleep(60)

try:
    launch(fail)
except MyError as error:
    print(error.__cause__)
"""

WAITING = """
def wait():
    print("waiting", flush=True)
    time.sleep(600)

launch(wait, num_instances=1)
"""

CLASSES = """
from dataclasses import dataclass

@dataclass
class Point:
    x: int

    def moved(self):
        return Point(self.x + popdist.instance_index())

assert launch(lambda point: point.moved(), (Point(3),)) == [Point(3), Point(4)]
"""

COUNTER = """
calls = 0
def count_up():
    global calls
    calls += 1
    return calls

assert launch(count_up) == [1, 1] and calls == 0
"""

REDIRECTED = """
import contextlib, io

with contextlib.redirect_stdout(io.StringIO()) as caught:
    launch(print, ("caught",), num_instances=1)
assert caught.getvalue() == "caught\\n"
"""

AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor() as pool:
    assert list(pool.map(lambda number: launch(pow, (number, 2)), range(3))) == [[0, 0], [1, 1], [4, 4]]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell: what it shows, the exception that it ends with, and what the front end does when it shows that."""

    source: str
    shown: str = ""
    raises: str = ""
    answer: Callable[["FrontEnd"], object] | None = None


class FrontEnd(NotebookClient):
    """Runs cells, and answers one that runs when it has shown what it should."""

    def right(self, number: int) -> bool:
        """Run the cell of this number, and say whether it did what it should."""
        self.cell, self.is_answered = CELLS[number], False
        self.nb.cells = [nbformat.v4.new_code_cell(self.cell.source)]  # type: ignore[no-untyped-call]
        (found,) = self.nb.cells
        self.execute_cell(found, 0)
        raised = next((output["ename"] for output in found["outputs"] if "ename" in output), "")
        is_right = raised == self.cell.raises and self.cell.shown in text_of(found)
        if not is_right:
            sys.stdout.write(f"cell {number}: {found}\n")
        return is_right

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        """Take what the kernel says of a cell that runs."""
        output = super().process_message(msg, cell, cell_index)
        if self.cell.answer and not self.is_answered and self.cell.shown in text_of(cell):
            self.is_answered = True
            self.answered = self.cell.answer(self)
        return output


def text_of(cell: NotebookNode) -> str:
    """What a cell has printed."""
    return "".join(output.get("text", "") for output in cell["outputs"])


def interrupt(front_end: FrontEnd) -> object:
    """Press the button that interrupts the kernel."""
    manager: Any = front_end.km
    return asyncio.ensure_future(manager.interrupt_kernel())


def create_file(_: FrontEnd) -> None:
    """Do what the cell waits for."""
    Path("answer").touch()


(EXAMPLE,) = (block.text for block in blocks(ROOT / "docs" / "launch-function.md")[:1])
CELLS = (
    Cell(source=SETUP),
    Cell(source=CLASSES),
    Cell(source=LIVE, shown="asked", answer=create_file),
    Cell(source=RAISED, shown='raise MyError("mine")  # the source'),
    Cell(source=EXAMPLE),
    Cell(source=WAITING, shown="waiting", raises="KeyboardInterrupt", answer=interrupt),
    Cell(source="assert launch(popdist.instance_index) == [0, 1]"),
    Cell(source=BARS, shown="bar 1: 100%"),
    Cell(source=COUNTER),
    Cell(source='assert launch(dict, ([("a", 1)],), {"b": 2}, num_instances=1) == [{"a": 1, "b": 2}]'),
    Cell(source="launch(lambda: os.kill(os.getpid(), signal.SIGKILL))", raises="LaunchError"),
    Cell(source="launch(print, (threading.Lock(),))", raises="LaunchError"),
    Cell(source="launch(print, num_host=2)", raises="LaunchError", shown="did you mean --host?"),
    Cell(source='os.environ["A"] = "1"; assert launch(os.getenv, ("A",)) == ["1", "1"]; del os.environ["A"]'),
    Cell(source='os.chdir("/"); assert launch(os.getcwd) == ["/", "/"]; os.chdir(before[1])'),
    Cell(source=REDIRECTED),
    Cell(
        source="popdist.init(); assert launch(popdist.num_replicas, num_replicas=4) == [4, 4]; popdist.finalize()"
    ),
    Cell(source="assert [len(value) for value in launch(bytes, (10**7,))] == [10**7, 10**7]"),
    Cell(source="assert launch(torch.arange, (3,), num_instances=1)[0].tolist() == [0, 1, 2]"),
    Cell(source=AT_ONCE),
    Cell(source="assert state() == before, (state(), before)"),
)


def main(numbers: list[int]) -> int:
    """Run these cells, or all."""
    numbers = numbers or list(range(len(CELLS)))
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        os.environ.update(JUPYTER_RUNTIME_DIR=folder, IPYTHONDIR=folder)
        front_end = FrontEnd(nbformat.v4.new_notebook(), allow_errors=True, timeout=DEADLINE_SECONDS)  # type: ignore[no-untyped-call]
        with front_end.setup_kernel():
            num_right = sum(map(front_end.right, numbers))
    sys.stdout.write(f"{num_right} of {len(numbers)} cells are right\n")
    return 0 if num_right == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
