"""A file of hosts stands for a list of them, and its mistakes are told by line."""

from pathlib import Path

import pytest

from poprun.cli.command_line import read_command_line
from poprun.errors import PoprunError
from poprun.text.host_names import read_host_file


def test_each_line_names_hosts(tmp_path: Path) -> None:
    """In the order of the file; comments and empty lines name none."""
    file = tmp_path / "hosts"
    file.write_text("# ours\nhead\n\nnode[0-1]  # two\n tail \n")

    assert read_host_file(str(file)) == ("head", "node0", "node1", "tail")
    line = read_command_line(["--hostfile", str(file), "train"], {})
    assert line.request((), "/").hosts == ("head", "node0", "node1", "tail")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "names no host: write one on each line"),
        ("a\nb slots=2\n", "hosts:2: --host: 'b slots=2': name the host alone, b: poprun deals equally many"),
        ("a\n\nn[2-1]", "hosts:3: --host 'n[2-1]': the range 2-1 runs backwards"),
        ("a\nb\na\n", "--host names a twice"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, what: str) -> None:
    """Each by the line it stands in."""
    file = tmp_path / "hosts"
    file.write_text(text)

    with pytest.raises(PoprunError) as caught:
        read_host_file(str(file))
    assert what in str(caught.value)


def test_hosts_are_named_in_one_place(tmp_path: Path) -> None:
    """Neither a flag nor a variable adds to the file; a file that is not there is told of."""
    file = tmp_path / "hosts"
    file.write_text("a\n")

    with pytest.raises(PoprunError, match="both name the hosts: leave one of them out"):
        read_command_line(["--hostfile", str(file)], {"POPRUN_HOST": "b"})
    with pytest.raises(PoprunError, match=r"--hostfile .*none: No such file or directory"):
        read_command_line(["--hostfile", str(tmp_path / "none")], {})
