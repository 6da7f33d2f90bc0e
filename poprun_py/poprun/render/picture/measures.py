"""How large everything in a picture is, in pixels: the more there is the smaller, but never illegible."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

from poprun.render.picture.grids import FrameStyle, Grid, Nest, nested
from poprun.render.picture.scene import Framing, HostScene, InstanceScene, Scene, framing
from poprun.render.words import domains_of, numbered, stands_for

MAX_WIDTH: Final = 1200
"""Of a picture whose parts allow it."""

ASPECT: Final = 1.5
"""Width over height that a picture comes near to."""

_CHARACTER: Final = 0.6
"""Width of a character over the size of its font, generously."""

_MIN_NAME: Final = 8
"""Characters of a host's name that every host has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The sizes of the smallest parts.

    Attributes:
        text: Of the font.
        chip_width: Of a virtual IPU.
        chip_height: Of a virtual IPU.
        bar: Height of a replica.
        space: Between the parts of an instance; twice that between instances.
        max_bars: Replicas of an instance up to which each has a bar of its own.
        is_wordy: Whether labels have words, however wide that makes an instance.
    """

    text: int
    chip_width: int
    chip_height: int
    bar: int
    space: int
    max_bars: int
    is_wordy: bool = False


LEVELS: Final = (
    (32, Level(text=13, chip_width=52, chip_height=36, bar=22, space=6, max_bars=8, is_wordy=True)),
    (256, Level(text=11, chip_width=34, chip_height=22, bar=17, space=4, max_bars=4)),
    (math.inf, Level(text=9, chip_width=27, chip_height=14, bar=13, space=2, max_bars=2)),
)
"""Each with the number of shown virtual IPUs up to which it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What all hosts, instances and replicas of a picture have in common.

    Attributes:
        level: The sizes of the smallest parts.
        chips: The virtual IPUs of an instance.
        num_bars: Bars of an instance: one for each replica, or one for all.
        has_words: Whether labels have words, or numbers only.
        framing: What is framed.
        boxes: The instances of a host.
        cards: The hosts.
    """

    level: Level
    chips: Grid
    num_bars: int
    has_words: bool
    framing: Framing
    boxes: Nest
    cards: Nest

    @property
    def heading(self) -> int:
        """Height of a host above its instances."""
        return heading(self.level)


def heading(level: Level) -> int:
    """Height of a host's name with what is around it."""
    return level.text + 2 * level.space + 6


def measure(scene: Scene) -> Measures:
    """The sizes for ``scene``: it comes near to ``ASPECT`` and is no wider than ``MAX_WIDTH`` if possible."""
    host = next(it for it in scene.hosts if isinstance(it, HostScene))
    instance = next(it for it in host.instances if isinstance(it, InstanceScene))
    level = next(level for most, level in LEVELS if scene.num_ipus <= most)
    num_chips = len(instance.slots)
    chips = Grid(num_chips, _chip_columns(num_chips), level.chip_width, level.chip_height, level.space)
    num_replicas = scene.plan.layout.num_local_replicas
    num_bars = num_replicas if num_replicas <= level.max_bars else 1
    has_words = level.is_wordy or _widest(scene, level, has_words=True) <= chips.size[0]
    box = _box(level, chips, num_bars, _widest(scene, level, has_words=has_words))
    framed = framing(scene)
    domains = "" if framed.has_domains else domains_of(scene.plan, range(scene.plan.num_instances_per_host))
    name = text_width("m" * _MIN_NAME, level.text + 2) + text_width(domains, level.text)
    boxes, cards = min(_layouts(scene, level, framed, box, name), key=_ugliness)
    return Measures(
        level=level,
        chips=chips,
        num_bars=num_bars,
        has_words=has_words,
        framing=framed,
        boxes=boxes,
        cards=cards,
    )


def text_width(text: str, size: int) -> int:
    """Pixels that ``text`` may take."""
    return math.ceil(len(text) * size * _CHARACTER)


def cut(text: str, width: int, size: int) -> str:
    """``text``, shortened in its middle if it might be wider than ``width``."""
    most = max(3, int(width / (size * _CHARACTER)))
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def _chip_columns(num_chips: int) -> int:
    """IPU-Machines have four."""
    if num_chips <= 4:  # noqa: PLR2004 - see above
        return num_chips
    return 4 if num_chips <= 16 else 8 if num_chips <= 64 else 16  # noqa: PLR2004 - see above


