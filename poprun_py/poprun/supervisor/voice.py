"""What poprun says while a job runs: lines on its standard error."""

import sys
from contextlib import suppress


def say(text: str) -> None:
    """Say one line. That nobody listens any more is no error: the job is to end in order all the same."""
    with suppress(OSError):
        sys.stderr.write(f"poprun: {text}\n")
        sys.stderr.flush()
