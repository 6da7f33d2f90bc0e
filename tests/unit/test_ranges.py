"""Numbers and hosts in range notation, and back again; sizes and durations in words."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.cli.command_line import read_command_line
from poprun.errors import PlanError, PoprunError
from poprun.text.ranges import (
    MAX_HOSTS,
    describe_bytes,
    describe_rate,
    describe_seconds,
    fold_hosts,
    fold_numbers,
    parse_hosts,
    parse_numbers,
    read_host_file,
)
from tests.planning import host_lists


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        (range(0), ""),
        ((5,), "5"),
        (range(5, 6), "5"),
        ((0, 1, 2, 3, 6), "0-3,6"),
        ((0, 2, 4), "0,2,4"),
        (range(65_536), "0-65535"),
    ],
)
def test_fold_numbers(numbers: tuple[int, ...] | range, text: str) -> None:
    """Neighbours become a range."""
    assert fold_numbers(numbers) == text


@given(st.sets(st.integers(0, 10_000), max_size=50).map(sorted))
def test_folded_numbers_read_back(numbers: list[int]) -> None:
    """parse_numbers is the inverse of fold_numbers."""
    assert parse_numbers(fold_numbers(numbers)) == tuple(numbers)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", "1,", ",1", "3-1", "2,1", "1,1", "0-99999999", "1 2"])
def test_what_is_refused(text: str) -> None:
    """Text that is no list of ascending ranges, or stands for more numbers than a machine has cores."""
    with pytest.raises(ValueError, match=r"no list|ascend|more than"):
        parse_numbers(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ("a",)),
        ("a,b", ("a", "b")),
        ("a, b ,c", ("a", "b", "c")),
        ("host[0-2,4]", ("host0", "host1", "host2", "host4")),
        ("n[4,0-1]", ("n4", "n0", "n1")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("n[98-101]", ("n98", "n99", "n100", "n101")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
        ("n[7]", ("n7",)),
        ("r[0-1]n[0-1]", ("r0n0", "r0n1", "r1n0", "r1n1")),
        ("n[1-2]-ib.example.org", ("n1-ib.example.org", "n2-ib.example.org")),
        ("[fd00::2],[::ffff:10.0.0.7],a", ("fd00::2", "::ffff:10.0.0.7", "a")),
        ("login,n[1-2],10.0.0.7,::1", ("login", "n1", "n2", "10.0.0.7", "::1")),
    ],
)
def test_parse_hosts(text: str, hosts: tuple[str, ...]) -> None:
    """Commas separate names, brackets stand for numbers and ranges of them, in the order written."""
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty name"),
        ("a,,b", "empty name"),
        ("a, ,b", "empty name"),
        (",a", "empty name"),
        ("n[1-2", "unbalanced bracket"),
        ("n1-2]", "unbalanced bracket"),
        ("n[[1]]", "unbalanced bracket"),
        ("n[]", "'', which is no number or range"),
        ("n[1-]", "'1-', which is no number or range"),
        ("n[a-b]", "'a-b', which is no number or range"),
        ("n[1-2-3]", "'1-2-3', which is no number or range"),
        ("n[٣]", "which is no number or range"),
        ("n[3-1]", "runs backwards: write 1-3"),
        ("n[8-011]", "different widths"),
        ("a,a", "names a twice: name each host once"),
        ("n[1-2],n2", "names n2 twice"),
        ("n[0-65534],n65534", "names n65534 twice"),
        ("-oProxyCommand=x", "no host name"),
        ("a b", "no host name"),
        ("n1:4,n2:4", "'n1:4': name the host alone, n1: poprun deals equally many instances to each"),
        ("n1 slots=4", "'n1 slots=4': name the host alone, n1"),
        ("n1,root@n2", "'root@n2': name the host alone, n2; write 'Host n2' and below it 'User root' into"),
        ("n;reboot", "no host name"),
        ("n[0-65536]", "names 65,537 hosts: at most 65,536"),
        ("n[0-99999999999999999999999]", "at most 65,536"),
        ("a[0-999]b[0-999]c[0-999]", "at most 65,536"),
        ("x" * 254, "at most 253 characters"),
    ],
)
def test_hosts_that_are_refused(text: str, what: str) -> None:
    """Malformed brackets and ranges, names that are none, duplicates, and too many: each says what and why."""
    with pytest.raises(PlanError, match="--host") as caught:
        parse_hosts(text)
    assert what in str(caught.value)


def test_as_many_hosts_as_allowed() -> None:
    """The bound itself is possible, and folds back to the text it came from."""
    hosts = parse_hosts("n[0-65535]")

    assert len(hosts) == MAX_HOSTS
    assert fold_hosts(hosts) == "n[0-65535]"


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ((), ""),
        (("a",), "a"),
        (("a", "b"), "a,b"),
        (("n0", "n1", "n2", "n4"), "n[0-2,4]"),
        (("n2", "n1"), "n[2,1]"),
        (("n08", "n09", "n10"), "n[08-10]"),
        (("n8", "n9", "n10"), "n[8-10]"),
        (("n9", "n09", "n10"), "n[9,09-10]"),
        (("n1-ib", "n2-ib", "m"), "n[1-2]-ib,m"),
        (("r0n0", "r0n1", "r1n0"), "r0n[0-1],r1n0"),
    ],
)
def test_fold_hosts(hosts: tuple[str, ...], text: str) -> None:
    """Neighbours that differ in their last number fold into one item; order and digits stay."""
    assert fold_hosts(hosts) == text


@given(st.integers(1, 12).flatmap(host_lists))
def test_folded_hosts_read_back(hosts: list[str]) -> None:
    """parse_hosts is the inverse of fold_hosts, in the same order."""
    assert parse_hosts(fold_hosts(hosts)) == tuple(hosts)


@given(st.text(alphabet="an0-9,[]1 ", max_size=14))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text raises anything but a PlanError, and what is read folds back to the same hosts."""
    try:
        hosts = parse_hosts(text)
    except PlanError:
        return
    assert parse_hosts(fold_hosts(hosts)) == hosts


