"""Hold what poprun dealt until a file is there: holding.py FILE. Needs no torch."""

import json
import os
import sys
import time
from pathlib import Path

POLL_SECONDS = 0.05


def main() -> None:
    """Say when it began, and, after the file is there, when it ended, and which devices it had."""
    begin = time.monotonic()
    print("holds", flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(POLL_SECONDS)
    devices = os.environ.get("POPDIST_DEVICES", "")
    print(f"RESULT {json.dumps({'begin': begin, 'end': time.monotonic(), 'devices': devices})}", flush=True)


if __name__ == "__main__":
    main()
