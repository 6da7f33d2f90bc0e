"""The page on which a program says how far it has come.

Holds popdist.startup.stack_signal and poprun.launch.program_watch.
"""

import math
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import popdist
from popdist.ground.contract import PROGRESS_DESCRIPTOR
from popdist.ground.progress import (
    FINALIZE,
    MAX_MEMBER_RUNS,
    MAX_NAME_BYTES,
    PAGE_BYTES,
    USED_BYTES,
    Progress,
    ProgressPage,
)
from popdist.startup import sitecustomize, stack_signal
from popdist.startup.stack_signal import PAGE_NAME
from poprun.launch.program_watch import _PAGE_NAME

counts = st.integers(0, 2**63 - 1)
counts_of_instances = st.integers(0, 2**20)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=MAX_NAME_BYTES // 4)
pages = st.builds(
    Progress,
    pid=st.integers(0, 2**22),
    stack_signal=st.integers(0, 64),
    has_joined=st.booleans(),
    num_steps=counts,
    step=st.none() | counts,
    loss=st.none() | st.floats(allow_nan=False),
    num_waits=counts,
    waiting_since_seconds=st.none() | st.floats(1e-3, 1e9),
    collective=names,
    member_runs=st.lists(st.tuples(counts_of_instances, counts_of_instances), max_size=MAX_MEMBER_RUNS).map(tuple),
    has_trained_alone=st.booleans(),
)


@given(pages)
def test_what_is_written_is_read(progress: Progress) -> None:
    """All of it, and from the bytes that an agent passes on."""
    page = bytearray(PAGE_BYTES)
    ProgressPage(memoryview(page)).write(progress)

    assert Progress.read(bytes(page[:USED_BYTES])) == progress


@given(pages, pages | names, st.integers(1, USED_BYTES - 1))
def test_a_page_that_was_copied_in_the_middle_of_a_change_does_not_count(
    before: Progress, change: Progress | str, cut: int
) -> None:
    """A reader that is overtaken by the writer sees the one, the other, or knows that it saw neither."""
    page = bytearray(PAGE_BYTES)
    writer = ProgressPage(memoryview(page))
    writer.write(before)
    first = bytes(page[:cut])
    if isinstance(change, Progress):
        writer.write(change)
    else:
        writer.wait(change)

    read, after = Progress.read(first + bytes(page[cut:USED_BYTES])), writer.read()

    if isinstance(change, Progress):
        assert read in (before, after, None)
    else:
        assert read is None or read.collective in (before.collective, after.collective)


@given(st.lists(st.sampled_from(["barrier()", "all_reduce(float32[3] on cpu)"]) | st.none(), min_size=1))
def test_waits_are_counted_and_named(waits: list[str | None]) -> None:
    """Each has its name, and the page says whether the program still waits; None goes on."""
    page = ProgressPage()
    for collective in waits:
        if collective is None:
            page.end_wait()
        else:
            page.wait(collective)

    found, begun = page.read(), [collective for collective in waits if collective]
    assert (found.num_waits, found.collective) == (len(begun), begun[-1] if begun else "")
    assert (found.waiting_since_seconds is None) is (waits[-1] is None)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_the_members_of_a_part_of_the_job_are_numbers_on_the_page(members: set[int]) -> None:
    """As runs, as far as the page has room for them; else all instances may be meant."""
    page = ProgressPage()
    page.wait(f"barrier() among {members}", tuple(members))

    runs = page.read().member_runs

    assert {index for first, last in runs for index in range(first, last + 1)} in (members, set())
    assert runs or len(members) > MAX_MEMBER_RUNS
    page.wait("barrier()")
    assert page.read().member_runs == ()


def test_a_name_that_is_too_long_keeps_both_ends() -> None:
    """The end says which instances take part."""
    page = ProgressPage()
    page.wait(f"all_reduce({'9, ' * 100}) among instances 0 and 1")

    read = page.read()

    assert read.collective.startswith("all_reduce(9, 9, ")
    assert read.collective.endswith(" among instances 0 and 1")