def test_each_line_names_hosts(tmp_path: Path) -> None:
    """In the order of the file; comments and empty lines name none."""
    file = tmp_path / "hosts"
    file.write_text("# ours\nhead\n\nnode[0-1]  # two\n tail \n")

    assert read_host_file(str(file)) == ("head", "node0", "node1", "tail")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_host_file(str(file))[0] == "head"
    line = read_command_line(["--hostfile", str(file), "train"], {})
    assert line.request((), "/").hosts == ("head", "node0", "node1", "tail")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "names no host: write one on each line"),
        ("a\nb slots=2\n", "hosts:2: --host: 'b slots=2': name the host alone, b: poprun deals equally many"),
        ("a\n\nn[2-1]", "hosts:3: --host 'n[2-1]': the range 2-1 runs backwards"),
        ("a\nb\na\n", "--host names a twice"),
        ("a\nstraße\n", "hosts: line 2 is not in UTF-8: save the file in that encoding"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, what: str) -> None:
    """Each by the line it stands in."""
    file = tmp_path / "hosts"
    file.write_text(text, encoding="latin-1")

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


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (12_700_000_000, "11.8 GiB"), (2**40 * 700, "700 TiB")]
)
def test_sizes(num_bytes: int, text: str) -> None:
    """Three digits and a unit."""
    assert describe_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.5, "0.5 s"), (59, "59 s"), (80, "1 min 20 s"), (7200, "2 h"), (90061, "1 d 1 h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    """The two largest ones."""
    assert describe_seconds(seconds) == text


def test_rates_have_three_digits() -> None:
    """And no powers of ten."""
    assert [describe_rate(it) for it in (0.0, 0.0312, 2.5, 99.94, 1234.4)] == [
        "0",
        "0.0312",
        "2.5",
        "99.9",
        "1,234",
    ]
