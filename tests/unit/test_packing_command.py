"""``python -m popdist.packing``: a table of one's own data, as text, JSON and a picture.

Holds popdist.packing.__main__.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """A file of lengths."""
    path = tmp_path / "lengths.txt"
    path.write_text("5 3,3\n8 2 2 4\n")
    return path


def called(*words: object) -> Result:
    """What the command says."""
    command = runpy.run_module("popdist.packing")["main"]
    return CliRunner().invoke(command, [str(word) for word in words])


def test_the_table(lengths: Path) -> None:
    """Padding first, then each strategy."""
    found = called(lengths, "--max-length", 8)

    assert found.exit_code == 0
    head, *rows = found.output.splitlines()
    assert head.split()[:2] == ["strategy", "most"]
    assert [row.split()[:3] for row in rows] == [
        ["none", "1", "7"],
        ["spfhp", "any", "5"],
        ["lpfhp", "any", "4"],
        ["optimal", "any", "4"],
    ]


def test_json_and_a_histogram(lengths: Path, tmp_path: Path) -> None:
    """The same figures of lengths, of their histogram and of a JSON list."""
    histogram, listed = tmp_path / "histogram.txt", tmp_path / "lengths.json"
    histogram.write_text("0 2 2 1 1 0 0 1")
    listed.write_text("[5, 3, 3, 8, 2, 2, 4]")
    words = ["--max-length", 8, "--format", "json", "--nnlshp"]
    found = json.loads(called(lengths, *words).output)

    assert [row["strategy"] for row in found] == ["none", "spfhp", "lpfhp", "nnlshp", "optimal"]
    assert found[2] | {"num_sequences": 7, "num_packs": 4, "padding_tokens": 5, "lower_bound": 4} == found[2]
    assert json.loads(called(histogram, "--histogram", *words).output) == found
    assert json.loads(called(listed, *words).output) == found


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("5 x", [], "is no list of whole numbers"),
        ("[5, 1.5]", [], "no row of whole numbers"),
        ("[[", [], "is no list of whole numbers"),
        ("", [], "the dataset has no samples to pack"),
        ("5 0", [], "sample 1 has length 0"),
        ("5 900", [], "1 of 2 samples are longer than max_length=512"),
        ("1 -2", ["--histogram"], "counts -2 sequences of length 2"),
        ("5", ["--max-length", 0], "Invalid value for '--max-length'"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, text: str, words: list[object], message: str) -> None:
    """Never a traceback."""
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    found = called(path, *words)

    assert found.exit_code in (1, 2)
    assert message in found.output
    assert isinstance(found.exception, SystemExit)


def test_without_scipy_it_says_what_is_left_out(lengths: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rows are there."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    found = called(lengths, "--max-length", 8)

    assert found.exit_code == 0
    assert "without optimal: optimal needs scipy" in found.output
    assert "lpfhp" in found.output
