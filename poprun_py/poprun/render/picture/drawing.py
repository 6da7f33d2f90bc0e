"""A scene as elements of SVG. Colours are left to the style sheet, which knows dark from light.

Each host, instance and gap is a group with a text that tells all about it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Final

from poprun.plan.inventory import IPUS_PER_MACHINE
from poprun.plan.plan import InstancePlan, LaunchPlan
from poprun.render.picture.measures import Measures, Nest, cut, label, measure, text_width
from poprun.render.picture.scene import Framing, Gap, HostScene, InstanceScene, Scene
from poprun.render.words import bound_to, counted, domains_of, numbered, stands_for
from poprun.text.host_names import fold_hosts

_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML document may hold (XML 1.0, section 2.2): words of a command line may."""


def element(name: str, *children: str, **attributes: object) -> str:
    """``<name attributes>children</name>``, a `_` in whose names is a `-`, and none at their end.

    Attributes are escaped; children are markup already. An attribute that is None is left out.
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


MAX_LENGTH: Final = 60
"""Characters of a list of hosts; a longer one is cut."""


def of_host(plan: LaunchPlan, index: int) -> str:
    """Everything that runs on host ``index``."""
    count = plan.num_instances_per_host
    instances = range(index * count, (index + 1) * count)
    return "\n".join(
        [
            f"host {plan.hosts[index]}",
            f"host {index} of {counted(len(plan.hosts), 'host')}",
            numbered("instance", instances),
            numbered("replica", _replicas(plan, instances)),
            f"{numbered('virtual IPU', range(plan.num_slots_per_host))}",
            *filter(None, [domains_of(plan, instances)]),
        ]
    )


def of_instance(plan: LaunchPlan, instance: InstancePlan) -> str:
    """What instance ``instance`` is, owns, and computes on."""
    replicas = numbered("replica", instance.replicas)
    return "\n".join(
        [
            f"instance {instance.index}",
            f"on host {instance.host}, number {instance.local_index} there",
            replicas if len(instance.replicas) == 1 else f"{replicas}, which take turns",
            f"{numbered('virtual IPU', instance.slots)}: {stands_for(instance)}",
            *filter(None, [domains_of(plan, range(instance.index, instance.index + 1))]),
            *([] if instance.binding is None else [f"bound to {bound_to(instance.binding)}"]),
        ]
    )


def of_instances(plan: LaunchPlan, instances: range) -> str:
    """What is left out of a host."""
    return "\n".join(
        [
            f"{counted(len(instances), 'more instance')}, each like its neighbours",
            numbered("instance", instances),
            numbered("replica", _replicas(plan, instances)),
        ]
    )


def of_hosts(plan: LaunchPlan, hosts: range) -> str:
    """What is left out of a plan."""
    count = plan.num_instances_per_host
    return "\n".join(
        [
            f"{counted(len(hosts), 'more host')}, each like its neighbours",
            _abbreviated(fold_hosts(plan.hosts[hosts.start : hosts.stop])),
            of_instances(plan, range(hosts.start * count, hosts.stop * count)).partition("\n")[2],
        ]
    )


def _replicas(plan: LaunchPlan, instances: range) -> range:
    local = plan.layout.num_local_replicas
    return range(instances.start * local, instances.stop * local)


def _abbreviated(text: str) -> str:
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1]}…"


NUM_HUES: Final = 8
NUM_SHADES: Final = 4
_MAX_STRIPES: Final = 8

LEGEND: Final = 34
"""From the hosts to the base line of the legend."""

Group = Callable[[str, str, tuple[int, int], list[str]], str]
"""Makes a group of SVG of a class, what is told of it, its place, and its elements."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture: its size in pixels, and its elements."""

    width: int
    height: int
    elements: str


def draw(scene: Scene, group: Group) -> Drawing:
    """``scene`` as elements, whose groups ``group`` makes."""
    artist = _Artist(scene, measure(scene), group)
    width, height = artist.measures.cards.size
    legend_width, legend = _legend(height + LEGEND, artist.measures.framing)
    return Drawing(
        max(width, legend_width),
        height + LEGEND + 6,
        "".join([*artist.frames(artist.measures.cards), *artist.hosts(), *legend]),
    )


