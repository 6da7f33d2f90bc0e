"""Which call of MPI a process waits in, seen from outside: for programs in C and Fortran, which say nothing.

While a process waits in a system call, the kernel tells where its stack ends (proc_pid_syscall(5)). On the stack
stand the addresses to which its calls return. Those within a function of an MPI library name the call, by the
library's table of symbols (elf(5)); the outermost is the one that the program made. A wait of MPI that polls makes
no system call, and nothing is told of it but the library.

Standard library only: the agents run this in a bare interpreter.
"""

import os
import re
import struct
import time
from array import array
from bisect import bisect_right
from functools import lru_cache
from typing import Final, NamedTuple

FINALIZE: Final = "MPI_Finalize"
"""What every program of an MPI job waits in at its end, until the others are there."""

_FUNCTION: Final = re.compile(rb"P?(MPI_[A-Z][A-Za-z0-9_]*)|ompi_mpi_(init|finalize)")
"""Open MPI's own two, into which MPI_Init and MPI_Finalize jump, leave no address of theirs on the stack."""
_LIBRARY: Final = re.compile(r"/lib[a-z]*mpi[^/]*\.so[^/]*$")
_ELF_64_LITTLE: Final = b"\x7fELF\x02\x01"
_SECTIONS_AT, _SECTION_SIZES_AT = 0x28, 0x3A
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_KIND, _PLACE, _SIZE, _NAMES = 1, 4, 5, 6
_DYNAMIC_SYMBOLS: Final = 11
_MOST_STACK_BYTES: Final = 1 << 20
_WORD_BYTES: Final = 8
_TRIES, _PAUSE_SECONDS = 20, 0.001


class Mapping(NamedTuple):
    """A part of a process's memory: where it begins and ends, and the file or the name of it."""

    begin: int
    end: int
    name: str


class Function(NamedTuple):
    """A function of a library: where it begins and ends, from the library's beginning, and its name."""

    begin: int
    end: int
    name: str


def find_mpi_library(pid: int) -> str:
    """The file name of the MPI library that a process has loaded; empty without one."""
    return next((os.path.basename(path) for path in _libraries(_mappings(pid))), "")


def find_mpi_call(pid: int) -> str:
    """The call of MPI that a process's main thread waits in, such as ``MPI_Barrier``; empty when none is seen."""
    mappings = _mappings(pid)
    libraries = _libraries(mappings)
    try:
        end = _end_of_stack(pid) if libraries else 0
        return _outermost_call(_stack(pid, end, mappings), libraries) if end else ""
    except OSError:
        return ""


def _end_of_stack(pid: int) -> int:
    """Where the stack of a process ends that waits in a system call; 0 of one that does not.

    A wait that polls sleeps in between, so a process that runs is looked at a few times.
    """
    for _ in range(_TRIES):
        with open(f"/proc/{pid}/syscall") as file:
            words = file.read().split()
        if words != ["running"]:
            return int(words[-2], 16) if len(words) > 1 else 0
        time.sleep(_PAUSE_SECONDS)
    return 0


def _mappings(pid: int) -> list[Mapping]:
    """The parts of a process's memory that have a name (proc_pid_maps(5)), ascending."""
    found = []
    try:
        with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
            for line in file:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6:  # noqa: PLR2004 - with a name
                    begin, end = (int(word, 16) for word in fields[0].split("-"))
                    found.append(Mapping(begin, end, fields[5]))
    except OSError:
        return []
    return found


def _libraries(mappings: list[Mapping]) -> dict[str, Mapping]:
    """The MPI libraries among them, each from its first part to its last."""
    found: dict[str, Mapping] = {}
    for mapping in mappings:
        if _LIBRARY.search(mapping.name):
            first = found.get(mapping.name, mapping)
            found[mapping.name] = Mapping(first.begin, mapping.end, mapping.name)
    return found


def _stack(pid: int, end: int, mappings: list[Mapping]) -> "array[int]":
    """The words of the main thread's stack, from its ``end``, which lies lowest, upwards."""
    words = array("Q")
    beginning = next((part.end for part in mappings if part.begin <= end < part.end), end)
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        content = os.pread(memory, min(beginning - end, _MOST_STACK_BYTES), end)
    finally:
        os.close(memory)
    words.frombytes(content[: len(content) // _WORD_BYTES * _WORD_BYTES])
    return words


def _outermost_call(stack: "array[int]", libraries: dict[str, Mapping]) -> str:
    for address in reversed(stack):
        for path, library in libraries.items():
            if library.begin <= address < library.end:
                name = name_function(read_functions(path), address - library.begin)
                if name:
                    return name
    return ""


def name_function(functions: tuple[Function, ...], address: int) -> str:
    """The function to which a call returns at ``address``; empty when it is none of ``functions``, ascending."""
    place = bisect_right(functions, (address - 1, 1 << 64, "")) - 1
    return functions[place].name if place >= 0 and address <= functions[place].end else ""


@lru_cache(maxsize=4)
def read_functions(path: str) -> tuple[Function, ...]:
    """The functions of MPI that a library offers, ascending; none when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return tuple(sorted(_read_functions(file.fileno())))
    except (OSError, struct.error, ValueError, IndexError):
        return ()


def _read_functions(file: int) -> list[Function]:
    header = os.pread(file, 64, 0)
    if not header.startswith(_ELF_64_LITTLE):
        return []
    (place,) = struct.unpack_from("<Q", header, _SECTIONS_AT)
    size, number = struct.unpack_from("<HH", header, _SECTION_SIZES_AT)
    sections = [_SECTION.unpack(os.pread(file, _SECTION.size, place + size * index)) for index in range(number)]
    found = []
    for section in sections:
        if section[_KIND] != _DYNAMIC_SYMBOLS:
            continue
        names_at, names_size = sections[section[_NAMES]][_PLACE : _SIZE + 1]
        names = os.pread(file, names_size, names_at)
        for name_at, _, _, _, begin, num_bytes in _SYMBOL.iter_unpack(
            os.pread(file, section[_SIZE], section[_PLACE])
        ):
            name = _FUNCTION.fullmatch(names, name_at, names.index(b"\0", name_at))
            if name is not None and num_bytes:
                word = name[1] or b"MPI_" + name[2].capitalize()
                found.append(Function(begin, begin + num_bytes, word.decode()))
    return found
