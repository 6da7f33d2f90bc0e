"""What poprun has every Python program do when it starts, seen from the program: next to nothing.

Holds popdist.startup.sitecustomize and popdist.startup.recorder_server.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from popdist import startup
from popdist.ground.contract import PROGRESS_DESCRIPTOR
from popdist.ground.progress import PAGE_BYTES, Progress
from popdist.startup import sitecustomize, stack_signal
from poprun.observe.account.evidence import read_evidence
from tests.running import DEADLINE_SECONDS, Poprun, run

LOOK = """
import json, os, subprocess, sys
caught = next(line for line in open("/proc/self/status") if line.startswith("SigCgt:"))
is_listening = int(caught.split()[1], 16) >> 39 > 0
has_module = "sitecustomize" in sys.modules
found = {"path": sys.path, "has_module": has_module, "is_listening": is_listening}
try:
    import examples_utils
except ImportError:
    examples_utils = None
print(json.dumps({**found, "is_served": examples_utils is not None}))
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
    """Its path and its modules are those that it has without poprun, its own ``sitecustomize`` included.

    But for what programs for PopTorch import, which is there before popdist is imported.
    """
    (tmp_path / "own").mkdir()
    if has_own:
        (tmp_path / "own" / "sitecustomize.py").write_text("print('\"mine\"', flush=True)")
    places = [str(tmp_path / "own"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(places)}

    outside = run([sys.executable, program], env=env).succeeded().out.splitlines()
    inside = look(poprun, sys.executable, program, env=env)

    assert inside[:-1] == (["mine", "mine"] if has_own else [])  # poprun is a program in Python, too
    found = inside[-1]
    assert found["is_listening"]
    assert found["is_served"]
    assert found == {**json.loads(outside[-1]), "is_listening": True, "is_served": True}
    assert not json.loads(outside[-1])["is_served"]


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
    (found,) = look(poprun, sys.executable, option, program)
    assert (found["is_listening"], found["is_served"]) == (is_listening, is_listening)


@pytest.mark.parametrize("descriptors", ["close", "keep"])
def test_a_helper_does_not_take_the_place_of_the_program(poprun: Poprun, program: str, descriptors: str) -> None:
    """Whether or not it inherits the descriptor of the page."""
    found = look(poprun, sys.executable, program, descriptors)

    assert [one["is_listening"] for one in found] == [True, False]


def test_the_program_behind_a_shell_is_found(poprun: Poprun, program: str) -> None:
    """The one that ran before it has ended."""
    found = look(poprun, "sh", "-c", f"{sys.executable} {program}; {sys.executable} {program}; true")

    assert [one["is_listening"] for one in found] == [True, True]


MPI = """
import os

def Is_initialized(): return True
def Is_finalized(): return False

class Finalizer:
    def __del__(self, write=os.write): write(1, b"finalized\\n")

finalizer = Finalizer()
"""
"""As much of mpi4py as the hook asks; it says when the interpreter takes it apart, where mpi4py finalizes."""

ENDING = """
import atexit, sys, threading, time
import mpi4py.MPI
atexit.register(lambda: print("saved"))
"""

FAILING = {
    "sys.exit(7)": 7,
    "raise SystemExit(7)": 7,
    "sys.exit('text')": 1,
    "sys.exit((1, 2))": 1,
    "sys.exit(SystemExit(6))": 6,
    "sys.exit(-1)": 255,
    "sys.exit(2**100)": 255,
    "sys.exit(True)": 1,
    "sys.exit(256)": 0,
    "raise KeyboardInterrupt": -2,
    "raise BaseException('all')": 1,
    "raise GeneratorExit": 1,
    "1 / 0": 1,
    "sys.excepthook = lambda *_: sys.exit(9)\n1 / 0": 9,
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nsys.exit(7)": 7,
    "try: sys.exit(7)\nfinally: print('at last')": 7,
    "try: 1 / 0\nexcept ZeroDivisionError as error: raise SystemExit(3) from error": 3,
    "error = SystemExit(1)\nerror.code = 4\nraise error": 4,
    "class Own(SystemExit): pass\nraise Own(5)": 5,
}
"""How a program ends after MPI_Init, and its exit code; it fails, so nobody is waited for."""

ENDING_WELL = (
    "",
    "sys.exit()",
    "sys.exit(0)",
    "sys.exit(False)",
    "raise SystemExit",
    "error = SystemExit(5)\ndel error.code\nraise error",
    "try: sys.exit(7)\nexcept SystemExit as error: print(error.code, error.args)",
    "try: raise SystemExit(7)\nexcept SystemExit as error: assert error.code == 7\nsys.exit(0)",
    "thread = threading.Thread(target=sys.exit, args=(5,))\nthread.start()\nthread.join()",
    "import os\nif os.fork() == 0: sys.exit(7)\nprint(os.wait()[1])",
    "assert SystemExit.code.__name__ == 'code'\nassert sys.exit.__name__ == 'exit'",
)


def run_with_page(
    folder: Path, *, is_watched: bool = True, **added: str
) -> tuple[subprocess.CompletedProcess[str], bytes]:
    """Run ``program.py`` with a page of progress, with the hook or without; and what stands in the page's file."""
    page = os.memfd_create(stack_signal.PAGE_NAME)
    os.ftruncate(page, PAGE_BYTES)
    places = [*startup.__path__, str(folder)] if is_watched else [str(folder)]
    finished = subprocess.run(
        [sys.executable, "program.py"],
        env=os.environ | {PROGRESS_DESCRIPTOR: str(page), "PYTHONPATH": os.pathsep.join(places)} | added,
        cwd=folder,
        pass_fds=[page],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )
    written = os.pread(page, os.fstat(page).st_size, 0)
    os.close(page)
    return finished, written


def end(folder: Path, text: str, *, is_watched: bool) -> tuple[int, str, str, Progress | None]:
    """How a program ends, with the hook of a job under MPI or without: code, output, errors, its page."""
    (folder / "mpi4py").mkdir(exist_ok=True)
    (folder / "mpi4py" / "__init__.py").touch()
    (folder / "mpi4py" / "MPI.py").write_text(MPI)
    (folder / "program.py").write_text(ENDING + text)
    added = {"PMI_RANK": "1"} if is_watched else {}
    finished, written = run_with_page(folder, is_watched=is_watched, **added)
    return finished.returncode, finished.stdout, finished.stderr, Progress.read(written[:PAGE_BYTES])


@pytest.mark.parametrize(("text", "code"), FAILING.items())
def test_a_program_that_fails_ends_as_without_the_hook_before_it_finalizes(
    tmp_path: Path, text: str, code: int
) -> None:
    """Its threads and what it does at exit come first; its code and all that it prints are Python's."""
    code_here, out, err, page = end(tmp_path, text, is_watched=True)
    plain_code, plain_out, plain_err, _ = end(tmp_path, text, is_watched=False)

    assert (code_here, out, err) == (plain_code, plain_out.removesuffix("finalized\n"), plain_err)
    assert plain_code == code
    assert plain_out.endswith("saved\nfinalized\n")
    assert page is not None
    assert page.collective == ""


@pytest.mark.parametrize("text", ENDING_WELL)
def test_a_program_that_ends_well_says_that_it_finalizes(tmp_path: Path, text: str) -> None:
    """So does one that caught its exit, and one whose thread or child exits."""
    code, out, err, page = end(tmp_path, text, is_watched=True)

    assert (code, out, err) == end(tmp_path, text, is_watched=False)[:3]
    assert code == 0
    assert out.endswith("saved\nfinalized\n")
    assert page is not None
    assert (page.collective, page.num_waits, page.has_joined) == ("MPI_Finalize", 1, False)
    assert page.waiting_since_seconds is not None


def test_a_program_of_an_mpi_job_that_fails_leaves_what_it_has_recorded(tmp_path: Path) -> None:
    """It is written before the program ends at once."""
    end(tmp_path, "sys.exit(7)", is_watched=True)
    asked = json.dumps({"file": str(tmp_path / "instance-0"), "steps": [5, 10], "seconds": None})
    finished, _ = run_with_page(tmp_path, PMI_RANK="1", POPDIST_TRACE=asked)

    assert finished.returncode == 7
    assert "it ended after 0 optimizer steps" in (tmp_path / "instance-0.about").read_text()


def test_the_hook_of_a_job_without_mpi_leaves_exits_alone(poprun: Poprun) -> None:
    """Nothing waits there."""
    program = "import sys; print(type(sys.exit).__name__, type(vars(SystemExit)['code']).__name__)"

    finished = poprun("--launcher", "local", sys.executable, "-c", program)

    assert finished.succeeded().out.endswith("builtin_function_or_method member_descriptor\n")


TRAINS = """
import sys, types
class Optimizer:
    def step(self): pass
class Adam(Optimizer):
    def step(self): pass
Adam.step.hooked = True
optim = types.ModuleType("torch.optim")
optim.Optimizer = Optimizer
sys.modules.update({"torch": types.ModuleType("torch"), "torch.optim": optim})
if "joins" in sys.argv:
    import popdist
    popdist.num_replicas()
"""
"""A program that has trained, as far as its modules show; torch itself would take seconds."""


def test_a_crash_is_written_behind_the_page_and_nowhere_else(tmp_path: Path) -> None:
    """Where the program has said nothing of faulthandler; its exit and its output are its own."""
    code, _, err, _ = end(tmp_path, "import ctypes\nctypes.string_at(0)", is_watched=False)
    watched, written = run_with_page(tmp_path)
    event = {"crash": written[PAGE_BYTES:].decode()}
    (frames,) = read_evidence(event).crash.threads

    assert (watched.returncode, watched.stderr) == (code, err) == (-11, "")
    assert (Path(frames[0].file).name, frames[-1].function) == ("program.py", "string_at")


def test_processes_that_trained_alone_are_told_of_at_the_end(poprun: Poprun) -> None:
    """One line, in a job of several instances, none of which was connected: asking popdist connects none."""
    words = (sys.executable, "-c", TRAINS)
    lone, asked = (poprun("--launcher", "local", "-n", "2", *words, *more) for more in ((), ("joins",)))
    single = poprun("--launcher", "local", *words)
    without_torch = "import sys; sys.modules['tensorflow'] = sys"
    tensorflow = poprun("--launcher", "local", "-n", "2", sys.executable, "-c", without_torch)

    finished = (lone, asked, tensorflow)

    assert [it.succeeded().told.count("2 processes trained alone") for it in finished] == [1, 1, 1]
    assert "trained alone" not in single.succeeded().told


def test_processes_that_train_alone_are_told_of_while_they_train(poprun: Poprun, tmp_path: Path) -> None:
    """After ten steps of an optimizer, and not again at the end; whoever has joined the others is left alone."""
    text = """
import os, sys, time
import torch
if "joins" in sys.argv:
    torch.distributed.init_process_group("gloo")
optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
for _ in range(10):
    optimizer.step()
while "joins" not in sys.argv and not os.path.exists(sys.argv[1]): time.sleep(0.05)
"""
    words = ("--launcher=local", "-n2", sys.executable, "-c", text)
    go_on = tmp_path / "go-on"
    with poprun.started(*words, str(go_on)) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "trained alone" in line)
        go_on.touch()
        _, err = process.communicate(timeout=DEADLINE_SECONDS)

    assert "2 processes trained alone" in said
    assert (process.returncode, "alone" in err) == (0, False)
    assert "alone" not in poprun(*words, "joins").succeeded().told