@dataclass(frozen=True, slots=True)
class _Artist:
    """Draws one scene with its measures."""

    scene: Scene
    measures: Measures
    group: Group

    def hosts(self) -> Iterator[str]:
        """Every card."""
        cards = self.measures.cards
        for index, host in enumerate(self.scene.hosts):
            if isinstance(host, Gap):
                words = of_hosts(self.scene.plan, host.items)
                yield self.gap(words, cards.place(index), (cards.width, cards.height))
            else:
                yield self.host(host, cards.place(index))

    def host(self, host: HostScene, place: tuple[int, int]) -> str:
        """A card with the host's name and its instances."""
        measures, level = self.measures, self.measures.level
        card, boxes, size = measures.cards, measures.boxes, level.text + 2
        padding = (card.width - boxes.size[0]) // 2
        per_host = self.scene.plan.num_instances_per_host
        numbers = range(host.index * per_host, (host.index + 1) * per_host)
        domains = "" if measures.framing.has_domains else domains_of(self.scene.plan, numbers)
        room = card.width - 5 * level.space - text_width(domains, level.text)
        name = cut(host.name, room, size)
        elements = [
            element("rect", class_="card", width=card.width, height=card.height, rx=3 * level.space),
            _text(name, (2 * level.space + 1, (measures.heading + size * 7 // 10) // 2), size, class_="name"),
        ]
        if domains:
            end = card.width - 2 * level.space - text_width(domains, level.text) // 2
            baseline = (measures.heading + level.text * 7 // 10) // 2
            elements.append(_text(domains, (end, baseline), level.text, class_="note"))
        first = host.index * measures.framing.domains_per_host
        elements += self.frames(boxes, (padding, measures.heading), first)
        for index, instance in enumerate(host.instances):
            x, y = boxes.place(index)
            place_inside = (x + padding, y + measures.heading)
            if isinstance(instance, Gap):
                words = of_instances(self.scene.plan, instance.items)
                elements.append(self.gap(words, place_inside, (boxes.width, boxes.height)))
            else:
                elements.append(self.instance(instance, place_inside))
        return self.group("host", of_host(self.scene.plan, host.index), place, elements)

    def frames(self, nest: Nest, start: tuple[int, int] = (0, 0), first: int = 0) -> Iterator[str]:
        """The frames of what begins at ``start``; those of IPU-Link domains are numbered from ``first``."""
        level = self.measures.level
        for frame in nest.frames():
            x, y = frame.place[0] + start[0], frame.place[1] + start[1]
            width, height = frame.size
            rect = element("rect", class_=frame.kind, width=width, height=height, rx=3 * level.space)
            name = ""
            if frame.kind == "ild":
                at = (2 * level.space + 1, level.space + level.text)
                name = _text(f"ILD {first + frame.index}", at, level.text, class_="name")
            yield element("g", rect, name, transform=f"translate({x} {y})")

    def instance(self, scene: InstanceScene, place: tuple[int, int]) -> str:
        """A box with the instance's number, its virtual IPUs and its replicas."""
        measures, level = self.measures, self.measures.level
        instance, box, chips = scene.plan, measures.boxes, measures.chips
        numbers = range(instance.index, instance.index + 1)
        y = level.space + level.text
        elements = [
            element("rect", class_="box", width=box.width, height=box.height, rx=2 * level.space),
            _text(
                label("instance", numbers, has_words=measures.has_words),
                (box.width // 2, y - level.text // 8),
                level.text,
                class_="number",
            ),
        ]
        y += level.space
        left = (box.width - chips.size[0]) // 2
        elements += self.machines(len(scene.slots), (left, y))
        for index, slot in enumerate(scene.slots):
            chip_x, chip_y = chips.place(index)
            is_odd = measures.framing.is_shaded and self.scene.plan.ild_of(instance.index) % 2
            class_ = "ipu odd" if is_odd else "ipu"
            elements.append(self.chip(slot, (left + chip_x, y + chip_y), class_))
        y += chips.size[1] + level.space
        elements += self.bars(instance.replicas, y)
        if level.is_wordy:
            y = box.height - level.space - level.text // 8
            words = cut(stands_for(instance), box.width - level.space, level.text - 1)
            elements.append(_text(words, (box.width // 2, y), level.text - 1, class_="note"))
        hue = f"instance h{instance.index % NUM_HUES}"
        return self.group(hue, of_instance(self.scene.plan, instance), place, elements)

    def machines(self, num_chips: int, start: tuple[int, int]) -> Iterator[str]:
        """What stands behind the virtual IPUs of an instance that are an IPU-Machine together: four in a row."""
        chips, space = self.measures.chips, self.measures.level.space
        side = space // 2 if chips.columns > IPUS_PER_MACHINE else space - 1
        width = IPUS_PER_MACHINE * (chips.width + chips.gap) - chips.gap + 2 * side
        height = chips.height + space - 2
        for index in range(0, num_chips if self.measures.framing.has_machines else 0, IPUS_PER_MACHINE):
            x, y = chips.place(index)
            place = {"x": start[0] + x - side, "y": start[1] + y - space // 2 + 1}
            yield element("rect", class_="machine band", width=width, height=height, rx=space, **place)

    def chip(self, slot: int | Gap, place: tuple[int, int], class_: str) -> str:
        """A virtual IPU, or the gap for many; those of neighbouring IPU-Link domains differ."""
        chips, size = self.measures.chips, self.measures.level.text
        is_wordy = self.measures.level.is_wordy
        word = "…" if isinstance(slot, Gap) else f"IPU {slot}" if is_wordy else str(slot)
        rect = element(
            "rect", class_=class_, x=place[0], y=place[1], width=chips.width, height=chips.height, rx=size // 4
        )
        return rect + _text(word, (place[0] + chips.width // 2, _middle(place[1], chips.height, size)), size)

    def bars(self, replicas: range, y: int) -> Iterator[str]:
        """A bar for each replica, or one striped bar for all of them."""
        measures, level = self.measures, self.measures.level
        width = measures.boxes.width - 2 * level.space
        has_one = measures.num_bars < len(replicas)
        for index in range(measures.num_bars):
            top = y + index * (level.bar + level.space)
            numbers = replicas if has_one else replicas[index : index + 1]
            stripes = min(len(numbers), _MAX_STRIPES)
            for stripe in range(stripes):
                first, last = stripe * width // stripes, (stripe + 1) * width // stripes
                shade = f"s{(index + stripe) % NUM_SHADES}"
                yield element(
                    "rect",
                    class_=shade,
                    x=level.space + first,
                    y=top,
                    width=last - first,
                    height=level.bar,
                    rx=level.text // 4 if stripes == 1 else None,
                )
            words = label("replica", numbers, has_words=measures.has_words)
            yield _text(words, (level.space + width // 2, _middle(top, level.bar, level.text)), level.text)

    def gap(self, words: str, place: tuple[int, int], size: tuple[int, int]) -> str:
        """A dashed box for what is left out."""
        width, height = size
        text, line = self.measures.level.text, self.measures.level.text * 3 // 2
        count, _, noun = words.partition(", each")[0].partition(" more ")
        told = [f"+ {count}", noun, *words.splitlines()[1:]][: max(2, height // line - 1)]
        top = (height - len(told) * line) // 2 + text
        elements = [element("rect", class_="gap", width=width, height=height, rx=2 * self.measures.level.space)]
        elements += [
            _text(
                cut(it, width - text, text),
                (width // 2, top + row * line),
                text,
                class_="note" if row else "number",
            )
            for row, it in enumerate(told)
        ]
        return self.group("more", words, place, elements)


def _legend(base: int, framed: Framing) -> tuple[int, list[str]]:
    """What each shape is, in a line that stands on ``base``; its width, and its elements."""
    x, elements = 0, []
    shapes = [("card", "host"), ("box", "instance"), ("ipu", "virtual IPU"), ("s0", "replica")]
    if framed.is_shaded:
        shapes.insert(3, ("ipu odd", "one of an odd IPU-Link domain (ILD)"))
    if framed.has_machines or framed.instances_per_machine > 1:
        shapes.append(("machine", "IPU-Machine"))
    if framed.has_domains:
        shapes.append(("ild", "IPU-Link domain (ILD)"))
    for class_, words in shapes:
        elements.append(element("rect", class_=class_, x=x + 1, y=base - 11, width=20, height=13, rx=3))
        elements.append(_text(words, (x + 28, base), 12, class_="line"))
        x += 52 + text_width(words, 12)
    return x, [element("g", *elements, class_="h0")]


def _middle(top: int, height: int, size: int) -> int:
    """The base line of a text in the middle of something."""
    return top + (height + size * 7 // 10) // 2


def _text(words: str, place: tuple[int, int], size: int, class_: str | None = None) -> str:
    return element("text", escaped(words), class_=class_, x=place[0], y=place[1], font_size=size)
