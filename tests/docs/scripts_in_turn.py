"""Run scripts one after the other, each in a fork of a process that has imported what is slow to import.

``scripts_in_turn.py SCRIPT:PORT...``: each script finds ``MASTER_PORT`` set to its own port, so that no process of
one meets one of another.
"""

import gc
import os
import runpy
import sys
from importlib import import_module

SLOW = ("accelerate", "lightning.fabric", "poptorch", "torch._dynamo")
"""The last one torch imports with the first optimizer."""


def main(words: list[str]) -> None:
    """Fork for each script and wait for its end; the first one that fails ends this program, too."""
    for name in SLOW:
        import_module(name)
    gc.freeze()  # a collection in a fork would write to every page that it shares with us
    for word in words:
        child = os.fork()
        if not child:
            script, _, os.environ["MASTER_PORT"] = word.rpartition(":")
            sys.path.insert(0, os.path.dirname(script))  # noqa: PTH120 - as Python itself does it
            runpy.run_path(script, run_name="__main__")
            return
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(code)


main(sys.argv[1:])