LOOKS = """
import os, sys, threading
import torch
import popdist
popdist.init()
total = popdist.all_reduce(torch.tensor(float(popdist.instance_index() + 1)))
names = ("PYTHONPATH", "POPDIST_PROGRESS_DESCRIPTOR", "TORCH_FR_BUFFER_SIZE")
finders = [type(each).__name__ for each in sys.meta_path if type(each).__module__.startswith("popdist")]
threads = [each.name for each in threading.enumerate() if each.name.startswith("poprun")]
print(float(total), [name in os.environ for name in names], finders, threads)
sys.exit(7 if popdist.instance_index() else 0)
"""


def test_nothing_of_poprun_runs_in_a_program_that_is_not_watched(poprun: Poprun) -> None:
    """Output, the exit code and popdist's collectives are the same; what needs watching is refused by name."""
    words = ("--launcher=local", "-n2", "--no-watching")
    program = (sys.executable, "-c", LOOKS)
    finished = poprun(*words, *program, env={"PYTHONPATH": ""})
    refused = poprun(*words, "--hang-timeout=5", *program)

    assert finished.lines == [f"[{index}] 3.0 [True, False, False] [] []" for index in range(2)]
    assert finished.code == 7
    assert "instance 1 failed first: exit code 7" in finished.err
    assert refused.code == 2
    assert "--hang-timeout needs what --no-watching leaves out: give one of the two" in refused.err


