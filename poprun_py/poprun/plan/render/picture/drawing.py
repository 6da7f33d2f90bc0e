"""The drawing of a plan in SVG: virtual IPUs and replicas in instances, instances in hosts, hosts in a grid.

Each host, instance and gap is a group with a text that describes it. The more is drawn the smaller everything is,
but always legible.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from poprun.plan.inventory import IPUS_PER_MACHINE
from poprun.plan.plan import InstancePlan, LaunchPlan
from poprun.plan.render.picture.blocks import Block, Grid, grid
from poprun.plan.render.picture.scene import Framing, Scene, framing
from poprun.plan.render.words import (
    describe_host,
    describe_instance,
    describe_more_hosts,
    describe_more_instances,
    domains_of,
    instances_of_host,
    stands_for,
)
from poprun.text.ranges import counted, fold_numbers, numbered
from popsize.svg import NUM_HUES, cut, element, middle, rect, text, text_width

MAX_WIDTH: Final = 1500  # width of a picture if its parts allow it: it fits a screen of 1,600 pixels
_LEGEND: Final = 34  # from the hosts to the base line of the legend
_MIN_NAME: Final = 8  # characters of a host's name that every host has room for
Description = Callable[[str, str], tuple[Sequence[str], Mapping[str, object]]]
"""A function that returns the first elements and the attributes of an SVG group, which explain the group to a
reader, given the class of the group and the words of the explanation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """The sizes in pixels of the smallest parts of a picture: text, virtual IPUs, bars and gaps."""

    text: int
    chip: tuple[int, int]
    bar: int
    space: int  # between the parts of an instance; twice that between instances
    max_bars: int  # largest number of an instance's replicas for which each has a bar
    is_wordy: bool = False  # whether labels have words, however wide that makes an instance

    @property
    def heading(self) -> int:
        """Height in pixels of the line with a host's name."""
        return self.text + 2 * self.space + 6


_SIZES: Final = (
    (32, PartSizes(text=13, chip=(52, 36), bar=22, space=6, max_bars=8, is_wordy=True)),
    (256, PartSizes(text=12, chip=(37, 23), bar=18, space=4, max_bars=4)),
    (math.inf, PartSizes(text=11, chip=(32, 17), bar=15, space=2, max_bars=2)),
)
"""The sizes of the parts of a picture, each with the largest number of drawn virtual IPUs for these sizes."""


def draw(scene: Scene, describe: Description) -> Block:
    """Return the drawing of ``scene``, the parts of a plan to draw, with a legend; ``describe`` explains parts."""
    sizes = next(sizes for most, sizes in _SIZES if scene.num_ipus <= most)
    drawer = _Drawer(scene, sizes, framing(scene), describe)
    picture = drawer.hosts()
    legend = _legend(drawer.framed, "/".join(scene.plan.parallelism.place_of(0)) or "replica")
    top = picture.size[1] + _LEGEND
    size = (max(picture.size[0], legend.size[0]), top + legend.size[1])
    return Block(size, [*picture.children, legend.at(0, top)])


