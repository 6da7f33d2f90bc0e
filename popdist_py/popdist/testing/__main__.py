"""One instance of a test world: loads the function, calls it, and writes the outcome."""

import pickle
import sys
import traceback
from pathlib import Path

from popdist.context import instance_index
from popdist.testing.world import JOB_FILE, outcome_path


def main(directory: Path) -> int:
    """Make this instance's call, and return the exit code."""
    failure = None
    try:
        reference, arguments = pickle.loads((directory / JOB_FILE).read_bytes())  # noqa: S301 - written by run_world, read only by us
        fn = reference.load()
        data = pickle.dumps((fn(*pickle.loads(arguments)), None))  # noqa: S301 - as above
    except BaseException:  # noqa: BLE001 - whatever ends the call is its outcome
        failure = traceback.format_exc()
        data = pickle.dumps((None, failure))
        sys.stderr.write(failure)
    path = outcome_path(directory, instance_index())
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").replace(path)
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
