"""The process of one part: `python -m gpu_check.part NUMBER --device DEVICE --folder FOLDER --seconds N`."""

import argparse
from importlib import import_module
from pathlib import Path

from gpu_check.findings import Findings
from gpu_check.jobs import Setting
from gpu_check.parts import PARTS

FINDINGS = "findings.json"
"""The file in the part's folder with what it found."""


def main() -> None:
    """Do the part that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    part = next(it for it in PARTS if it.number == options.number)
    setting = Setting(
        device=options.device, is_quick=options.quick, folder=options.folder, seconds=options.seconds
    )
    do = getattr(import_module(f"gpu_check.{part.module}"), f"part_{part.number}")
    do(setting, Findings(options.folder / FINDINGS))


if __name__ == "__main__":
    main()
