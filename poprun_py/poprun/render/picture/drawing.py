"""A scene drawn as blocks: virtual IPUs and replicas in instances, instances in hosts, hosts in a grid.

Each host, instance and gap is a group with a text that tells all about it. The more there is to see the smaller
everything is, but never illegible.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from poprun.plan.inventory import IPUS_PER_MACHINE
from poprun.plan.plan import InstancePlan, LaunchPlan
from poprun.render.picture.blocks import (
    Block,
    cut,
    element,
    grid,
    middle,
    place_in_grid,
    size_of_grid,
    text,
    text_width,
)
from poprun.render.picture.scene import Framing, Gap, HostScene, InstanceScene, Scene, framing
from poprun.render.words import (
    describe_host,
    describe_instance,
    describe_more_hosts,
    describe_more_instances,
    domains_of,
    instances_of_host,
    stands_for,
)
from poprun.text.ranges import counted, fold_numbers, numbered

NUM_HUES: Final = 8

MAX_WIDTH: Final = 1500  # of a picture whose parts allow it, so that it fits a screen of 1,600 pixels
_LEGEND: Final = 34  # from the hosts to the base line of the legend
_MIN_NAME: Final = 8  # characters of a host's name that every host has room for
Description = Callable[[str, str], tuple[Sequence[str], Mapping[str, object]]]
"""What tells a reader of a group what it is: its first elements and attributes, from its class and its words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """The sizes of the smallest parts of a picture, in pixels."""

    text: int
    chip: tuple[int, int]
    bar: int
    space: int  # between the parts of an instance; twice that between instances
    max_bars: int  # up to so many replicas of an instance each have a bar
    is_wordy: bool = False  # whether labels have words, however wide that makes an instance

    @property
    def heading(self) -> int:
        """Height of a host's name with what is around it."""
        return self.text + 2 * self.space + 6


_SIZES: Final = (
    (32, PartSizes(text=13, chip=(52, 36), bar=22, space=6, max_bars=8, is_wordy=True)),
    (256, PartSizes(text=12, chip=(37, 23), bar=18, space=4, max_bars=4)),
    (math.inf, PartSizes(text=11, chip=(32, 17), bar=15, space=2, max_bars=2)),
)
"""Each with the number of shown virtual IPUs up to which it is used."""


def draw(scene: Scene, describe: Description) -> Block:
    """``scene`` as one block, with a legend below it."""
    sizes = next(sizes for most, sizes in _SIZES if scene.num_ipus <= most)
    drawer = _Drawer(scene, sizes, framing(scene), describe)
    picture = drawer.hosts()
    legend = _legend(drawer.framed, "/".join(scene.plan.parallelism.place_of(0)) or "replica")
    children = [*picture.children, legend.at(0, picture.height + _LEGEND)]
    return Block(max(picture.width, legend.width), picture.height + _LEGEND + legend.height, children)


