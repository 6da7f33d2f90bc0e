"""What a user sees of the programs' output, on every launcher.

Holds poprun.job.output.relay and poprun.job.output.streams.
"""

import ast
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from poprun.text.ranges import parse_numbers
from tests.running import Poprun, run
from tests.screen import rows_of

SAY = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"

MEET = """
import os, pathlib, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def meet(place):
    pathlib.Path(f"{place}-{rank}").touch()
    while not all(pathlib.Path(f"{place}-{other}").exists() for other in range(size)):
        time.sleep(0.01)
"""


def test_several_instances_are_tagged_as_poprun_does(launcher: Poprun) -> None:
    """``[<instance>]`` before each line, on the stream that it was written to."""
    finished = launcher("-n", "3", sys.executable, "-c", SAY).succeeded()

    assert finished.lines == [f"[{rank}] out {rank}" for rank in range(3)]
    told = [line for line in finished.told.splitlines() if not line.startswith(("[I] ", "[W] "))]
    assert sorted(told) == [f"[{rank}] err {rank}" for rank in range(3)]


def test_one_instance_is_left_alone(launcher: Poprun) -> None:
    """Its streams are poprun's own: nothing is added, nothing is buffered, standard input is read."""
    finished = launcher(
        sys.executable, "-c", "print(input()[::-1]); import sys; sys.stderr.write('x')", stdin="abc\n"
    )

    assert finished.succeeded().out == "cba\n"
    assert finished.err == "x"


def test_tags_can_be_asked_for_and_switched_off(launcher: Poprun) -> None:
    """In both forms of the option."""
    assert launcher("--tag-output", "echo", "a").succeeded().out == "[1,0]<stdout>:a\n"
    assert launcher("--no-tag-output", "-n", "2", "echo", "a").succeeded().out == "a\na\n"


def test_standard_input_goes_to_instance_0(launcher: Poprun) -> None:
    """The others read the end of a file at once."""
    text = "import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))"
    finished = launcher("-n", "3", "--tag-output=no", sys.executable, "-c", text, stdin="hello")

    assert finished.succeeded().lines == ["0 'hello'", "1 ''", "2 ''"]


def test_only_one_instance_may_be_heard(launcher: Poprun) -> None:
    """The others still run, and a failure among them is still reported with its last words."""
    finished = launcher("-n", "3", "--only-output-from-instance", "1", sys.executable, "-c", SAY).succeeded()
    assert finished.out == "[1] out 1\n"

    failing = launcher(
        *("-n", "2", "--only-output-from-instance", "1", sys.executable, "-c"),
        "import os, sys; sys.exit('no data' if os.environ['RANK'] == '0' else 0)",
    )
    assert failing.code == 1
    assert "  | no data" in failing.err

    printing = launcher(
        *("-n", "2", "--only-output-from-instance", "1", sys.executable, "-c"),
        "import os; os.environ['RANK'] == '1' or os.write(1, b'x' * 9999 + b' no data') and os._exit(1)",
    )
    assert re.search(r"  \| x+ … x* no data\n", printing.err)


def test_lines_stay_whole_and_none_is_lost(launcher: Poprun) -> None:
    """Four instances that write torn lines as fast as they can."""
    text = """
import os
rank = os.environ["RANK"]
for number in range(2000):
    line = f"{rank} {number} {'x' * (number % 97)} end"
    os.write(1, line[:7].encode())
    os.write(1, line[7:].encode() + b"\\n")
"""
    finished = launcher("-n", "4", sys.executable, "-c", text).succeeded()
    lines = [re.fullmatch(r"\[(\d)\] (\d+) (\d+) (x*) end", line) for line in finished.out.splitlines()]

    assert all(line is not None and line[1] == line[2] for line in lines)
    assert Counter(line[1] for line in lines if line) == dict.fromkeys("0123", 2000)


def test_bytes_that_are_no_text_pass_through(launcher: Poprun) -> None:
    """A last line without an ending gets one; nothing is decoded on the way."""
    finished = launcher("-n", "2", sys.executable, "-c", r"import os; os.write(1, b'\xff\xfe')")

    assert finished.succeeded().lines == [rf"[{rank}] \xff\xfe" for rank in range(2)]


