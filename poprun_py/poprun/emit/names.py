"""What the job of a cluster's engine is called.

Source: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ (RFC 1123 labels).
"""

import os
import re
from typing import Final

from poprun.plan.plan import LaunchPlan

_MAX_NAME: Final = 40
"""Characters of a job's name; the operators append to it, and a host's name has at most 63."""


def job_name(plan: LaunchPlan) -> str:
    """A name for the job, from that of its program: ``/data/Train_2.py`` becomes ``train-2``."""
    script = next((word for word in plan.program if word.endswith(".py")), plan.program[0])
    stem = os.path.basename(script).removesuffix(".py").lower()
    name = re.sub("[^a-z0-9]+", "-", stem)[:_MAX_NAME].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".rstrip("-")
