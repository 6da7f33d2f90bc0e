"""A scene as elements of SVG. Colours are left to the style sheet, which knows dark from light.

Each host, instance and gap is a group with a text that tells all about it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Final

from poprun.plan.inventory import IPUS_PER_MACHINE
from poprun.render.picture.measures import Measures, Nest, cut, label, measure, text_width
from poprun.render.picture.scene import Framing, Gap, HostScene, InstanceScene, Scene
from poprun.render.words import (
    describe_host,
    describe_instance,
    describe_more_hosts,
    describe_more_instances,
    domains_of,
    instances_of_host,
    stands_for,
)

_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML document may hold (XML 1.0, section 2.2): words of a command line may."""


def element(name: str, *children: str, **attributes: object) -> str:
    """An element: ``<name attributes>children</name>``.

    Attributes are escaped; children are markup already. An attribute that is None is left out. A `_` in its name
    stands for a `-`, and at the end of its name for nothing.
    """
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return f"<{name}{''.join(words)}>{''.join(children)}</{name}>" if children else f"<{name}{''.join(words)}/>"


def escaped(text: str) -> str:
    """``text`` so that it stands in a document as it is; what no document may hold becomes U+FFFD."""
    return escape(_FORBIDDEN.sub("\ufffd", text)).replace("\n", "&#10;")


NUM_HUES: Final = 8

_LEGEND: Final = 34
"""From the hosts to the base line of the legend."""

Group = Callable[[str, str, tuple[int, int], list[str]], str]
"""Makes a group of SVG from its class, its description, its place, and its elements."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture: its size in pixels, and its elements."""

    width: int
    height: int
    elements: str


def draw(scene: Scene, group: Group) -> Drawing:
    """``scene`` as elements, whose groups ``group`` makes."""
    artist = _SceneDrawer(scene, measure(scene), group)
    width, height = artist.measures.cards.size
    legend_width, legend = _legend(height + _LEGEND, artist.measures.framing)
    return Drawing(
        max(width, legend_width),
        height + _LEGEND + 6,
        "".join([*artist.frames(artist.measures.cards), *artist.hosts(), *legend]),
    )


