"""The rows of docs/torch.md.

Holds tests.torch_row.
"""

import pytest

from tests.torch_names import VERSION, named
from tests.torch_row import Outcomes, digest_in, row

DIGEST = 4 * "0123abcd"


def test_a_row_says_what_was_run_and_whether_the_bits_are_equal() -> None:
    """Equal ones are named; others, and a job without any, are called not equal."""
    outcomes = Outcomes()
    outcomes.counts.update(passed=3, skipped=2)
    outcomes.reasons.update(["no fish", "no fish"])
    assert row(["tests/unit"], outcomes, 3 * [DIGEST]).endswith(
        "| tests/unit | 3 | 0 | 2 | 2 x no fish | equal: 0123abcd |"
    )
    assert row([], Outcomes(), 3 * [DIGEST]).endswith("| none | - | - | - | - | equal: 0123abcd |")
    assert row([], Outcomes(), [DIGEST, DIGEST, "1"]).endswith(f"| NOT EQUAL: {DIGEST}, {DIGEST}, 1 |")
    assert "NOT EQUAL" in row([], Outcomes(), ["", "", ""])


def test_the_digest_is_the_last_that_is_printed() -> None:
    """With a tag before it or not; none is an empty one."""
    assert digest_in(f"epoch 1\n[0] test accuracy 98%, weights {DIGEST}\n") == DIGEST
    assert digest_in("weights lost\n") == ""


def test_names_of_torch_are_found_in_every_version() -> None:
    """The newer one first; a name that torch has never had is an error."""
    newer, older = (
        type("Newer", (), {"all_to_all_single": 1, "alltoall_base": 2}),
        type("Older", (), {"alltoall_base": 3}),
    )
    assert (named(newer, "all_to_all_single"), named(older, "all_to_all_single")) == (1, 3)
    assert VERSION >= (2, 6)
    with pytest.raises(KeyError):
        named(older, "no_such")
