"""The plan of a job as text, in the format that the user chose.

Pure: values in, text out. Each format is a module of its own that is imported on use, so that starting a job pays
for none of them.
"""

import json
from typing import TYPE_CHECKING

from poprun.plan.plan import LaunchPlan
from poprun.text.screen import TopologyFormat

if TYPE_CHECKING:
    from poprun.plan.render.table import Details


def render_plan(
    plan: LaunchPlan,
    topology_format: TopologyFormat,
    *,
    width: int = 80,
    has_color: bool = False,
    details: "Details | None" = None,
) -> str:
    """Return ``plan`` as text in the format ``topology_format``; the other arguments are for the table."""
    match topology_format:
        case TopologyFormat.TABLE:
            from poprun.plan.render.table import render_table

            return render_table(plan, width=width, has_color=has_color, details=details)
        case TopologyFormat.TEXT:
            from poprun.plan.render.text import render_text

            return render_text(plan)
        case TopologyFormat.SVG:
            from poprun.plan.render.picture.documents import render_svg

            return render_svg(plan)
        case TopologyFormat.HTML:
            from poprun.plan.render.picture.documents import render_html

            return render_html(plan)
        case TopologyFormat.MERMAID:
            from poprun.plan.render.mermaid import render_mermaid

            return render_mermaid(plan)
        case TopologyFormat.JSON:
            from poprun.plan.plan_file import plan_to_dict

            return json.dumps(plan_to_dict(plan), indent=2) + "\n"
        case TopologyFormat.YAML:
            import yaml

            from poprun.plan.plan_file import plan_to_dict

            text: str = yaml.safe_dump(plan_to_dict(plan), sort_keys=False, width=100)
            return text
