"""The answers to a traced program that asks its agent for the time, because the program's clock may differ.

Standard library only: a bare interpreter loads this module when a job is traced.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import socket
else:
    import _socket as socket  # the module socket would load enum and more

_QUESTION_BYTES = 64


class ClockAnswers:
    """The sockets over which a traced program asks its parent, the agent, for the time of the agent's clock."""

    def __init__(self) -> None:
        self._own, self.for_program = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own.settimeout(0.0)

    def fileno(self) -> int:
        """Return the descriptor of the socket at which the agent gets the program's questions for the time."""
        return self._own.fileno()

    def answer(self) -> bool:
        """Answer a program's question with the agent's time; return False if no process has the other socket."""
        try:
            question = self._own.recv(_QUESTION_BYTES)
            self._own.send(b"%b %d" % (question, time.time_ns()))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(question)
