"""How a traced program asks its agent for the time: its own clock may be another one than that of its host.

Standard library only: a bare interpreter loads this when a job is traced.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    import socket
else:
    import _socket as socket  # socket itself loads enum and more

_QUESTION_BYTES = 64


class ClockAnswers:
    """A pair of sockets: the program inherits one end, and at the other the agent answers with its time."""

    def __init__(self) -> None:
        self._own, self.for_program = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own.settimeout(0.0)

    def fileno(self) -> int:
        """The agent's end."""
        return self._own.fileno()

    def answer(self) -> bool:
        """Answer a question; False when nobody can ask any more."""
        try:
            question = self._own.recv(_QUESTION_BYTES)
            self._own.send(b"%b %d" % (question, time.time_ns()))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(question)
