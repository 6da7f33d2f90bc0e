"""poprun as a child process, which prints as Python prints, and ends if this process is interrupted or dies.

The standard output of a notebook is an object without a file descriptor. So the output of poprun is read from a
pipe, and written to this object.
"""

import codecs
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

_STARTER: Final = Path(__file__).with_name("start_poprun.py")
_READ_BYTES: Final = 64 * 1024

_Sinks = Mapping[int, tuple[codecs.IncrementalDecoder, TextIO]]
"""For each pipe of poprun, by descriptor, the decoder of its bytes and the stream to which text is written."""


def run_poprun(words: Sequence[str]) -> int:
    """Run poprun with the arguments ``words``, and return its exit code; an interrupt stops the job. poprun has
    its own process group, because Ctrl-C reaches a whole group and would interrupt poprun twice.
    """
    starter = [sys.executable, "-I", "-S", str(_STARTER), str(os.getpid())]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    with subprocess.Popen(
        [*starter, sys.executable, "-P", "-m", "poprun", *words],
        stdin=subprocess.DEVNULL,
        stdout=None if sys.stdout is sys.__stdout__ else subprocess.PIPE,
        stderr=None if sys.stderr is sys.__stderr__ else subprocess.PIPE,
        process_group=0,
    ) as process:
        sinks = {
            pipe.fileno(): (codecs.getincrementaldecoder("utf-8")("replace"), stream)
            for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
            if pipe is not None
        }
        try:
            _relay(process.pid, sinks)
        except BaseException as error:
            process.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            _relay(process.pid, sinks)  # poprun ends within its own time limits; a second interrupt kills poprun
            raise
        finally:
            process.kill()  # does nothing if poprun has ended; otherwise poprun's instances end with poprun
    return process.returncode


def _relay(pid: int, sinks: _Sinks) -> None:
    """Write what process ``pid`` prints into pipes to the streams in ``sinks``, until the process has ended."""
    with os.fdopen(os.pidfd_open(pid), "rb", buffering=0) as end, selectors.DefaultSelector() as selector:
        for descriptor in (end.fileno(), *sinks):
            selector.register(descriptor, selectors.EVENT_READ)
        has_ended = False
        while ready := selector.select(0 if has_ended else None):
            for key, _ in ready:
                if key.fd not in sinks:
                    has_ended = True
                elif data := os.read(key.fd, _READ_BYTES):
                    decoder, stream = sinks[key.fd]
                    stream.write(decoder.decode(data))
                    stream.flush()
                    continue
                selector.unregister(key.fd)
