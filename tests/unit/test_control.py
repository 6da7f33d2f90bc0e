"""The messages between poprun and its agents.

Holds poprun, poprun.launch.messages and poprun.launch.messages.proofs.
"""

import os
import socket

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from poprun.launch.messages import ProtocolError, control
from poprun.launch.messages.control import EVENT_FIELDS, LineReader, Link, check_event, decode, encode
from poprun.launch.messages.proofs import Handshake, Seal, new_key

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
messages = st.dictionaries(st.text(), json_values, max_size=3)


def chunks(stream: bytes, num_bytes: int) -> list[bytes]:
    """``stream`` as it may arrive."""
    return [stream[first : first + num_bytes] for first in range(0, len(stream), num_bytes)]


@given(st.lists(messages, max_size=5), st.integers(1, 50))
def test_messages_survive_any_cut(sent: list[dict[str, object]], num_bytes: int) -> None:
    """What is encoded is read back, in order, however the bytes arrive."""
    reader = LineReader()
    lines = [line for chunk in chunks(b"".join(map(encode, sent)), num_bytes) for line in reader.feed(chunk)[0]]

    assert list(map(decode, lines)) == sent


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=6), st.integers(1, 50))
@example([b"x" * 30, b"short"], 25)
def test_a_line_that_is_too_long_takes_no_other_with_it(lines: list[bytes], num_bytes: int) -> None:
    """Those that are short enough come through, the others are counted, and memory stays bounded."""
    reader = LineReader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "MAX_MESSAGE_BYTES", 20)
        fed = [reader.feed(chunk) for chunk in chunks(b"".join(line + b"\n" for line in lines), num_bytes)]

    assert [line for kept, _ in fed for line in kept] == [line for line in lines if len(line) <= 20]
    assert sum(num_lost for _, num_lost in fed) == sum(len(line) > 20 for line in lines)


@pytest.mark.parametrize("line", [b"nonsense", b"[1, 2]", b"\xff", b"", b"[" * 100_000])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    """Nothing but JSON objects is taken."""
    with pytest.raises(ProtocolError, match="a control message is no"):
        decode(line)


@given(messages | st.fixed_dictionaries({"event": st.sampled_from(sorted(EVENT_FIELDS)) | json_values}))
def test_an_event_that_is_taken_has_all_that_belongs_to_it(message: dict[str, object]) -> None:
    """Whatever else is refused, in words."""
    try:
        check_event(message)
    except ProtocolError:
        event("refused")
    else:
        fields = EVENT_FIELDS[str(message["event"])]
        assert all(type(message[name]) is wanted for name, wanted in fields.items())


def sealed_pair(agent_key: str, poprun_key: str) -> tuple[Seal, Seal]:
    """The seals of both ends after a handshake: the agent's and poprun's."""
    agent, poprun = Handshake(agent_key, is_agent=True), Handshake(poprun_key, is_agent=False)
    of_poprun = poprun.check(agent.nonce, agent.proof(poprun.nonce))
    return agent.check(poprun.nonce, poprun.proof(agent.nonce)), of_poprun


lines = st.binary(max_size=60).filter(lambda line: b"\n" not in line)


@given(st.lists(lines, max_size=4), st.lists(lines, max_size=4))
def test_sealed_lines_are_opened_by_the_other_end(ups: list[bytes], downs: list[bytes]) -> None:
    """In both directions, in order."""
    agent, poprun = sealed_pair(KEY, KEY)

    assert [poprun.open(agent.seal(line + b"\n").removesuffix(b"\n")) for line in ups] == ups
    assert [agent.open(poprun.seal(line + b"\n").removesuffix(b"\n")) for line in downs] == downs


@given(lines, lines, st.data())
def test_what_was_changed_invented_repeated_or_left_out_is_refused(
    line: bytes, other: bytes, data: st.DataObject
) -> None:
    """And the next genuine line is taken all the same."""
    agent, poprun = sealed_pair(KEY, KEY)
    first, second = agent.seal(line), agent.seal(line)
    at = data.draw(st.integers(0, len(first) - 1))
    changed = first[:at] + bytes([first[at] ^ 1]) + first[at + 1 :]
    for forged in (other, changed, second, poprun.seal(line)):
        with pytest.raises(ProtocolError, match="seal"):
            poprun.open(forged)

    assert poprun.open(first) == line
    with pytest.raises(ProtocolError, match="seal"):
        poprun.open(first)
    assert poprun.open(second) == line


KEY = new_key()


def test_who_does_not_know_the_key_is_refused() -> None:
    """An agent of another job, and a poprun of another."""
    with pytest.raises(ProtocolError, match="does not know the key of this job"):
        sealed_pair(KEY, new_key())
    agent, poprun = Handshake(KEY, is_agent=True), Handshake(new_key(), is_agent=False)
    with pytest.raises(ProtocolError, match="does not know the key of this job"):
        agent.check(poprun.nonce, poprun.proof(agent.nonce))


def test_a_proof_is_no_proof_of_the_other_side() -> None:
    """Sent back to where it came from it shows nothing."""
    agent, poprun = Handshake(KEY, is_agent=True), Handshake(KEY, is_agent=False)
    with pytest.raises(ProtocolError):
        poprun.check(poprun.nonce, poprun.proof(poprun.nonce))
    with pytest.raises(ProtocolError):
        agent.check(agent.nonce, agent.proof(agent.nonce))


def test_streams_and_every_lease_of_a_job_come_along() -> None:
    """Three of each: a pod's virtual IPUs, GPUs and cores are leased apart."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        Link(ours).send({"order": "start"}, descriptors=[ours.fileno()] * 6)
        received = Link(theirs).receive()

    assert received is not None
    for descriptor in received.descriptors:
        os.close(descriptor)
    assert len(received.descriptors) == 6
