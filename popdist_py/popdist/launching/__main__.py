"""The program of an instance of a launched function: ``python -m popdist.launching FOLDER``."""

import sys
from pathlib import Path

from popdist.launching.instance_call import call_function

if __name__ == "__main__":
    call_function(Path(sys.argv[1]))
