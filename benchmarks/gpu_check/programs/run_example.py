"""Run a script as it is on the device that is checked: run_example.py SCRIPT ARGUMENTS."""

import runpy
import sys

from gpu_check.programs.device import chosen_device

if __name__ == "__main__":
    chosen_device()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
