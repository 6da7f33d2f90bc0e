"""What poprun says while a job runs: lines on its standard error."""

import sys
from contextlib import suppress

from poprun.text.log_line import Level, own_line


def say(text: str, level: Level = Level.INFO) -> None:
    """Say one line. That nobody listens any more is no error: the job is to end in order all the same."""
    with suppress(OSError):
        sys.stderr.write(own_line(text, level))
        sys.stderr.flush()