class _Drawer:
    """Draws one scene: all instances are of one size, and so are all hosts."""

    def __init__(self, scene: Scene, sizes: PartSizes, framed: Framing, describe: Description) -> None:
        self.scene, self.plan, self.sizes, self.framed = scene, scene.plan, sizes, framed
        self.describe = describe
        num_chips = len(scene.first_instance.ipus)
        self.chip_columns = _chip_columns(num_chips)
        self.chips_size = size_of_grid(num_chips, self.chip_columns, sizes.chip, sizes.space)
        self.has_words = sizes.is_wordy or self._widest_label(has_words=True) <= self.chips_size[0]
        num_bars = len(self._bar_labels(scene.first_instance.plan, has_words=self.has_words))
        num_parts, num_texts = num_bars + 3 + sizes.is_wordy, 1 + sizes.is_wordy
        self.box_size = (
            max(self.chips_size[0], self._widest_label(has_words=self.has_words)) + 2 * sizes.space,
            num_texts * sizes.text + self.chips_size[1] + num_bars * sizes.bar + num_parts * sizes.space,
        )

    def hosts(self) -> Block:
        """The cards of all hosts, those of an IPU-Link domain of several hosts in a frame."""
        space, count = self.sizes.space, self.framed.hosts_per_domain
        first = self.host(self.scene.first_host)
        cards = [
            self.gap("host", host.items, describe_more_hosts(self.plan, host.items), (first.width, first.height))
            if isinstance(host, Gap)
            else self.host(host)
            for host in self.scene.hosts
        ]
        if count > 1:
            cards = self.domains(cards, count, 4 * space, 3 * space)
        return grid(cards, 4 * space, MAX_WIDTH)

    def host(self, host: HostScene) -> Block:
        """A card with the host's name and its instances, in the frames of IPU-Machines and IPU-Link domains."""
        sizes, space, framed = self.sizes, self.sizes.space, self.framed
        boxes = [
            self.gap("instance", part.items, describe_more_instances(self.plan, part.items), self.box_size)
            if isinstance(part, Gap)
            else self.instance(part)
            for part in host.instances
        ]
        if framed.instances_per_machine > 1:
            boxes = self.machines(boxes)
        if framed.domains_per_host > 1:
            count = len(boxes) // framed.domains_per_host
            boxes = self.domains(boxes, count, 2 * space, 2 * space, host.index * framed.domains_per_host)
        inner = grid(boxes, 2 * space, self._room())
        domains = "" if framed.has_domains else domains_of(self.plan, instances_of_host(self.plan, host.index))
        domains_width, size = text_width(domains, sizes.text), sizes.text + 2
        width = max(inner.width, text_width("m" * _MIN_NAME, size) + domains_width) + 4 * space
        height = inner.height + sizes.heading + 2 * space
        name = cut(host.name, width - 5 * space - domains_width, size)
        children = [
            element("rect", class_="card", width=width, height=height, rx=3 * space),
            text(name, (2 * space + 1, middle(0, sizes.heading, size)), size, "name"),
        ]
        if domains:
            place = (width - 2 * space - domains_width // 2, middle(0, sizes.heading, sizes.text))
            children.append(text(domains, place, sizes.text, "note"))
        children.append(inner.at((width - inner.width) // 2, sizes.heading))
        return self.described("host", describe_host(self.plan, host.index), (width, height), children)

    def machines(self, boxes: Sequence[Block]) -> list[Block]:
        """Instances in the frames of their IPU-Machines."""
        space, count = self.sizes.space, self.framed.instances_per_machine
        inner = [grid(boxes[at : at + count], 2 * space, self._room()) for at in range(0, len(boxes), count)]
        return [self.frame("machine", block, space, space) for block in inner]

    def domains(
        self, blocks: Sequence[Block], count: int, gap: int, padding: int, first_number: int = 0
    ) -> list[Block]:
        """Blocks in the frames of their IPU-Link domains, ``count`` in each, with the domains' numbers."""
        sizes = self.sizes
        inner = [grid(blocks[at : at + count], gap, self._room()) for at in range(0, len(blocks), count)]
        heading = sizes.text + sizes.space + padding
        place = (2 * sizes.space + 1, sizes.space + sizes.text)
        return [
            self.frame("ild", block, padding, heading, text(f"ILD {first_number + at}", place, sizes.text, "name"))
            for at, block in enumerate(inner)
        ]

    def frame(self, class_: str, inner: Block, padding: int, heading: int, name: str = "") -> Block:
        """A frame around a block, ``heading`` pixels of it above."""
        width, height = inner.width + 2 * padding, inner.height + heading + padding
        rect = element("rect", class_=class_, width=width, height=height, rx=3 * self.sizes.space)
        return Block(width, height, [rect, name, inner.at(padding, heading)])

    def instance(self, scene: InstanceScene) -> Block:
        """A box with the instance's number, its virtual IPUs and its replicas."""
        sizes, instance, (width, height) = self.sizes, scene.plan, self.box_size
        y = sizes.space + sizes.text
        title = _label("instance", [instance.index], has_words=self.has_words)
        children = [
            element("rect", class_="box", width=width, height=height, rx=2 * sizes.space),
            text(title, (width // 2, y - sizes.text // 8), sizes.text, "number"),
        ]
        y += sizes.space
        left = (width - self.chips_size[0]) // 2
        children += self.bands(len(scene.ipus), (left, y))
        is_odd = self.framed.is_shaded and self.plan.ild_of(instance.index) % 2
        for index, ipu in enumerate(scene.ipus):
            chip_x, chip_y = place_in_grid(index, self.chip_columns, sizes.chip, sizes.space)
            children.append(self.chip(ipu, (left + chip_x, y + chip_y), "ipu odd" if is_odd else "ipu"))
        y += self.chips_size[1] + sizes.space
        children += self.bars(instance, y)
        if sizes.is_wordy:
            words = cut(stands_for(instance), width - sizes.space, sizes.text - 1)
            place = (width // 2, height - sizes.space - sizes.text // 8)
            children.append(text(words, place, sizes.text - 1, "note"))
        hue = f"instance h{hue_of(self.plan, instance)}"
        return self.described(hue, describe_instance(self.plan, instance), self.box_size, children)

    def bands(self, num_chips: int, start: tuple[int, int]) -> Iterator[str]:
        """Bands behind the virtual IPUs of an instance, one for each IPU-Machine: four in a row."""
        (chip_width, chip_height), space = self.sizes.chip, self.sizes.space
        side = space // 2 if self.chip_columns > IPUS_PER_MACHINE else space - 1
        width = IPUS_PER_MACHINE * (chip_width + space) - space + 2 * side
        for index in range(0, num_chips if self.framed.has_machines else 0, IPUS_PER_MACHINE):
            x, y = place_in_grid(index, self.chip_columns, self.sizes.chip, space)
            place = {"x": start[0] + x - side, "y": start[1] + y - space // 2 + 1}
            yield element(
                "rect", class_="machine band", width=width, height=chip_height + space - 2, rx=space, **place
            )

    def chip(self, ipu: int | Gap, place: tuple[int, int], class_: str) -> str:
        """A virtual IPU, or the gap for many; those of neighbouring IPU-Link domains differ."""
        (width, height), size = self.sizes.chip, self.sizes.text
        word = "…" if isinstance(ipu, Gap) else f"IPU {ipu}" if self.sizes.is_wordy else str(ipu)
        rect = element("rect", class_=class_, x=place[0], y=place[1], width=width, height=height, rx=size // 4)
        return rect + text(word, (place[0] + width // 2, middle(place[1], height, size)), size)

    def bars(self, instance: InstancePlan, y: int) -> Iterator[str]:
        """A bar for each replica, or for the place in a shared one, or one for all of that."""
        sizes, width = self.sizes, self.box_size[0] - 2 * self.sizes.space
        for index, words in enumerate(self._bar_labels(instance, has_words=self.has_words)):
            top = y + index * (sizes.bar + sizes.space)
            place = {"x": sizes.space, "y": top, "width": width, "height": sizes.bar, "rx": sizes.text // 4}
            yield element("rect", class_="bar", **place)
            yield text(words, (sizes.space + width // 2, middle(top, sizes.bar, sizes.text)), sizes.text)

    def gap(self, noun: str, items: range, words: str, size: tuple[int, int]) -> Block:
        """A dashed box for what is left out."""
        (width, height), sizes = size, self.sizes
        line = sizes.text * 3 // 2
        count, nouns = counted(len(items), noun).split()
        told = [f"+ {count}", nouns, *words.splitlines()[1:]][: max(2, height // line - 1)]
        top = (height - len(told) * line) // 2 + sizes.text
        children = [element("rect", class_="gap", width=width, height=height, rx=2 * sizes.space)]
        for row, part in enumerate(told):
            shown = cut(part, width - sizes.text, sizes.text)
            children.append(text(shown, (width // 2, top + row * line), sizes.text, "note" if row else "number"))
        return self.described("more", words, size, children)

    def described(self, class_: str, words: str, size: tuple[int, int], children: Sequence[str]) -> Block:
        """A block that tells what it is, on a line of its own."""
        first, attributes = self.describe(class_, words)
        return Block(*size, [*first, *children, "\n"], {"class_": class_, **attributes})

    def _room(self) -> int:
        """Width of what stands in a host: frames and cards around it take the rest."""
        return MAX_WIDTH - 16 * self.sizes.space

    def _bar_labels(self, instance: InstancePlan, *, has_words: bool) -> list[str]:
        """The texts of an instance's bars: a replica or a number of its place on each, or all on one."""
        replicas, place = instance.replicas, self.plan.parallelism.place_of(instance.index)
        if place and has_words and len(place) <= self.sizes.max_bars:
            return [f"{name} {number}" for name, number in place.items()]
        if place:
            return ["/".join(map(str, place.values()))]
        if len(replicas) > self.sizes.max_bars:
            return [_label("replica", replicas, has_words=has_words)]
        return [_label("replica", [replica], has_words=has_words) for replica in replicas]

    def _widest_label(self, *, has_words: bool) -> int:
        """Width of the widest label of an instance: those with the highest numbers."""
        sizes, last = self.sizes, self.plan.instance(self.plan.num_instances - 1)
        labels = [_label("instance", [last.index], has_words=has_words)]
        labels += self._bar_labels(last, has_words=has_words)
        labels += [stands_for(last)[:24]] if sizes.is_wordy else []
        return max(text_width(words, sizes.text) for words in labels) + sizes.space


def hue_of(plan: LaunchPlan, instance: InstancePlan) -> int:
    """The colour of an instance: each has its own, or those of a shared replica have one."""
    number = instance.part.replica if plan.parallelism.is_shared else instance.index
    return number % NUM_HUES


def _label(noun: str, numbers: Sequence[int], *, has_words: bool) -> str:
    """What is written on an instance or a replica."""
    return numbered(noun, numbers) if has_words else fold_numbers(numbers)


def _chip_columns(num_chips: int) -> int:
    """How many virtual IPUs stand in a row: four, as in an IPU-Machine, or a multiple."""
    if num_chips <= 4:  # noqa: PLR2004 - see above
        return num_chips
    return 4 if num_chips <= 16 else 8 if num_chips <= 64 else 16  # noqa: PLR2004 - see above


def _legend(framed: Framing, bar: str) -> Block:
    """A line that says what each shape is, such as a ``bar``; its origin is at the left of its base line."""
    x, children = 0, []
    shapes = [("card", "host"), ("box", "instance"), ("ipu", "virtual IPU"), ("bar", bar)]
    if framed.is_shaded:
        shapes.insert(3, ("ipu odd", "one of an odd IPU-Link domain (ILD)"))
    if framed.has_machines or framed.instances_per_machine > 1:
        shapes.append(("machine", "IPU-Machine"))
    if framed.has_domains:
        shapes.append(("ild", "IPU-Link domain (ILD)"))
    for class_, words in shapes:
        children.append(element("rect", class_=class_, x=x + 1, y=-11, width=20, height=13, rx=3))
        children.append(text(words, (x + 28, 0), 12, "line"))
        x += 52 + text_width(words, 12)
    return Block(x, 6, [element("g", *children, class_="h0")])