def test_python_does_not_hold_its_output_back(launcher: Poprun) -> None:
    """A program that is killed at once has shown what it printed before."""
    finished = launcher("-n", "2", sys.executable, "-c", "import os; print('last words'); os.kill(os.getpid(), 9)")

    assert finished.code == 137
    assert "last words" in finished.out


def test_the_users_environment_arrives_unchanged(launcher: Poprun) -> None:
    """Values with line breaks, quotes and spaces too, and arguments as they were given."""
    text = "import os, sys; print(ascii(os.environ['HOSTILE']), ascii(sys.argv[1:]))"
    hostile = "two\nlines; $(echo) 'q' \"d\" ä"
    words = (sys.executable, "-c", text, "a b", "", "--n")
    finished = launcher("-n", "2", "--tag-output=no", *words, env={"HOSTILE": hostile})

    assert finished.succeeded().lines == [f"{hostile!a} ['a b', '', '--n']"] * 2


def test_programs_start_where_poprun_was_called(launcher: Poprun, tmp_path: Path) -> None:
    """The working directory is the caller's."""
    assert launcher("-n", "2", "--tag-output=no", "pwd", cwd=tmp_path).succeeded().lines == [str(tmp_path)] * 2


def test_programs_inherit_no_descriptor_that_they_do_not_need(launcher: Poprun) -> None:
    """Beside its streams instance 0 holds the socket of popdist's store; MPICH gives each its own link."""
    text = """
import os
names = ("POPDIST_STORE_DESCRIPTOR", "POPDIST_PROGRESS_DESCRIPTOR", "PMI_FD")
kept = {os.environ.get(name) for name in names} - {None}
links = {name: f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")}
others = [name for name, link in links.items() if int(name) > 2 and os.path.exists(link)]
print(sorted(set(others) - kept))
"""
    finished = launcher("-n", "2", "--tag-output=no", sys.executable, "-I", "-S", "-c", text)

    assert finished.succeeded().lines == ["[]", "[]"]


def test_the_users_variables_stand_in_no_command_line(launcher: Poprun) -> None:
    """A secret in the environment reaches the program, and no process on the way shows it in its argv."""
    text = """
import os, pathlib
pid, lines, secret = os.getpid(), [], os.environ["API_KEY"].encode()
while pid > 1:
    lines.append(pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())
    pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
print(secret, len(lines) > 3, any(secret in line for line in lines))
"""
    finished = launcher("-n", "2", "--tag-output=no", sys.executable, "-c", text, env={"API_KEY": "hunter2"})

    assert finished.succeeded().lines == ["b'hunter2' True False"] * 2


def test_a_reader_that_leaves_ends_a_job_of_one(launcher: Poprun) -> None:
    """As in any pipe: ``poprun … | head -1`` ends when head does. Larger jobs are in `tests.faults`."""
    command = launcher.command("yes")
    finished = run(["sh", "-c", '"$@" | head -1', "sh", *command])

    assert finished.succeeded().out.endswith("y\n")
    assert finished.err == ""  # a shell says nothing of it either


def on_terminal(command: list[str], cwd: Path | None = None) -> str:
    """What ``command`` writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                text += os.read(ours, 65536)
            except OSError:  # the terminal's last user has gone
                break
        process.wait()
    os.close(ours)
    return text.decode().replace("\r\n", "\n")


def test_on_a_terminal_tags_are_short_and_coloured(launcher: Poprun, monkeypatch: pytest.MonkeyPatch) -> None:
    """``[0] `` in the instance's colour, unless the user wants none."""
    command = launcher.command("-n", "2", "sh", "-c", "echo $RANK")
    assert sorted(on_terminal(command).splitlines()) == ["\x1b[33m[1]\x1b[0m 1", "\x1b[36m[0]\x1b[0m 0"]

    monkeypatch.setenv("NO_COLOR", "1")
    assert sorted(on_terminal(command).splitlines()) == ["[0] 0", "[1] 1"]


