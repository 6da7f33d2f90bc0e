"""Output is never lost or torn: whole lines, however the bytes arrive."""

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.errors import PlanError
from poprun.job.output.lines import MAX_LINE_BYTES, LineSplitter, StepLines, Tags, tagged
from poprun.plan.parallelism import mapping_in_words
from poprun.plan.request import OutputSettings
from tests.planning import planned

texts = st.lists(st.sampled_from([b"a", b"\xc3", b"\xa4", b"\n", b"\r", b"\r\n", b"\x00"]), max_size=40).map(
    b"".join
)


def split(chunks: list[bytes]) -> list[bytes]:
    """Every line of a stream that arrives in these chunks."""
    splitter = LineSplitter()
    blocks = [*map(splitter.feed, chunks), splitter.finish()]
    return [line for block in blocks for line in block.splitlines(keepends=True)]


@given(texts, st.lists(st.integers(0, 40), max_size=10))
def test_chunks_do_not_matter(text: bytes, cuts: list[int]) -> None:
    """The same bytes give the same lines wherever the reads cut them."""
    bounds = [0, *sorted(cuts), len(text)]
    chunks = [text[first:last] for first, last in itertools.pairwise(bounds)]

    assert split(chunks) == split([text])


@given(texts)
def test_nothing_is_lost(text: bytes) -> None:
    """The lines together are the stream; only a last line without an ending gets one."""
    whole = b"".join(split([text]))

    assert whole in (text, text + b"\n")


@given(texts)
def test_every_line_has_one_ending(text: bytes) -> None:
    r"""A line ends with ``\n``, ``\r\n`` or ``\r`` and holds none before that."""
    assert all(re.fullmatch(rb"[^\r\n]*(\r\n|\n|\r)", line) for line in split([text]))


def test_a_carriage_return_waits_for_its_line_feed() -> None:
    r"""``\r`` at the end of a read may be the first half of ``\r\n``."""
    splitter = LineSplitter()

    assert splitter.feed(b"one\r") == b""
    assert splitter.feed(b"\ntwo\r") == b"one\r\n"
    assert splitter.feed(b"three") == b"two\r"


def test_an_endless_line_is_passed_on_in_parts() -> None:
    """Memory stays bounded when a program never ends its line."""
    splitter = LineSplitter()
    part = splitter.feed(b"x" * (MAX_LINE_BYTES + 1))

    assert part == b"x" * (MAX_LINE_BYTES + 1)
    assert splitter.finish() == b""


def test_a_stream_that_has_ended_holds_nothing_more() -> None:
    """Its last line is given once."""
    splitter = LineSplitter()
    splitter.feed(b"the end")

    assert splitter.finish() == b"the end\n"
    assert splitter.finish() == b""


@pytest.mark.parametrize(
    ("chunks", "steps"),
    [
        ([b"\r 1%", b"\r 2%", b"\r done\n", b"more"], [b" 1%", b" 2%", b"", b""]),
        ([b"1%\r", b"2%\r", b"done\n"], [b"1%", b"2%", b""]),
        ([b"\r 1", b"%"], [b" 1", b" 1%"]),
        ([b"text"], [b""]),
    ],
)
def test_a_step_is_seen_before_its_end_is_known(chunks: list[bytes], steps: list[bytes]) -> None:
    r"""Whether a bar writes its ``\r`` before each step or behind it."""
    splitter = LineSplitter()

    seen = []
    for chunk in chunks:
        splitter.feed(chunk)
        seen.append(splitter.step)
    assert seen == steps


@given(texts)
def test_every_line_is_tagged_once(text: bytes) -> None:
    """The lines stay as they are, and a block without lines stays empty."""
    block = b"".join(split([text]))
    lines = block.splitlines(keepends=True)

    assert tagged(b"[0] ", block) == b"".join(b"[0] " + line for line in lines)
    assert tagged(b"", block) == block