class _Drawer:
    """The drawing of one picture of a plan, in which all instances have one size, and all hosts one size."""

    def __init__(self, scene: Scene, sizes: PartSizes, framed: Framing, describe: Description) -> None:
        self.scene, self.plan, self.sizes, self.framed = scene, scene.plan, sizes, framed
        self.describe = describe
        num_chips = len(scene.ipus(0))
        self.chips = Grid(num_chips, _chip_columns(num_chips), sizes.chip, sizes.space)
        width, height = self.chips.size
        self.has_words = True
        self.has_words = sizes.is_wordy or self._widest_label() <= width
        num_bars = len(self._bar_labels(self.plan.instance(0)))
        heights = [sizes.text, height, *[sizes.bar] * num_bars, *[sizes.text] * sizes.is_wordy]
        *self.tops, bottom = accumulate(heights, lambda top, it: top + it + sizes.space, initial=sizes.space)
        self.box = (max(width, self._widest_label()) + 2 * sizes.space, bottom)

    def hosts(self) -> Block:
        """Return the drawing of all hosts, in frames of IPU-Link domains if a domain has several hosts."""
        space, framed = self.sizes.space, self.framed
        cards: list[Block] = []
        for host in self.scene.hosts:
            if isinstance(host, range):
                cards.append(self.gap("host", host, describe_more_hosts(self.plan, host), cards[0].size))
            else:
                cards.append(self.host(host))
        if framed.hosts_per_domain > 1:
            cards = self.frames("ild", cards, framed.hosts_per_domain, 3 * space, 4 * space)
        return grid(cards, 4 * space, MAX_WIDTH)

    def host(self, index: int) -> Block:
        """Return the drawing of a host: its name and instances, in frames of IPU-Machines and IPU-Link domains."""
        plan, sizes, space, framed = self.plan, self.sizes, self.sizes.space, self.framed
        boxes = [
            self.gap("instance", part, describe_more_instances(plan, part), self.box)
            if isinstance(part, range)
            else self.instance(plan.instance(part))
            for part in self.scene.instances(index)
        ]
        if framed.instances_per_machine > 1:
            boxes = self.frames("machine", boxes, framed.instances_per_machine, space, 2 * space)
        if framed.domains_per_host > 1:
            count = len(boxes) // framed.domains_per_host
            boxes = self.frames("ild", boxes, count, 2 * space, 2 * space, index * framed.domains_per_host)
        inner = grid(boxes, 2 * space, self._room)
        domains = "" if framed.has_domains else domains_of(plan, instances_of_host(plan, index))
        domains_width, size = text_width(domains, sizes.text), sizes.text + 2
        width = max(inner.size[0], text_width("m" * _MIN_NAME, size) + domains_width) + 4 * space
        height = inner.size[1] + sizes.heading + 2 * space
        name = cut(plan.hosts[index], width - 5 * space - domains_width, size)
        children = [
            rect((width, height), class_="card", rx=3 * space),
            text(name, (2 * space + 1, middle(0, sizes.heading, size)), size, "name"),
        ]
        if domains:
            place = (width - 2 * space - domains_width // 2, middle(0, sizes.heading, sizes.text))
            children.append(text(domains, place, sizes.text, "note"))
        children.append(inner.at((width - inner.size[0]) // 2, sizes.heading))
        return self.described("host", describe_host(plan, index), (width, height), children)

    def frames(
        self, class_: str, blocks: Sequence[Block], count: int, padding: int, gap: int, first: int = 0
    ) -> list[Block]:
        """Return frames, each around ``count`` of ``blocks``; IPU-Link domains have numbers from ``first`` on."""
        size, space, frames = self.sizes.text, self.sizes.space, []
        top = padding + size + space if class_ == "ild" else padding
        for start in range(0, len(blocks), count):
            inner = grid(blocks[start : start + count], gap, self._room)
            width, height = inner.size[0] + 2 * padding, inner.size[1] + top + padding
            words = text(f"ILD {first + start // count}", (2 * space + 1, space + size), size, "name")
            frame = rect((width, height), class_=class_, rx=3 * space)
            children = [frame, words if class_ == "ild" else "", inner.at(padding, top)]
            frames.append(Block((width, height), children))
        return frames

    def instance(self, instance: InstancePlan) -> Block:
        """Return the drawing of an instance: a box with its number, its virtual IPUs and its replicas."""
        sizes, size, width = self.sizes, self.sizes.text, self.box[0]
        title = self._label("instance", [instance.index])
        corner = ((width - self.chips.size[0]) // 2, self.tops[1])
        class_ = "ipu odd" if self.framed.is_shaded and self.plan.ild_of(instance.index) % 2 else "ipu"
        children = [
            rect(self.box, class_="box", rx=2 * sizes.space),
            text(title, (width // 2, self.tops[0] + size - size // 8), size, "number"),
            *self.bands(corner),
        ]
        for index, ipu in enumerate(self.scene.ipus(instance.index)):
            word = "…" if isinstance(ipu, range) else f"IPU {ipu}" if sizes.is_wordy else str(ipu)
            x, y = self.chips.place(index)
            children += self.labelled(class_, word, (corner[0] + x, corner[1] + y), sizes.chip)
        for top, word in zip(self.tops[2:], self._bar_labels(instance), strict=False):
            children += self.labelled("bar", word, (sizes.space, top), (width - 2 * sizes.space, sizes.bar))
        if sizes.is_wordy:
            words = cut(stands_for(instance), width - sizes.space, size - 1)
            children.append(text(words, (width // 2, self.tops[-1] + size - size // 8), size - 1, "note"))
        hue = f"instance h{hue_of(self.plan, instance)}"
        return self.described(hue, describe_instance(self.plan, instance), self.box, children)

    def bands(self, corner: tuple[int, int]) -> Iterator[str]:
        """Yield bands behind an instance's virtual IPUs, one band for each IPU-Machine of four IPUs."""
        (width, height), space = self.sizes.chip, self.sizes.space
        side = space // 2 if self.chips.num_columns > IPUS_PER_MACHINE else space - 1
        size = (IPUS_PER_MACHINE * (width + space) - space + 2 * side, height + space - 2)
        for index in range(0, self.chips.num_cells if self.framed.has_machines else 0, IPUS_PER_MACHINE):
            x, y = self.chips.place(index)
            place = (corner[0] + x - side, corner[1] + y - space // 2 + 1)
            yield rect(size, place, "machine band", rx=space)

    def labelled(self, class_: str, word: str, place: tuple[int, int], size: tuple[int, int]) -> tuple[str, str]:
        """Return a rectangle, which is a virtual IPU or a bar, and the text ``word`` in its middle."""
        middle_of_line = (place[0] + size[0] // 2, middle(place[1], size[1], self.sizes.text))
        return rect(size, place, class_, rx=self.sizes.text // 4), text(word, middle_of_line, self.sizes.text)

    def gap(self, noun: str, items: range, words: str, size: tuple[int, int]) -> Block:
        """Return a dashed box that stands for the hosts or instances ``items``, which are not drawn."""
        (width, height), sizes = size, self.sizes
        line = sizes.text * 3 // 2
        count, nouns = counted(len(items), noun).split()
        texts = [f"+ {count}", nouns, *words.splitlines()[1:]][: max(2, height // line - 1)]
        top = (height - len(texts) * line) // 2 + sizes.text
        children = [rect(size, class_="gap", rx=2 * sizes.space)]
        for row, part in enumerate(texts):
            shown = cut(part, width - sizes.text, sizes.text)
            children.append(text(shown, (width // 2, top + row * line), sizes.text, "note" if row else "number"))
        return self.described("more", words, size, children)

    def described(self, class_: str, words: str, size: tuple[int, int], children: Sequence[str]) -> Block:
        """Return a group of SVG elements with the explanation ``words`` for a reader."""
        first, attributes = self.describe(class_, words)
        return Block(size, [*first, *children, "\n"], {"class_": class_, **attributes})

    @property
    def _room(self) -> int:
        """The largest width in pixels of what is drawn in a host, without frames and margins."""
        return MAX_WIDTH - 16 * self.sizes.space

    def _bar_labels(self, instance: InstancePlan) -> list[str]:
        """Return the texts of an instance's bars: one for each of its replicas, or, if the instance has a part of
        one replica, one each for replica, stage and shard. If there is no room for all bars, return one text.
        """
        replicas, place = instance.replicas, self.plan.parallelism.place_of(instance.index)
        if place and self.has_words and len(place) <= self.sizes.max_bars:
            return [f"{name} {number}" for name, number in place.items()]
        if place:
            return ["/".join(map(str, place.values()))]
        if len(replicas) > self.sizes.max_bars:
            return [self._label("replica", replicas)]
        return [self._label("replica", [replica]) for replica in replicas]

    def _widest_label(self) -> int:
        """Return the width in pixels of the widest text in the last instance, which has the longest numbers."""
        sizes, last = self.sizes, self.plan.instance(self.plan.num_instances - 1)
        labels = [self._label("instance", [last.index]), *self._bar_labels(last)]
        labels += [stands_for(last)[:24]] if sizes.is_wordy else []
        return max(text_width(words, sizes.text) for words in labels) + sizes.space

    def _label(self, noun: str, numbers: Sequence[int]) -> str:
        """Return the text on an instance or a replica: noun and numbers, or only numbers if room is small."""
        return numbered(noun, numbers) if self.has_words else fold_numbers(numbers)


def hue_of(plan: LaunchPlan, instance: InstancePlan) -> int:
    """Return the number of an instance's colour; instances that share a replica have the same colour."""
    number = instance.part.replica if plan.parallelism.is_shared else instance.index
    return number % NUM_HUES


def _chip_columns(num_chips: int) -> int:
    """Return how many of ``num_chips`` virtual IPUs are in a row: 4 of up to 16, 8 of up to 64, otherwise 16."""
    return min(num_chips, 4 if num_chips <= 16 else 8 if num_chips <= 64 else 16)


def _legend(framed: Framing, bar: str) -> Block:
    """Return the drawing of a line that names each shape; ``bar`` is the name of the bars, such as ``replica``."""
    x, children = 0, []
    shapes = [("card", "host"), ("box", "instance"), ("ipu", "virtual IPU"), ("bar", bar)]
    if framed.is_shaded:
        shapes.insert(3, ("ipu odd", "one of an odd IPU-Link domain (ILD)"))
    if framed.has_machines or framed.instances_per_machine > 1:
        shapes.append(("machine", "IPU-Machine"))
    if framed.has_domains:
        shapes.append(("ild", "IPU-Link domain (ILD)"))
    for class_, words in shapes:
        children.append(rect((20, 13), (x + 1, -11), class_, rx=3))
        children.append(text(words, (x + 28, 0), 12, "line"))
        x += 52 + text_width(words, 12)
    return Block((x, 6), [element("g", *children, class_="h0")])
