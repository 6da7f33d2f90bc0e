"""The plan as a picture: golden files, and what holds for any plan.

Holds poprun.plan.render.picture.documents, poprun.plan.render.picture.blocks, poprun.plan.render.picture.drawing,
poprun.plan.render.picture.scene and popsize.svg.
"""

import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poprun.plan.plan import LaunchPlan
from poprun.plan.render import render_plan
from poprun.plan.render.picture.blocks import Block, grid
from poprun.plan.render.picture.drawing import MAX_WIDTH
from poprun.plan.render.picture.scene import make_scene
from poprun.plan.request import AskedMapping, VipuSettings
from poprun.text.ranges import parse_hosts
from poprun.text.screen import TopologyFormat
from tests.machines import TWO_SOCKETS, facts_of
from tests.planning import CLUSTER_NODE, LAPTOP, planned, with_gpus

PICTURES = Path(__file__).with_name("pictures")
"""Golden files without style sheets and scripts; ``python -m tests.unit.test_render_picture`` renews them."""

SVG = "{http://www.w3.org/2000/svg}"
LAPTOP_PLAN = planned(LAPTOP, num_instances=2, num_replicas=4)
GPU_PLAN = planned(with_gpus("bfbf"), hosts=("a", "b"), num_instances=2, ipus_per_replica=2)
FOLDED_PLAN = planned(CLUSTER_NODE, hosts=parse_hosts("n[0-31]"), num_instances=2048)
DOMAIN_PLAN = planned(LAPTOP, hosts=("a", "b"), num_instances=8, vipu=VipuSettings(num_ilds=4))
SHARED_PLAN = planned(
    LAPTOP, hosts=("a", "b"), num_instances=8, mapping=AskedMapping(text="", tensor=2, pipeline=2)
)
GOLDEN = {
    "shared.svg": SHARED_PLAN,
    "shared.html": SHARED_PLAN,
    "shared.mermaid": SHARED_PLAN,
    "domains.svg": DOMAIN_PLAN,
    "domains.html": DOMAIN_PLAN,
    "domains.mermaid": DOMAIN_PLAN,
    "laptop.svg": LAPTOP_PLAN,
    "laptop.html": LAPTOP_PLAN,
    "laptop.mermaid": LAPTOP_PLAN,
    "gpus.svg": GPU_PLAN,
    "gpus.html": GPU_PLAN,
    "gpus.mermaid": GPU_PLAN,
    "folded.mermaid": FOLDED_PLAN,
}


@st.composite
def small_plans(draw: st.DrawFn) -> LaunchPlan:
    """Plans of every shape, so small that nothing is folded."""
    num_hosts, num_local, num_replicas = (draw(st.integers(1, 6)) for _ in range(3))
    return planned(
        draw(st.sampled_from([LAPTOP, CLUSTER_NODE, with_gpus("f" * 18)])),
        hosts=tuple(f"n{index}" for index in range(num_hosts)),
        num_instances=num_hosts * num_local,
        num_replicas=num_hosts * num_local * num_replicas,
        ipus_per_replica=draw(st.integers(1, 4)),
        vipu=VipuSettings(
            num_ilds=draw(st.sampled_from([n for n in range(1, 37) if num_hosts * num_local % n == 0])),
            pod=draw(st.sampled_from([None, "POD1024"])),
        ),
    )


@pytest.mark.parametrize("topology_format", [TopologyFormat.SVG, TopologyFormat.HTML])
def test_who_points_at_an_instance_sees_what_it_is_bound_to(topology_format: TopologyFormat) -> None:
    """Its cores and the node of its memory; nothing of it where nothing is bound."""
    bound, free = planned(facts_of(TWO_SOCKETS), num_instances=2), planned(LAPTOP, num_instances=2)

    assert "bound to cores 1,3,5,7,9,11,13,15, memory of node 1" in render_plan(bound, topology_format)
    assert "bound to" not in render_plan(free, topology_format)


