"""A plan for programs: as JSON, or as YAML. Both read back with ``--plan``.

Both are ASCII: a word may hold any bytes of a file name, and line separators that YAML would take for blanks.
"""

import json

from poprun.plan.plan import LaunchPlan
from poprun.plan.plan_file import plan_to_dict


def render_json(plan: LaunchPlan) -> str:
    """``plan`` as JSON."""
    return json.dumps(plan_to_dict(plan), indent=2) + "\n"


def render_yaml(plan: LaunchPlan) -> str:
    """``plan`` as YAML."""
    import yaml  # noqa: PLC0415 - JSON does without it

    text: str = yaml.safe_dump(plan_to_dict(plan), sort_keys=False, width=100)
    return text
