"""A header says in a fixed number of bytes what an instance is about to do."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.errors import Names, name_instances, remedy_of_lone_call
from popdist.exchange.groups import (
    HEADER_BYTES,
    MAX_NUMBERS,
    TEXT_BYTES,
    are_some_preempted,
    disagreement,
    pack,
    text_of,
    unpack,
)

NAMES = Names(members=(0, 1, 2, 3), noun="instance")
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=MAX_NUMBERS)


@given(TEXTS, NUMBERS, st.booleans())
def test_what_is_packed_is_unpacked(text: str, numbers: list[int], preempted: bool) -> None:  # noqa: FBT001 - drawn
    """Every header has the same length; numbers, and a text that fits, come back as they were."""
    header = pack(text, numbers, is_preempted=preempted)
    assert len(header) == HEADER_BYTES
    assert are_some_preempted([pack(text), header]) == preempted
    assert unpack([header]) == [numbers]
    assert unpack([header, header, pack(text, [1])]) == [numbers, numbers, [1]]
    assert text_of(header) == text or len(text.encode()) > TEXT_BYTES


@given(st.text("ab", min_size=200, max_size=300), st.text("ab", min_size=200, max_size=300))
def test_equal_headers_mean_equal_texts(first: str, second: str) -> None:
    """A text that was cut still differs from every other one."""
    assert unpack([pack(first), pack(second, [1])]) == ([[], [1]] if first == second else None)


@pytest.mark.parametrize("length", [TEXT_BYTES, TEXT_BYTES + 1, 4 * TEXT_BYTES])
def test_texts_that_differ_at_their_end_only_differ(length: int) -> None:
    """The end of a long one is cut, and its digest is not."""
    assert pack("a" * (length - 1) + "b") != pack("a" * length)


@pytest.mark.parametrize("numbers", [[0] * (MAX_NUMBERS + 1), [2**63], [1.5]])
def test_numbers_that_do_not_fit_are_refused(numbers: list[int]) -> None:
    """Too many numbers, too large ones and fractions are errors where they are sent."""
    with pytest.raises(ValueError, match="a header carries"):
        pack("exchange", numbers)


def test_a_disagreement_names_who_brought_what() -> None:
    """One line for each text, none when all are equal."""
    assert disagreement({0: "barrier()", 1: "barrier()"}, NAMES) is None
    assert disagreement({0: "a", 1: "b", 2: "a", 3: "a"}, NAMES) == (
        "the instances are not in the same collective:\n  instances 0, 2 and 3: a\n  instance 1: b"
    )


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (
            "checkpoint.save('out', keep=3, step=None, model)",
            r"call checkpoint.save\(\) on all .* first replica writes",
        ),
        ("checkpoint.load_latest('out', model)", r"call checkpoint.load_latest\(\) on all instances, outside of"),
        ("Mean.compute()", r"call Mean.compute\(\) on all instances, and print .*execute_on_instances"),
        ("all_reduce(float32[2] on cpu, op='sum')", r"call all_reduce\(\) on all instances"),
        ("gather()", r"call gather\(\) on all instances"),
    ],
)
def test_a_call_that_one_instance_makes_alone_comes_with_its_remedy(call: str, remedy: str) -> None:
    """Where the others train, or were lost; not where two such calls differ, or none is one."""
    told = disagreement({0: call, 1: "micro_batches(accumulation=1)"}, NAMES)
    assert told is not None
    assert re.search(remedy, told.splitlines()[-1])
    assert re.search(remedy, remedy_of_lone_call([f"BackendError: instance 0, in {call}: the connection"]))
    assert remedy_of_lone_call([call, "barrier()"]) == remedy_of_lone_call(["micro_batches(accumulation=1)"]) == ""


@pytest.mark.parametrize(
    ("instances", "words"),
    [
        ([3], "instance 3"),
        ([1, 0], "instances 0 and 1"),
        ([0, 1, 2], "instances 0 to 2"),
        ([0, 2], "instances 0 and 2"),
        ([5, 0, 1, 2, 7], "instances 0 to 2, 5 and 7"),
        (list(range(0, 14, 2)), "7 instances from 0 to 12"),
    ],
)
def test_instances_in_words(instances: list[int], words: str) -> None:
    """Runs are folded, so that a thousand instances stay one line."""
    assert name_instances(instances) == words