@pytest.mark.parametrize("file", GOLDEN)
def test_the_picture(file: str) -> None:
    """Every element, as it was when somebody looked at it and found it good."""
    assert _drawn(file) == (PICTURES / file).read_text(encoding="utf-8")


@settings(deadline=None, max_examples=30)
@given(plan=small_plans())
def test_a_picture_shows_every_instance_replica_and_ipu(plan: LaunchPlan) -> None:
    """Each has its shape and its number, in a document that is well-formed."""
    picture = _parsed(render_plan(plan, TopologyFormat.SVG))
    groups = [group for group in picture.iter(f"{SVG}g") if "instance" in group.get("class", "").split()]
    told = [group.findtext(f"{SVG}title", "").splitlines()[0] for group in groups]

    assert told == [f"instance {index}" for index in range(plan.num_instances)]
    assert len(list(picture.iterfind(f".//{SVG}g[@class='host']"))) == len(plan.hosts)
    for group, instance in zip(groups, plan.instances(), strict=True):
        numbers = re.findall(r"\d+", " ".join(it.text or "" for it in group.iterfind(f"{SVG}text")))
        assert {str(instance.index), str(instance.replicas[0]), str(instance.replicas[-1])} <= set(numbers)
        rects = [rect.get("class", "").split()[0] for rect in group.iterfind(f"{SVG}rect")]
        assert rects.count("ipu") == plan.num_ipus_per_instance
        assert rects.count("bar") in (1, len(instance.replicas))
        assert set(rects) <= {"box", "ipu", "bar", "machine"}


@pytest.mark.parametrize("topology_format", ["svg", "html", "mermaid"])
def test_hostile_words_stay_words(topology_format: str) -> None:
    """A program's words are shown and never read: no markup, no entity, no character that no document may hold."""
    program = ("/bin/x", "</text><script>alert(1)</script>", '"]; click a "javascript:1"', "\x00\x1b\ud800&amp;")
    plan = planned(with_gpus("f"), program=program)
    text = render_plan(plan, TopologyFormat(topology_format))

    assert "<script>alert" not in text
    assert 'click a "' not in text
    text.encode("utf-8")
    if topology_format == "svg":
        assert _parsed(text).tag == f"{SVG}svg"


@pytest.mark.parametrize(
    ("asked", "num_shown", "num_left_out"),
    [
        ({"num_instances": 1024}, 1024, 0),
        ({"hosts": parse_hosts("n[0-1023]"), "num_instances": 1024}, 1024, 0),
        ({"ipus_per_replica": 1024}, 1, 0),
        ({"num_instances": 4, "num_replicas": 1024}, 4, 0),
        ({"num_instances": 64, "num_replicas": 2048}, 7, 57),
        ({"num_instances": 1025}, 255, 770),
        ({"hosts": parse_hosts("n[00-31]"), "num_instances": 2048}, 192, 1856),
        ({"hosts": parse_hosts("n[00-31]"), "num_instances": 32 * 1025}, 2 * 255, 32 * 1025 - 2 * 255),
        ({"num_instances": 2, "ipus_per_replica": 2048}, 2, 0),
    ],
)
def test_folding(asked: dict[str, Any], num_shown: int, num_left_out: int) -> None:
    """Up to 1,024 virtual IPUs all are shown; of more the first and the last, and a gap counts the others."""
    plan = planned(CLUSTER_NODE, **asked)
    scene = make_scene(plan)
    per_host = plan.num_instances_per_host
    shown, left_out = 0, 0
    for host in scene.hosts:
        if isinstance(host, range):
            left_out += len(host) * per_host
            continue
        for instance in scene.instances(host):
            if isinstance(instance, range):
                left_out += len(instance)
            else:
                shown += 1

    assert (shown, left_out) == (num_shown, num_left_out)
    assert (scene.hosts[0], scene.hosts[-1]) == (0, len(plan.hosts) - 1)