def tag(*instances: int, is_coloured: bool = False, output: OutputSettings | None = None) -> bytes:
    """The tag of a line of standard error in a job of eight instances on two hosts."""
    asked: dict[str, Any] = {"num_instances": 8, "num_replicas": 16, "hosts": ("n0", "n1")}
    plan = planned(**asked, output=output or OutputSettings())
    return Tags(plan, "stderr", is_coloured=is_coloured).of(instances)


def test_tools_find_what_poprun_writes() -> None:
    """PopRun's tag, where it is asked for."""
    asked = OutputSettings(is_tagged=True)
    assert tag(3, output=asked) == b"[1,3]<stderr>:"
    assert tag(0, 1, 2, 5, output=asked) == b"[1,0-2,5]<stderr>:"


def test_people_find_a_short_one() -> None:
    """In a colour of its own for each instance; what several printed has none."""
    assert tag(3) == b"[3] "
    assert tag(3, is_coloured=True) == b"\x1b[35m[3]\x1b[0m "
    assert tag(0, 1, is_coloured=True) == b"[0-1] "


def test_no_tags() -> None:
    """When they are switched off."""
    assert tag(3, output=OutputSettings(is_tagged=False)) == b""


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        ((5,), b"5 1 n1 10-11 stderr"),
        ((0, 1), b"0-1 0-1 n0 0-3 stderr"),
        ((1, 5), b"1,5 1 n[0-1] 2-3,10-11 stderr"),
    ],
)
def test_every_field_of_a_template(instances: tuple[int, ...], expected: bytes) -> None:
    """The values of several instances are folded."""
    template = "{instance} {local_instance} {host} {replicas} {stream}"
    output = OutputSettings(tag_format=template)

    assert tag(*instances, output=output) == expected
    coloured = tag(2, is_coloured=True, output=OutputSettings(tag_format="\udcff\t{instance}>  "))
    assert coloured == b"\x1b[32m\xff\t2>\x1b[0m  "


def test_a_replica_that_instances_share_is_in_a_tag_once() -> None:
    """A line that several of its instances print alike names it once, with their stages and shards."""
    output = OutputSettings(tag_format="{instance} {replicas}/{stage}.{shard}")
    plan = planned(num_instances=8, mapping=mapping_in_words("tp=2,pp=2"), output=output)
    tags = Tags(plan, "stdout", is_coloured=False)

    assert [tags.of(instances) for instances in ((6,), (0, 1, 4))] == [b"6 1/1.0", b"0-1,4 0-1/0.0-1"]
    assert tag(3, output=output) == b"3 6-7/0.0"
    with pytest.raises(PlanError, match=r"there is no \{stage\} where --instances-per-replica stands for"):
        planned(num_instances=4, instances_per_replica=2, output=output)


def test_a_bar_in_a_pipe_is_a_line_a_second() -> None:
    """The last step is shown when other lines, or the end, come; the rows of bars below each other are one."""
    steps, one, other = StepLines(), (0,), (1,)

    assert steps.show(one, b"no bar\n\n", 0.0) == b"no bar\n\n"
    assert steps.show(one, b"\r 0%\r 1%\r", 0.0) == b" 0%\n"
    assert steps.show(other, b"5%\r", 0.5) == b"5%\n"
    assert steps.show(one, b" 40%\r", 0.9) == b""
    assert steps.show(one, b" 50%\r", 1.0) == b" 50%\n"
    assert steps.show(one, b" 60%\r", 1.1) == b""
    assert steps.show(one, b"\n7%\x1b[A\n\r\n8%\x1b[A\n", 2.0) == b"7%\n"
    assert steps.show(one, b"100%\nloss 3\n", 2.1) == b"100%\nloss 3\n"
    assert steps.end(one) == b""
    assert steps.show(other, b"90%\r", 0.6) == b""
    assert steps.end(other) == b"90%\n"
    assert steps.show(other, b"\n", 3.0) == b"\n"