def test_a_progress_bar_stays_below_the_lines_of_others(poprun: Poprun, tmp_path: Path) -> None:
    """Each step is seen at once, and what another instance prints meanwhile is not mixed with it."""
    text = (
        MEET
        + r"""
for number in range(3):
    meet(number)
    if rank == 0:
        os.write(2, b"\r%d of 3, a bar" % number)
    meet(f"between-{number}")
    if rank == 1:
        print("line", number)
meet("end")
os.write(2, b"" if rank else b"\n")
"""
    )
    (tmp_path / "program.py").write_text(text)
    command = poprun.command("-n", "2", "--launcher=local", sys.executable, "program.py")

    assert rows_of(on_terminal(command, cwd=tmp_path)) == [
        "[1] line 0",
        "[1] line 1",
        "[1] line 2",
        "[0] 2 of 3, a bar",
    ]


def test_lines_of_several_instances_are_folded(launcher: Poprun, tmp_path: Path) -> None:
    """What they print alike at the same time is shown once, and every line of each is there, in its order."""
    text = (
        MEET
        + """
for number in range(20):
    meet(number)
    print("alike", number)
    print("own", rank)
print("end", end="")
"""
    )
    (tmp_path / "program.py").write_text(text)
    finished = launcher("-n", "3", "--fold-output", sys.executable, "program.py", cwd=tmp_path).succeeded()

    folded = [re.fullmatch(r"\[([0-9,-]+)\] (.*)", line) for line in finished.out.splitlines()]
    shown = [(parse_numbers(line[1]), line[2]) for line in folded if line]
    for rank in range(3):
        lines = [line for number in range(20) for line in (f"alike {number}", f"own {rank}")]
        assert [line for instances, line in shown if rank in instances] == [*lines, "end"]
    assert (0, 1, 2) in {instances for instances, _ in shown}


def test_a_tag_of_ones_own(poprun: Poprun) -> None:
    """The same in a pipe and on a terminal, where it is coloured; one instance has it, too."""
    words = ("--launcher=local", "--tag-format", "{host}/{replicas:>2} {stream}| ", "echo", "a")

    assert poprun("-n", "2", *words).succeeded().lines == [f"localhost/ {n} stdout| a" for n in range(2)]
    assert on_terminal(poprun.command(*words)) == "\x1b[36mlocalhost/ 0 stdout|\x1b[0m a\n"


def test_one_instance_has_the_terminal(launcher: Poprun) -> None:
    """Debuggers, progress bars and rich find a terminal on all three streams."""
    assert on_terminal(
        launcher.command(sys.executable, "-c", "import os; print([os.isatty(n) for n in range(3)])")
    ) == ("[True, True, True]\n")


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_is_an_empty_one(closed: str) -> None:
    """No descriptor of poprun's own takes its number: the program finds /dev/null there."""
    look = """
import os
print([os.readlink(f'/proc/self/fd/{n}') for n in range(3)], file=open(os.environ['SEEN'], 'w'))
"""
    command = Poprun().command("--launcher", "local", sys.executable, "-c", look)
    number = int(closed[0])
    with tempfile.NamedTemporaryFile("r") as seen:
        run(["sh", "-c", f'"$@" {closed}', "sh", *command], env={"SEEN": seen.name}).succeeded()

        assert ast.literal_eval(seen.read())[number] == "/dev/null"


def test_words_that_cannot_be_shown_are_no_traceback() -> None:
    """A full disk is told in one line, whatever was to be printed."""
    finished = run(["sh", "-c", '"$@" > /dev/full', "sh", *Poprun().command("--help")])

    assert finished.code == 73
    assert finished.told == "[E] standard output cannot be written: No space left on device\n"


def test_output_that_cannot_be_written_ends_the_job_and_is_told() -> None:
    """A full disk is not the end of a pipe's reader: the user hears what went wrong."""
    command = Poprun().command("--launcher", "local", "-n", "2", "yes")
    finished = run(["sh", "-c", '"$@" > /dev/full', "sh", *command])

    assert finished.code == 73
    assert "[E] standard output cannot be written: No space left on device" in finished.told


def test_a_full_disk_below_standard_error_is_no_end_of_the_job() -> None:
    """What poprun itself has to say is lost, and the programs go on; no traceback takes its place."""
    command = Poprun().command("--launcher", "local", "-n", "4", "--no-tag-output", "echo", "done")
    finished = run(["sh", "-c", '"$@" 2> /dev/full', "sh", *command])

    assert finished.succeeded().lines == ["done"] * 4