def _widest(scene: Scene, level: Level, *, has_words: bool) -> int:
    """Width of the widest label of an instance: those with the highest numbers."""
    last = scene.plan.instance(scene.plan.num_instances - 1)
    is_split = len(last.replicas) <= level.max_bars
    replicas = range(last.replicas[-1], last.replicas[-1] + 1) if is_split else last.replicas
    labels = [label("instance", range(last.index, last.index + 1), has_words=has_words)]
    labels += [label("replica", replicas, has_words=has_words)]
    labels += [stands_for(last)[:24]] if level.is_wordy else []
    return max(text_width(text, level.text) for text in labels) + level.space


def label(noun: str, numbers: range, *, has_words: bool) -> str:
    """What is written on an instance or a replica."""
    return numbered(noun, numbers).removeprefix("" if has_words else noun).removeprefix("s").strip()


def _box(level: Level, chips: Grid, num_bars: int, widest: int) -> tuple[int, int]:
    """Width and height of an instance: its label, its virtual IPUs, its replicas, and what it stands for."""
    num_parts = num_bars + 3 + level.is_wordy
    text = level.text * (2 if level.is_wordy else 1)
    return (
        max(chips.size[0], widest) + 2 * level.space,
        text + chips.size[1] + num_bars * level.bar + num_parts * level.space,
    )


def _layouts(
    scene: Scene, level: Level, framed: Framing, box: tuple[int, int], name: int
) -> Iterator[tuple[Nest, Nest]]:
    """Every way to put instances into rows in a host of at least the width ``name``, and hosts into rows."""
    space = level.space
    host = next(it for it in scene.hosts if isinstance(it, HostScene))
    num_boxes, num_cards = len(host.instances), len(scene.hosts)
    in_hosts, around_hosts = _styles(level, framed, num_boxes, num_cards)
    for style in in_hosts:
        num_boxes //= style.count
    for style in around_hosts:
        num_cards //= style.count
    counts = [num_boxes, *(style.count for style in in_hosts)]
    least = 1 if framed.instances_per_machine == 1 else 2  # an IPU-Machine is wide, not high
    for columns in product(range(least, counts[0] + 1), *(range(1, count + 1) for count in counts[1:])):
        boxes = nested(box, 2 * space, in_hosts, num_boxes, columns)
        width, height = boxes.size
        card = (max(width, name) + 4 * space, height + heading(level) + 2 * space)
        around = [num_cards, *(style.count for style in around_hosts)]
        for places in product(*(range(1, count + 1) for count in around)):
            yield boxes, nested(card, 4 * space, around_hosts, num_cards, places)


def _styles(
    level: Level, framed: Framing, num_boxes: int, num_cards: int
) -> tuple[list[FrameStyle], list[FrameStyle]]:
    """The frames around instances of a host, and those around hosts, the innermost first."""
    space, top = level.space, level.text + 2 * level.space
    in_hosts, around_hosts = [], []
    if framed.instances_per_machine > 1:
        count = num_boxes // framed.domains_per_host // framed.instances_per_machine
        in_hosts.append(FrameStyle(kind="machine", count=count, padding=space, heading=space, gap=2 * space))
    if framed.domains_per_host > 1:
        in_hosts.append(
            FrameStyle(kind="ild", count=framed.domains_per_host, padding=2 * space, heading=top, gap=2 * space)
        )
    if framed.hosts_per_domain > 1:
        count = num_cards // framed.hosts_per_domain
        around_hosts.append(
            FrameStyle(kind="ild", count=count, padding=3 * space, heading=top + space, gap=4 * space)
        )
    return in_hosts, around_hosts


def _ugliness(grids: tuple[Nest, Nest]) -> float:
    """How far the whole is from what a picture should be."""
    boxes, cards = grids
    width, height = cards.size
    excess = max(0, width - MAX_WIDTH) / 10
    is_ragged = bool(boxes.waste)
    return abs(math.log(width / height / ASPECT)) + 3 * boxes.waste + is_ragged + cards.waste + excess
