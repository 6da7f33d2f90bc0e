"""The template of a tag: what it may name, and what it becomes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.errors import PlanError
from poprun.plan.request import PIPE_TAG, TAG_FIELDS, TERMINAL_TAG, check_tag_format, fill_tag

VALUES = {"instance": "3", "local_instance": "1", "host": "b", "replicas": "6-7", "stream": "stderr"}

pieces = st.lists(
    st.sampled_from(
        ["{", "}", "{{", "}}", "{instance}", "{host:>3}", "{stream:", "!r", "03", "{}", "{rank}", "\n"]
    )
).map("".join)


@pytest.mark.parametrize(
    ("template", "tag"),
    [
        (PIPE_TAG, "[1,3]<stderr>:"),
        (TERMINAL_TAG, "[3] "),
        ("{host}/{local_instance} {replicas}|", "b/1 6-7|"),
        ("{instance:>3}{host:3}{stream:^8}|", "  3b   stderr |"),
        ("{{{instance}}}\t", "{3}\t"),
        (r"\t$", r"\t$"),
        ("", ""),
    ],
)
def test_fields_become_values(template: str, tag: str) -> None:
    """Everything else stays as it was typed."""
    check_tag_format(template)

    assert fill_tag(template, VALUES) == tag


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{rank}", "there is no {rank}; there are {instance}, {local_instance}, {host}, {replicas}, {stream}"),
        ("{}", "there is no {}; there are {instance}"),
        ("{instance", "there is no field at '{instance'"),
        ("[{instance}}", "there is no field at '}'"),
        ("{instance!r}", "there is no field at '{instance!r}'"),
        ("{instance.__class__}", "there is no field at"),
        ("{instance:999999999}", "each with a width if you like, such as {instance:>3}, and {{ }} for braces"),
        ("{instance:03}", "there is no field at"),
    ],
)
def test_what_is_no_template(template: str, what: str) -> None:
    """The message names the fields there are."""
    with pytest.raises(PlanError) as caught:
        check_tag_format(template)
    assert what in str(caught.value)


@given(pieces)
def test_what_was_checked_can_be_filled(template: str) -> None:
    """No template fails later, and one that is refused breaks a rule."""
    try:
        check_tag_format(template)
    except PlanError:
        return
    assert isinstance(fill_tag(template, VALUES), str)


def test_every_field_has_a_value_here() -> None:
    """The tests above know all there are."""
    assert set(TAG_FIELDS) == set(VALUES)