@dataclass(frozen=True, slots=True)
class _SceneDrawer:
    """Draws one scene with its measures."""

    scene: Scene
    measures: Measures
    group: Group

    def hosts(self) -> Iterator[str]:
        """The cards of all hosts."""
        cards = self.measures.cards
        for index, host in enumerate(self.scene.hosts):
            if isinstance(host, Gap):
                words = describe_more_hosts(self.scene.plan, host.items)
                yield self.gap(words, cards.place(index), (cards.width, cards.height))
            else:
                yield self.host(host, cards.place(index))

    def host(self, host: HostScene, place: tuple[int, int]) -> str:
        """A card with the host's name and its instances."""
        measures, sizes = self.measures, self.measures.sizes
        card, boxes, size = measures.cards, measures.boxes, sizes.text + 2
        padding = (card.width - boxes.size[0]) // 2
        numbers = instances_of_host(self.scene.plan, host.index)
        domains = "" if measures.framing.has_domains else domains_of(self.scene.plan, numbers)
        room = card.width - 5 * sizes.space - text_width(domains, sizes.text)
        name = cut(host.name, room, size)
        elements = [
            element("rect", class_="card", width=card.width, height=card.height, rx=3 * sizes.space),
            text(name, (2 * sizes.space + 1, (sizes.heading + size * 7 // 10) // 2), size, "name"),
        ]
        if domains:
            end = card.width - 2 * sizes.space - text_width(domains, sizes.text) // 2
            baseline = (sizes.heading + sizes.text * 7 // 10) // 2
            elements.append(text(domains, (end, baseline), sizes.text, "note"))
        first = host.index * measures.framing.domains_per_host
        elements += self.frames(boxes, (padding, sizes.heading), first)
        for index, instance in enumerate(host.instances):
            x, y = boxes.place(index)
            place_inside = (x + padding, y + sizes.heading)
            if isinstance(instance, Gap):
                words = describe_more_instances(self.scene.plan, instance.items)
                elements.append(self.gap(words, place_inside, (boxes.width, boxes.height)))
            else:
                elements.append(self.instance(instance, place_inside))
        return self.group("host", describe_host(self.scene.plan, host.index), place, elements)

    def frames(self, nest: Nest, start: tuple[int, int] = (0, 0), first: int = 0) -> Iterator[str]:
        """The frames of what begins at ``start``; those of IPU-Link domains are numbered from ``first``."""
        sizes = self.measures.sizes
        for frame in nest.frames():
            x, y = frame.place[0] + start[0], frame.place[1] + start[1]
            width, height = frame.size
            rect = element("rect", class_=frame.kind, width=width, height=height, rx=3 * sizes.space)
            name = ""
            if frame.kind == "ild":
                at = (2 * sizes.space + 1, sizes.space + sizes.text)
                name = text(f"ILD {first + frame.index}", at, sizes.text, "name")
            yield element("g", rect, name, transform=f"translate({x} {y})")

    def instance(self, scene: InstanceScene, place: tuple[int, int]) -> str:
        """A box with the instance's number, its virtual IPUs and its replicas."""
        measures, sizes = self.measures, self.measures.sizes
        instance, box, chips = scene.plan, measures.boxes, measures.chips
        title = label("instance", [instance.index], has_words=measures.has_words)
        y = sizes.space + sizes.text
        elements = [
            element("rect", class_="box", width=box.width, height=box.height, rx=2 * sizes.space),
            text(title, (box.width // 2, y - sizes.text // 8), sizes.text, "number"),
        ]
        y += sizes.space
        left = (box.width - chips.size[0]) // 2
        elements += self.machines(len(scene.ipus), (left, y))
        is_odd = measures.framing.is_shaded and self.scene.plan.ild_of(instance.index) % 2
        for index, ipu in enumerate(scene.ipus):
            chip_x, chip_y = chips.place(index)
            elements.append(self.chip(ipu, (left + chip_x, y + chip_y), "ipu odd" if is_odd else "ipu"))
        y += chips.size[1] + sizes.space
        elements += self.bars(instance.replicas, y)
        if sizes.is_wordy:
            y = box.height - sizes.space - sizes.text // 8
            words = cut(stands_for(instance), box.width - sizes.space, sizes.text - 1)
            elements.append(text(words, (box.width // 2, y), sizes.text - 1, "note"))
        hue = f"instance h{instance.index % NUM_HUES}"
        return self.group(hue, describe_instance(self.scene.plan, instance), place, elements)

    def machines(self, num_chips: int, start: tuple[int, int]) -> Iterator[str]:
        """Bands behind the virtual IPUs of an instance, one for each IPU-Machine: four in a row."""
        chips, space = self.measures.chips, self.measures.sizes.space
        side = space // 2 if chips.columns > IPUS_PER_MACHINE else space - 1
        width = IPUS_PER_MACHINE * (chips.width + chips.gap) - chips.gap + 2 * side
        height = chips.height + space - 2
        for index in range(0, num_chips if self.measures.framing.has_machines else 0, IPUS_PER_MACHINE):
            x, y = chips.place(index)
            place = {"x": start[0] + x - side, "y": start[1] + y - space // 2 + 1}
            yield element("rect", class_="machine band", width=width, height=height, rx=space, **place)

    def chip(self, ipu: int | Gap, place: tuple[int, int], class_: str) -> str:
        """A virtual IPU, or the gap for many; those of neighbouring IPU-Link domains differ."""
        chips, size = self.measures.chips, self.measures.sizes.text
        is_wordy = self.measures.sizes.is_wordy
        word = "…" if isinstance(ipu, Gap) else f"IPU {ipu}" if is_wordy else str(ipu)
        rect = element(
            "rect", class_=class_, x=place[0], y=place[1], width=chips.width, height=chips.height, rx=size // 4
        )
        return rect + text(word, (place[0] + chips.width // 2, _middle(place[1], chips.height, size)), size)

    def bars(self, replicas: range, y: int) -> Iterator[str]:
        """A bar for each replica, or one for all of them."""
        measures, sizes = self.measures, self.measures.sizes
        width = measures.boxes.width - 2 * sizes.space
        has_one = measures.num_bars < len(replicas)
        for index in range(measures.num_bars):
            top = y + index * (sizes.bar + sizes.space)
            place = {"x": sizes.space, "y": top, "width": width, "height": sizes.bar, "rx": sizes.text // 4}
            yield element("rect", class_="bar", **place)
            numbers = replicas if has_one else replicas[index : index + 1]
            words = label("replica", numbers, has_words=measures.has_words)
            yield text(words, (sizes.space + width // 2, _middle(top, sizes.bar, sizes.text)), sizes.text)

    def gap(self, words: str, place: tuple[int, int], size: tuple[int, int]) -> str:
        """A dashed box for what is left out."""
        (width, height), sizes = size, self.measures.sizes
        line = sizes.text * 3 // 2
        count, _, noun = words.partition(", each")[0].partition(" more ")
        told = [f"+ {count}", noun, *words.splitlines()[1:]][: max(2, height // line - 1)]
        top = (height - len(told) * line) // 2 + sizes.text
        elements = [element("rect", class_="gap", width=width, height=height, rx=2 * sizes.space)]
        for row, part in enumerate(told):
            shown = cut(part, width - sizes.text, sizes.text)
            elements.append(text(shown, (width // 2, top + row * line), sizes.text, "note" if row else "number"))
        return self.group("more", words, place, elements)


def _legend(base: int, framed: Framing) -> tuple[int, list[str]]:
    """A line on ``base`` that says what each shape is: its width, and its elements."""
    x, elements = 0, []
    shapes = [("card", "host"), ("box", "instance"), ("ipu", "virtual IPU"), ("bar", "replica")]
    if framed.is_shaded:
        shapes.insert(3, ("ipu odd", "one of an odd IPU-Link domain (ILD)"))
    if framed.has_machines or framed.instances_per_machine > 1:
        shapes.append(("machine", "IPU-Machine"))
    if framed.has_domains:
        shapes.append(("ild", "IPU-Link domain (ILD)"))
    for class_, words in shapes:
        elements.append(element("rect", class_=class_, x=x + 1, y=base - 11, width=20, height=13, rx=3))
        elements.append(text(words, (x + 28, base), 12, "line"))
        x += 52 + text_width(words, 12)
    return x, [element("g", *elements, class_="h0")]


def _middle(top: int, height: int, size: int) -> int:
    """The base line of a text in the middle of something."""
    return top + (height + size * 7 // 10) // 2


def text(words: str, place: tuple[int, int], size: int, class_: str | None = None) -> str:
    """``words`` at ``place``, the left or the middle of their base line as the class says."""
    return element("text", escaped(words), class_=class_, x=place[0], y=place[1], font_size=size)
