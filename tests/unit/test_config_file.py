"""A file of options reads back as it was written, and what is wrong in one is told by its line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.cli.command_line import NOT_LOCAL
from poprun.cli.config_file import config_text, export_config, read_config
from poprun.cli.options import OptionValue
from poprun.errors import UsageError

TEXTS = st.text(max_size=12) | st.sampled_from(
    ["yes", "8", "null", "~", "a: b", "[1]", "'", "", " x ", "1e3", "=", '0:"-x A"']
)


@st.composite
def gifts(draw: st.DrawFn) -> tuple[OptionValue, ...]:
    """Any options with any texts; those that are not repeated have one."""
    options = draw(st.lists(st.sampled_from(list(NOT_LOCAL.values())), unique=True, max_size=6))
    return tuple(
        OptionValue(
            option=option,
            texts=tuple(draw(st.lists(TEXTS, min_size=1, max_size=3 if option.kind.read_all else 1))),
        )
        for option in options
    )


def read(text: str) -> dict[str, tuple[str, ...]]:
    """The texts that the file ``text`` gives."""
    return {one.option.name: one.texts for one in read_config(text, "job.yaml", NOT_LOCAL)}


@given(gifts())
def test_a_file_reads_back(given: tuple[OptionValue, ...]) -> None:
    """read_config is the inverse of config_text, whatever the texts are, in ASCII."""
    text = config_text(given)

    assert text.isascii()
    assert read(text) == {one.option.name: one.texts for one in given}


def test_a_file_is_made_for_people() -> None:
    """Numbers, yes and no stand without quotes; a value that is repeated is a list."""
    given = [
        OptionValue(option=NOT_LOCAL["num-instances"], texts=("4",)),
        OptionValue(option=NOT_LOCAL["update-partition"], texts=("yes",)),
        OptionValue(option=NOT_LOCAL["mpi-local-args"], texts=("-x A", "-x B=1")),
    ]

    assert config_text(given) == "num-instances: 4\nupdate-partition: yes\nmpi-local-args:\n- -x A\n- -x B=1\n"


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("", {}),
        ("# nothing\n", {}),
        ("num-replicas: 0x10\nhost: node[0-3]\n", {"num-replicas": ("0x10",), "host": ("node[0-3]",)}),
        ("host: [a, 'b c']\nprint-topology: Yes\n", {"host": ("a", "b c"), "print-topology": ("Yes",)}),
        ('{"timeout": 90, "log-dir": "logs"}', {"timeout": ("90",), "log-dir": ("logs",)}),
    ],
)
def test_what_is_read(text: str, texts: dict[str, tuple[str, ...]]) -> None:
    """Each value is the text that stands in the file, as a flag would be given it; JSON is YAML, too."""
    assert read(text) == texts


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "num-replicas: 3\nnum-instance: 4\n",
            "job.yaml:2: there is no option num-instance for a file: did you mean num-instances?",
        ),
        (
            "num_replicas: 3\n",
            "job.yaml:1: there is no option num_replicas for a file: did you mean num-replicas?",
        ),
        ("--host: a\n", "job.yaml:1: there is no option --host for a file: did you mean host?"),
        ("xyzzy: 1", "job.yaml:1: there is no option xyzzy for a file: poprun --help-all lists the options"),
        ("plan: p.json", "job.yaml:1: there is no option plan for a file"),
        ("? [a]\n: 1\n", "job.yaml:1: there is no option of this form for a file"),
        ("host: a\n\nhost: b\n", "job.yaml:3: host comes twice: job.yaml:1 has it, too"),
        ("\nnum-replicas: [4]\n", "job.yaml:2: num-replicas takes one value, and here is a list"),
        ("num-replicas: {a: 4}", "job.yaml:1: num-replicas takes one value, and here is a mapping"),
        ("host: [a, [b]]", "job.yaml:1: host takes one value, and here is a list"),
        ("host: []", "job.yaml:1: host takes one value, and here is a list"),
        ("log-dir:\nhost: a", "job.yaml:1: log-dir has no value: give it one, or leave the line out"),
        ("- host", "job.yaml:1: a file of options has lines such as num-instances: 4"),
        ("host: a\nlog-dir: 'x\n", "job.yaml:3: this is no YAML: "),
        ("a: *b", "job.yaml:1: this is no YAML: found the alias *b, which is not read here: write the value out"),
        ("a: \x00", "job.yaml: this is no YAML: "),
        ("[" * 5000, "job.yaml:1: this is no YAML: more than 32 lists and mappings in each other"),
    ],
)
def test_what_is_refused(text: str, what: str) -> None:
    """By line, with the nearest name there is."""
    with pytest.raises(UsageError) as caught:
        read(text)
    assert str(caught.value).startswith(what)


def test_a_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    """Only --overwrite-config does so; a place where no file can be is named."""
    file = tmp_path / "job.yaml"
    given = [OptionValue(option=NOT_LOCAL["num-instances"], texts=("4",))]
    file.write_text("mine")

    with pytest.raises(UsageError, match="there is such a file: give another name, or --overwrite-config"):
        export_config(given, str(file), may_overwrite=False)
    assert file.read_text() == "mine"
    export_config(given, str(file), may_overwrite=True)
    assert file.read_text() == "num-instances: 4\n"
    with pytest.raises(UsageError, match=r"--export-config .*/none/job\.yaml: No such file or directory"):
        export_config(given, str(tmp_path / "none" / "job.yaml"), may_overwrite=False)
