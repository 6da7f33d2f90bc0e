"""Every spelling that PopRun's users write is read, and nothing of the program's is touched."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.cli.click_command import read_words
from poprun.errors import UsageError


def spelled(words: list[str]) -> list[str]:
    """What is read of ``words``, spelled out: each option with its text, and the program behind ``--``."""
    texts, program = read_words(words)
    options = [f"--{name}={text}" for name, given in texts.items() for text in given]
    return [*options, "--", *program] if program else options


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("", ""),
        ("prog", "-- prog"),
        ("--num-instances 2 prog", "--num-instances=2 -- prog"),
        ("--num-instances=2 prog", "--num-instances=2 -- prog"),
        ("--num-instance 2 prog", "--num-instances=2 -- prog"),
        ("--num-in=2 prog", "--num-instances=2 -- prog"),
        ("-n 2 prog", "--num-instances=2 -- prog"),
        ("-n2 prog", "--num-instances=2 -- prog"),
        ("-n=2 prog", "--num-instances=2 -- prog"),
        ("-vn2 prog", "--verbose=1 --num-instances=2 -- prog"),
        ("-vn 2 prog", "--verbose=1 --num-instances=2 -- prog"),
        ("-n -2 prog", "--num-instances=-2 -- prog"),
        ("-H a=b prog", "--host=a=b -- prog"),
        ("-vv prog", "--verbose=2 -- prog"),
        ("--vv prog", "--verbose=2 -- prog"),
        ("--verb prog", "--verbose=1 -- prog"),
        ("--help prog", "--help=1 -- prog"),
        ("--help-a prog", "--help-all=1 -- prog"),
        ("--dry-run prog", "--dry-run=yes -- prog"),
        ("--dry prog", "--dry-run=yes -- prog"),
        ("--dry-run yes prog", "--dry-run=yes -- prog"),
        ("--dry-run off prog", "--dry-run=no -- prog"),
        ("--dry-run=ON prog", "--dry-run=yes -- prog"),
        ("--dry-run=0 prog", "--dry-run=no -- prog"),
        ("--dry-run=true prog", "--dry-run=yes -- prog"),
        ("--no-dry-run prog", "--dry-run=no -- prog"),
        ("--no-tag prog", "--tag-output=no -- prog"),
        ("--no-tag-output=no prog", "--tag-output=yes -- prog"),
        ("--dry-run -- true", "--dry-run=yes -- true"),
        ("--dry-run true true", "--dry-run=yes -- true"),
        ("-- -n 2", "-- -n 2"),
        ("- x", "-- - x"),
        ("prog -n 2 --vv --nonsense", "-- prog -n 2 --vv --nonsense"),
        ("-n 2 prog -- -n 3", "--num-instances=2 -- prog -- -n 3"),
    ],
)
def test_spellings(line: str, read: str) -> None:
    """Each option becomes one long word; the first word that is none starts the program."""
    assert spelled(line.split()) == read.split()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--num-instnces 2 prog", "there is no option --num-instnces: did you mean --num-instances?"),
        ("-num-instances 2 prog", "there is no option -num-instances: did you mean --num-instances?"),
        ("--xyzzy prog", "there is no option --xyzzy: poprun --help-all lists the options"),
        ("-x prog", "there is no option -x: poprun --help-all lists the options"),
        ("-vx prog", "there is no option -x"),
        (
            "--num=ilds 4 prog",
            "--num is the beginning of --num-ilds and of --num-instances and of --num-replicas and of",
        ),
        ("--ver prog", "--ver is the beginning of --verbose and of --version"),
        ("--dry-run=maybe prog", "--dry-run=maybe is neither yes nor no: write --dry-run=yes or --dry-run=no"),
        ("--dry-run= prog", "--dry-run= is neither yes nor no"),
        ("--verbose=2 prog", "--verbose takes no value, and '2' was given: write --verbose"),
        ("--num-instances", "--num-instances needs a value: write --num-instances=VALUE"),
        ("-n", "--num-instances needs a value"),
    ],
)
def test_what_is_refused(line: str, what: str) -> None:
    """Unknown options with the nearest name, ambiguous beginnings with the candidates, values that are none."""
    with pytest.raises(UsageError) as caught:
        read_words(line.split())
    assert what in str(caught.value)


@given(st.lists(st.text(max_size=5), max_size=5))
def test_the_program_keeps_its_words(arguments: list[str]) -> None:
    """Whatever stands behind the program is the program's."""
    assert read_words(["-v", "prog", *arguments]) == ({"verbose": ("1",)}, ("prog", *arguments))
    assert read_words(["--", *arguments, "end"]) == ({}, (*arguments, "end"))