RECORDS = """
import os, sys, time
before = set(os.listdir(os.environ["TMPDIR"]))
import torch, torch.distributed as dist
from popdist.ground.progress import Progress
from poprun.launch.recorder import RecorderQuestion

if os.fork() == 0:
    sys.exit(5)  # takes down what it has inherited of the server, as far as Python knows of it
print(os.waitstatus_to_exitcode(os.wait()[1]), set(os.listdir(os.environ["TMPDIR"])) - before)
page = int(os.environ["POPDIST_PROGRESS_DESCRIPTOR"])
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
question = RecorderQuestion(os.getpid(), Progress.read(os.pread(page, 4096, 0)).recorder)
while (answer := question.answer()) is None:
    time.sleep(0.001)
print([call["name"] for group in answer["groups"] for call in group["calls"]])
print("TORCH_WORKER_SERVER_SOCKET" in os.environ, file=sys.stderr)
raise ValueError("bad batch")
"""


def test_torchs_recorder_answers_and_is_left_behind_by_a_failure(tmp_path: Path) -> None:
    """A forked child does not end the server, which says nothing by itself and leaves no file."""
    (tmp_path / "program.py").write_text(RECORDS)
    finished, written = run_with_page(tmp_path, WORLD_SIZE="2", TMPDIR=str(tmp_path))
    record = json.loads(written[PAGE_BYTES:])

    assert finished.stdout == "5 set()\n['gloo:all_reduce']\n"
    assert (finished.returncode, "WorkerServer" in finished.stderr) == (1, False)
    assert finished.stderr.startswith("False\n")
    assert [call["profiling_name"] for call in record["entries"]] == ["gloo:all_reduce"]
    assert [place.name for place in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.parametrize("caches", [("_clear_internal_caches", "_clear_type_cache"), ()])
def test_exit_codes_are_watched_where_the_interpreter_lets_itself(
    monkeypatch: pytest.MonkeyPatch, caches: tuple[str, ...]
) -> None:
    """An interpreter that keeps its types in another way is left alone."""
    for name in {"_clear_internal_caches", "_clear_type_cache"} - set(caches):
        monkeypatch.delattr(sys, name, raising=False)
    original = SystemExit.__dict__["code"]
    ending = sitecustomize.ExitCode()

    ending.begin()
    placed, code = SystemExit.__dict__["code"], SystemExit(7).code
    ending.end()

    assert (placed is ending) == bool(caches)
    assert code == 7
    assert SystemExit.__dict__["code"] is original
