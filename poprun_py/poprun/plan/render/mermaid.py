"""A plan as a Mermaid flowchart for Markdown pages: https://mermaid.js.org/syntax/flowchart.html.

A box is an instance, a frame a host or an IPU-Link domain; invisible links put them into rows. Mermaid
draws no text longer than 50,000 characters, so a plan of more than 64 instances is folded.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from poprun.plan.plan import InstancePlan, LaunchPlan
from poprun.plan.render.picture.drawing import hue_of
from poprun.plan.render.picture.scene import Framing, Scene, framing, make_scene
from poprun.plan.render.words import (
    describe_more_hosts,
    describe_more_instances,
    domains_of,
    instances_of_host,
    size_of,
    stands_for,
)
from poprun.text.ranges import numbered
from popsize.svg import NUM_HUES

_MAX_INSTANCES: Final = 64  # instances up to which nothing is folded
_FOLDED_INSTANCES: Final = 16  # how many instances a folded diagram shows of a plan and of a host, at most
_FILLS: Final = ("#91c3f6", "#e9b082", "#8ecfa4", "#dfa9da", "#71d0d5", "#f2a7a1", "#c1c37e", "#c1b3f2")


def render_mermaid(plan: LaunchPlan) -> str:
    """Return ``plan`` as the text of a Mermaid flowchart: instances as boxes, in frames of hosts."""
    lines = [f"%% poprun: {size_of(plan)}", "flowchart TB"]
    most, least = (count * plan.num_ipus_per_instance for count in (_MAX_INSTANCES, _FOLDED_INSTANCES))
    scene = make_scene(plan, max_ipus=most, folded_ipus=least)
    framed = framing(scene)
    hosts = [
        [_gap(describe_more_hosts(plan, host), f"h{position}")]
        if isinstance(host, range)
        else list(_host(scene, host, position, framed))
        for position, host in enumerate(scene.hosts)
    ]
    size = framed.hosts_per_domain
    for first in range(0, len(hosts), size):
        inside = [line for host in hosts[first : first + size] for line in host]
        lines += inside if size == 1 else _domain(f"d{first // size}", first // size, inside, "  ")
    lines += _links([f"h{position}" for position in range(len(hosts))], columns=1)
    lines += [f"  classDef hue{hue} fill:{_FILLS[hue]},stroke:#52606d,color:#1f2933" for hue in range(NUM_HUES)]
    lines += ["  classDef more fill:none,stroke:#7b8794,stroke-dasharray:4 4"]
    return "\n".join(lines) + "\n"


def _host(scene: Scene, host: int, position: int, framed: Framing) -> Iterator[str]:
    plan, instances, num_domains = scene.plan, scene.instances(host), framed.domains_per_host
    domains = "" if framed.has_domains else domains_of(plan, instances_of_host(plan, host))
    yield f'  subgraph h{position}["{_escaped(", ".join(filter(None, [plan.hosts[host], domains])))}"]'
    yield "    direction TB"
    names = [f"h{position}i{number}" for number in range(len(instances))]
    boxes = [
        _gap(describe_more_instances(plan, part), f"  {name}")
        if isinstance(part, range)
        else _instance(plan, plan.instance(part), f"  {name}")
        for name, part in zip(names, instances, strict=True)
    ]
    size = len(names) // num_domains
    for first in range(0, len(names), size):
        inside = [*boxes[first : first + size], *_indented(_links(names[first : first + size], columns=4))]
        number = host * num_domains + first // size
        yield from (
            inside if num_domains == 1 else _domain(f"h{position}d{first // size}", number, inside, "    ")
        )
    yield "  end"


def _domain(name: str, number: int, inside: list[str], indent: str) -> Iterator[str]:
    """Yield Mermaid's lines for the frame of an IPU-Link domain, with the lines ``inside`` in the frame."""
    yield f'{indent}subgraph {name}["ILD {number}"]'
    yield f"{indent}  direction TB"
    yield from _indented(inside)
    yield f"{indent}end"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _instance(plan: LaunchPlan, instance: InstancePlan, name: str) -> str:
    words = [
        f"<b>instance {instance.index}</b>",
        plan.parallelism.describe([instance.index]) or numbered("replica", instance.replicas),
        " of ".join(filter(None, [numbered("IPU", instance.ipus), domains_of(plan, [instance.index])])),
        _escaped(stands_for(instance)),
    ]
    return f'  {name}["{"<br/>".join(words)}"]:::hue{hue_of(plan, instance)}'


def _gap(description: str, name: str) -> str:
    return f'  {name}["{"<br/>".join(map(_escaped, description.splitlines()))}"]:::more'


def _links(names: list[str], columns: int) -> Iterator[str]:
    """Yield Mermaid's lines for invisible links from each box to the box below, which put boxes into rows."""
    return (f"  {name} ~~~ {below}" for name, below in zip(names, names[columns:], strict=False))


def _escaped(text: str) -> str:
    """Return ``text`` with entities for all characters that Mermaid could take for its own syntax."""
    return "".join(char if char.isalnum() or char in " .,:-_[]/+" else f"#{ord(char)};" for char in text)