@pytest.mark.parametrize("num_ipus", [1, 4, 16, 64, 256, 1024, 2048, 65_536])
@pytest.mark.parametrize("ipus_per_replica", [1, 4])
@pytest.mark.parametrize("ipus_per_host", [4, 64])
def test_a_picture_is_no_wider_than_a_screen(num_ipus: int, ipus_per_replica: int, ipus_per_host: int) -> None:
    """It grows downwards; its text has 12 pixels, 11 above a POD256; and the file stays below 1 MB."""
    num_hosts = max(1, num_ipus // ipus_per_host)
    hosts = parse_hosts(f"n[0-{num_hosts - 1}]")
    num_instances = max(num_hosts, num_ipus // ipus_per_replica)
    plan = planned(CLUSTER_NODE, hosts=hosts, num_instances=num_instances, ipus_per_replica=ipus_per_replica)
    text = render_plan(plan, TopologyFormat.HTML)
    width = re.search(r'<svg [^>]*width="(\d+)"', text)

    assert width is not None
    assert int(width[1]) <= MAX_WIDTH + 2 < 1600
    assert min(int(size) for size in re.findall(r'font-size="(\d+)"', text)) >= (12 if num_ipus <= 256 else 11)
    assert len(text) < 1_000_000


@settings(deadline=None, max_examples=30)
@given(plan=small_plans())
def test_boxes_do_not_overlap(plan: LaunchPlan) -> None:
    """Hosts, instances and virtual IPUs stand beside or below each other; what holds others is around them."""
    shapes = _shapes(_parsed(render_plan(plan, TopologyFormat.SVG)))
    frames = {kind: shapes.get(kind, []) for kind in ("ild", "machine")}

    for kind in ("card", "box", "ipu", "bar"):
        assert not any(_overlap(one, other) for one, other in combinations(shapes[kind][:48], 2))
    for outer, inner in (("card", "box"), ("box", "ipu"), ("box", "bar")):
        assert all(sum(_holds(its, one) for its in shapes[outer]) == 1 for one in shapes[inner])
    assert all(_holds(shapes["paper"][0], one) for kind in shapes for one in shapes[kind])
    for its in frames.values():
        held = [[box for box in shapes["box"] if _holds(frame, box)] for frame in its]
        assert sorted(box for some in held for box in some) == sorted(shapes["box"] if its else [])
        assert len({len(some) for some in held}) <= 1


@pytest.mark.parametrize(
    ("asked", "domains", "machines", "bands"),
    [
        ({"num_instances": 4}, 0, 0, 0),
        ({"num_instances": 8, "vipu": VipuSettings(num_ilds=2)}, 2, 0, 0),
        ({"hosts": ("a", "b", "c", "d"), "num_instances": 4, "vipu": VipuSettings(num_ilds=2)}, 2, 0, 0),
        ({"hosts": ("a", "b"), "num_instances": 4, "vipu": VipuSettings(num_ilds=2)}, 0, 0, 0),
        ({"hosts": ("a", "b"), "num_instances": 6, "vipu": VipuSettings(num_ilds=3)}, 0, 0, 0),
        ({"num_instances": 16, "vipu": VipuSettings(pod="POD16", num_ilds=2)}, 2, 4, 0),
        ({"num_instances": 8, "ipus_per_replica": 2, "vipu": VipuSettings(pod="POD16")}, 0, 4, 0),
        ({"num_instances": 2, "ipus_per_replica": 8, "vipu": VipuSettings(pod="POD16")}, 0, 0, 4),
        ({"num_instances": 4, "ipus_per_replica": 3, "vipu": VipuSettings(pod="POD16")}, 0, 0, 0),
        ({"num_instances": 4, "num_replicas": 16, "vipu": VipuSettings(pod="POD16")}, 0, 0, 4),
        ({"num_instances": 2048, "vipu": VipuSettings(pod="POD2048", num_ilds=32)}, 0, 0, 0),
    ],
)
def test_what_is_framed(asked: dict[str, Any], domains: int, machines: int, bands: int) -> None:
    """A domain that is whole hosts or a part of one, and a pod's machine; a host that is one domain says so."""
    plan = planned(CLUSTER_NODE, **asked)
    picture, page = render_plan(plan, TopologyFormat.SVG), render_plan(plan, TopologyFormat.HTML)

    assert picture.count('class="ild" width="') == domains
    assert picture.count('class="machine" width="') == machines
    assert picture.count('class="machine band"') == bands
    assert [f">ILD {number}<" in page for number in range(domains)] == [True] * domains


@pytest.mark.parametrize(
    ("count", "size", "max_width", "columns"),
    [(1, (10, 10), 100, 1), (4, (60, 140), 1500, 4), (6, (100, 100), 1500, 3), (5, (10, 10), 25, 2)],
)
def test_a_grid(count: int, size: tuple[int, int], max_width: int, columns: int) -> None:
    """Rows are full where that is near to the aspect, and no wider than they may be."""
    drawn = grid([Block(size, [str(index)]) for index in range(count)], 5, max_width)
    rows = -(-count // columns)

    assert drawn.size == (columns * (size[0] + 5) - 5, rows * (size[1] + 5) - 5)
    assert drawn.children[-1].startswith(f'<g transform="translate({(count - 1) % columns * (size[0] + 5)} ')


@pytest.mark.parametrize(
    "asked", [{"num_instances": 65_536}, {"hosts": parse_hosts("n[0-4095]"), "num_instances": 4096}]
)
def test_mermaid_draws_it(asked: dict[str, Any]) -> None:
    """Mermaid refuses more than 50,000 characters and more than 500 links."""
    text = render_plan(planned(CLUSTER_NODE, **asked), TopologyFormat.MERMAID)

    assert len(text) < 50_000
    assert text.count("~~~") < 500


def test_a_page_needs_nothing_else() -> None:
    """No address in it but the name of SVG, and a policy that forbids to load anything."""
    page = render_plan(planned(), TopologyFormat.HTML)

    assert "default-src 'none'" in page
    assert re.findall(r"https?:|src=|href=|url\(|@import", page) == []


def _overlap(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> bool:
    """Whether two boxes, given by place and size, have a point in common."""
    return all(
        one[axis] < other[axis] + other[axis + 2] and other[axis] < one[axis] + one[axis + 2] for axis in (0, 1)
    )


def _holds(outer: tuple[int, int, int, int], inner: tuple[int, int, int, int]) -> bool:
    """Whether one box lies within another."""
    return all(
        outer[axis] <= inner[axis] and inner[axis] + inner[axis + 2] <= outer[axis] + outer[axis + 2]
        for axis in (0, 1)
    )


def _shapes(picture: ET.Element) -> dict[str, list[tuple[int, int, int, int]]]:
    """Place and size of every rectangle but those of the legend, by its class."""
    found: dict[str, list[tuple[int, int, int, int]]] = {}

    def look(node: ET.Element, x: int, y: int) -> None:
        moved = re.match(r"translate\((\d+) (\d+)\)", node.get("transform", ""))
        x, y = (x + int(moved[1]), y + int(moved[2])) if moved else (x, y)
        for rect in node.iterfind(f"{SVG}rect"):
            at = x + int(rect.get("x", "0")), y + int(rect.get("y", "0"))
            size = int(rect.get("width", "0")), int(rect.get("height", "0"))
            kind, *more = rect.get("class", "").split()
            found.setdefault("band" if "band" in more else kind, []).append((*at, *size))
        for group in node.iterfind(f"{SVG}g"):
            if group.get("class") != "h0":
                look(group, x, y)

    look(picture, 0, 0)
    return found


def _parsed(text: str) -> ET.Element:
    return ET.fromstring(text)  # noqa: S314 - it is our own


def _drawn(file: str) -> str:
    """The picture that golden file ``file`` shows, without style sheets and scripts."""
    text = render_plan(GOLDEN[file], TopologyFormat(file.rpartition(".")[2]))
    return re.sub(r"<(style|script)>.*?</\1>", r"<\1></\1>", text, flags=re.DOTALL)


if __name__ == "__main__":
    for file in GOLDEN:
        (PICTURES / file).write_text(_drawn(file), encoding="utf-8")
