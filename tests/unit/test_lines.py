"""Output is never lost or torn: whole lines, however the bytes arrive."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.job.output.lines import MAX_LINE_BYTES, LineSplitter, tagged

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
