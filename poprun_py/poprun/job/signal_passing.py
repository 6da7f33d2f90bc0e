"""What the terminal and the user tell poprun by signals is told to the programs."""

import os
import signal

from poprun.job.agents import AgentLinks
from poprun.job.signals import SignalBox


class Courier:
    """Carries signals from poprun to the programs.

    Args:
        links: The agents.
        is_on_terminal: Whether a program writes to poprun's own terminal, whose size it wants to know.
    """

    def __init__(self, links: AgentLinks, *, is_on_terminal: bool) -> None:
        self._links = links
        self._is_on_terminal = is_on_terminal

    def carry(self, signals: SignalBox) -> bool:
        """Pass on what came since the last call; whether the job was suspended meanwhile."""
        while signals.passed_on:
            self._links.tell_all({"order": "offer_signal", "signal": signals.passed_on.pop(0)})
        if signals.has_resized and self._is_on_terminal:
            signals.has_resized = False
            self._links.tell(0, {"order": "signal", "signal": int(signal.SIGWINCH)})
        if signals.is_suspended:
            self._suspend(signals)
            return True
        return False

    def _suspend(self, signals: SignalBox) -> None:
        """Ctrl-Z: stop the programs, then poprun; whoever continues poprun continues them."""
        self._links.tell_all({"order": "signal", "signal": int(signal.SIGSTOP)})
        os.kill(os.getpid(), signal.SIGSTOP)
        signals.is_suspended = False
        self._links.tell_all({"order": "signal", "signal": int(signal.SIGCONT)})
