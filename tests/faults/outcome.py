"""What came of a fault, and whether it is right. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from tests.faults.catalogue import ANYONE, POPRUNS, Fault

_OWN_FRAME: Final = re.compile(r'^.*File ".*/poprun/.*", line \d+, in ', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one cell.

    Attributes:
        contestant: The launcher's name.
        fault: What went wrong.
        code: Its exit code, negative for a signal; None when it hung until the deadline.
        named: The instance that the report names as the first to fail.
        seconds: From the failure to the launcher's end; when the launcher was killed, until nothing was left.
        survivors: Processes that lived on.
        memory: Files left in shared memory.
        sockets: Sockets left.
        err: What was printed on standard error.
    """

    contestant: str
    fault: Fault
    code: int | None
    named: int | None
    seconds: float
    survivors: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    err: str = ""

    @property
    def column(self) -> str:
        """Whose column of a comparison it belongs to: poprun's launchers share one."""
        return "poprun" if self.contestant in POPRUNS else self.contestant

    @property
    def is_code_right(self) -> bool:
        """Whether it ended, and with a code that the fault demands."""
        return self.code in self.fault.codes if self.fault.codes else self.code not in (0, None)

    @property
    def is_name_right(self) -> bool:
        """Whether the report names the instance that the fault demands."""
        return not self.fault.codes or self.fault.named in (ANYONE, self.named)

    @property
    def has_own_traceback(self) -> bool:
        """Whether poprun, a shim or an agent showed a traceback."""
        return _OWN_FRAME.search(self.err) is not None

    @property
    def is_late(self) -> bool:
        """Whether the end came later than the fault's bound; an idle machine is assumed."""
        return self.code is None or self.seconds > self.fault.bound_seconds

    @property
    def mistakes(self) -> list[str]:
        """Every law that it broke but for the time, in words."""
        found = [] if self.is_code_right else [f"exit code {self.code}"]
        if not self.is_name_right:
            found.append(f"names instance {self.named}, not {self.fault.named}")
        if self.has_own_traceback:
            found.append("shows a traceback of poprun's own")
        found += [f"leaves {thing}" for thing in (*self.survivors, *self.memory, *self.sockets)]
        return found