@pytest.mark.parametrize("content", [b"", bytes(16)])
def test_what_is_no_page(content: bytes) -> None:
    """Too few bytes say nothing."""
    assert Progress.read(content) is None


def test_a_page_nobody_wrote() -> None:
    """Zeros are a program that has said nothing."""
    assert Progress.read(bytes(USED_BYTES)) == Progress()


def test_a_loss_that_is_no_number_stays_the_same() -> None:
    """Two looks at a page that says NaN find no progress between them."""
    page = ProgressPage()
    page.report(3, math.nan)

    assert page.read() == page.read()
    assert (page.read().step, math.isnan(page.read().loss or 0.0)) == (3, True)


@pytest.fixture
def descriptor() -> Iterator[int]:
    """An empty page of progress."""
    descriptor = os.memfd_create(PAGE_NAME)
    os.ftruncate(descriptor, PAGE_BYTES)
    yield descriptor
    os.close(descriptor)


def read(descriptor: int) -> Progress | None:
    """What an agent would read."""
    return Progress.read(os.pread(descriptor, USED_BYTES, 0))


def test_a_process_writes_on_its_page_and_on_nothing_else(descriptor: int) -> None:
    """Another file under the same number is left as it is."""
    other = os.memfd_create("other")
    os.ftruncate(other, PAGE_BYTES)
    mine, foreign = ProgressPage(), ProgressPage()
    mine.open(descriptor)
    foreign.open(other)
    mine.wait("barrier()")
    mine.count_step()
    foreign.count_step()
    found = read(descriptor)
    mine.close()
    mine.count_step()

    assert found is not None
    assert (found.pid, found.num_steps, found.collective) == (os.getpid(), 1, "barrier()")
    assert read(descriptor) == found
    assert os.pread(other, PAGE_BYTES, 0) == bytes(PAGE_BYTES)
    os.close(other)


def test_the_hook_writes_what_the_page_says(descriptor: int) -> None:
    """It spells places and names by itself: it must run in a Python that has no popdist."""
    stack_signal.announce(descriptor, 63)
    stack_signal.announce_recorder(descriptor, 9)

    assert read(descriptor) == Progress(pid=os.getpid(), stack_signal=63, recorder=9)
    assert stack_signal.announced_pid(descriptor) == os.getpid()
    assert sitecustomize.PROGRESS_DESCRIPTOR == PROGRESS_DESCRIPTOR
    assert sitecustomize.FINALIZE.decode() == FINALIZE
    assert sitecustomize.load_module("startup", "stack_signal").PAGE_NAME == PAGE_NAME == _PAGE_NAME


@pytest.mark.parametrize(("has_joined", "is_taken"), [(True, False), (False, True)])
def test_the_first_process_that_joined_keeps_the_page(
    descriptor: int, *, has_joined: bool, is_taken: bool
) -> None:
    """A helper that inherits the descriptor does not take it; the program behind a wrapper does."""
    page = bytearray(PAGE_BYTES)
    ProgressPage(memoryview(page)).write(Progress(pid=os.getppid(), has_joined=has_joined, num_steps=3))
    os.pwrite(descriptor, page, 0)
    late = ProgressPage()
    late.open(descriptor)

    found = read(descriptor)
    assert found is not None
    assert (found.pid == os.getpid(), found.num_steps == 0) == (is_taken, is_taken)


def test_a_program_reports_its_step_and_its_loss(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone too; what is left out stays."""
    mine = ProgressPage()
    mine.open(descriptor)
    monkeypatch.setattr("popdist.metrics.reported_numbers.progress_page", mine)
    popdist.report(step=0)
    popdist.report(loss=0.5)

    found = read(descriptor)
    assert found is not None
    assert (found.step, found.loss) == (0, 0.5)
