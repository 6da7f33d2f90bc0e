"""Programs that end badly, for the tests of endings: one short Python text each, without any package.

Every program first starts a grandchild in a session of its own, as a careless data loader would; whoever ends the
job has to find it. The programs run under other launchers too, so that their endings can be compared.
"""

from pathlib import Path

_PRELUDE = """
import contextlib, os, signal, subprocess, sys, threading, time

def number(*names):
    return int(next(os.environ[name] for name in names if name in os.environ))

rank = number("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
size = number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
meeting = sys.argv[1]
subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

def memory():
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[5] for line in maps if "/dev/shm/" in line and "(deleted)" not in line})

def note(word):
    hidden = os.path.join(meeting, f".{word}-{rank}")
    with open(hidden, "w") as file:
        file.write(" ".join((str(time.monotonic()), str(os.getpid()), *memory())))
    os.rename(hidden, os.path.join(meeting, f"{word}-{rank}"))

def wait_for(word, number):
    while sum(name.startswith(f"{word}-") for name in os.listdir(meeting)) < number:
        time.sleep(0.01)

def ready():
    note("ready")
    wait_for("ready", size)

def hang():
    while True:
        time.sleep(600)
"""


def write_program(folder: Path, text: str) -> list[str]:
    """Write a program that ends as ``text`` says; its words are the interpreter's to start.

    The text may call ``note(word)``, ``wait_for(word, number)``, ``ready()``, which waits for the others, and
    ``hang()``; it knows ``rank``, ``size`` and ``meeting``, the folder of the notes.
    """
    meeting = folder / "meeting"
    meeting.mkdir(exist_ok=True)
    program = folder / "program.py"
    program.write_text(_PRELUDE + text)
    return [str(program), str(meeting)]


def num_notes(folder: Path, word: str) -> int:
    """How many instances have left the note ``word``."""
    return len(list((folder / "meeting").glob(f"{word}-*")))


def last_note_seconds(folder: Path, word: str) -> float | None:
    """Monotonic time of the last note ``word``, or None when there is none."""
    notes = (folder / "meeting").glob(f"{word}-*")
    return max((float(note.read_text().split()[0]) for note in notes), default=None)


def mapped_files(folder: Path) -> set[Path]:
    """The files in shared memory that some instance had mapped when it left a note."""
    notes = [file for file in (folder / "meeting").iterdir() if not file.name.startswith(".")]
    return {Path(word) for note in notes for word in note.read_text().split()[2:]}


def has_met(folder: Path, num_instances: int) -> bool:
    """Whether every instance has come as far as its call of ``ready()``."""
    return num_notes(folder, "ready") == num_instances
