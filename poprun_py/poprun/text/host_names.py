"""Host names in range notation: `node[00-03,07]-ib` stands for five hosts.

Pure text. :func:`parse_hosts` and :func:`fold_hosts` are inverse to each other: a list of hosts, folded for a
person or a plan file and read again, is the same list in the same order.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product
from typing import Final

from poprun.errors import PlanError, UsageError

MAX_HOSTS: Final = 65_536
MAX_NAME_LENGTH: Final = 253

_ITEM: Final = r"(?:[^,\[\]]|\[[^\[\]]*\])+"
_PART: Final = r"\[([^\[\]]*)\]|([^\[\]]+)"
_RANGE: Final = r"([0-9]{1,253})(?:-([0-9]{1,253}))?"
_NAME: Final = r"[A-Za-z0-9_:][A-Za-z0-9_.:-]*"
_ADDRESS: Final = r"\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]"
_WITH_SLOTS: Final = r"([^:\s]+)(?::[0-9]+|\s+(?:max[_-])?slots\s*=.*)"
_NUMBERED: Final = r"(.*?)([0-9]+)([^0-9]*)"

_CURE: Final = "write hosts like a,b or host[0-2,4]"


def parse_hosts(text: str) -> tuple[str, ...]:
    """The hosts that ``text`` names, in its order; a PlanError if it is malformed, or names one twice.

    There are commas between the names. A bracket holds numbers and ranges, whose leading zeros are kept, and one
    name may have several. Blanks around a name are dropped, and so are the brackets of an IPv6 address.
    """
    items = [_read_item(item, text) for item in _split(text)]
    num_hosts = sum(math.prod(map(_size, parts)) for parts in items)
    if num_hosts > MAX_HOSTS:
        raise PlanError(f"--host {text} names {num_hosts:,} hosts: at most {MAX_HOSTS:,} are possible")
    hosts = tuple("".join(words) for parts in items for words in product(*map(_expand, parts)))
    check_hosts(hosts)
    return hosts


def check_hosts(hosts: Sequence[str]) -> None:
    """Check that every name can be a host's, and none comes twice."""
    for host in hosts:
        if slots := re.fullmatch(_WITH_SLOTS, host):
            raise PlanError(
                f"--host: {host!r}: name the host alone, {slots[1]}: poprun deals equally many instances to each, "
                "and --num-instances says how many run in all"
            )
        if not re.fullmatch(_NAME, host) or len(host) > MAX_NAME_LENGTH:
            raise PlanError(
                f"--host: {host!r} is no host name: names are made of letters, digits, '.', '-', '_' and ':', "
                f"start with no '-' or '.', and have at most {MAX_NAME_LENGTH} characters"
            )
    if len(set(hosts)) < len(hosts):
        ((twice, _),) = Counter(hosts).most_common(1)
        raise PlanError(
            f"--host names {twice} twice: name each host once; --num-instances says how many instances run in all"
        )


def fold_hosts(hosts: Iterable[str]) -> str:
    """``hosts`` in range notation, in their order; inverse of :func:`parse_hosts`.

    Neighbours whose names differ in their last number only become one item.
    """
    return ",".join(_fold_run(list(run)) for _, run in groupby(map(_cut, hosts), key=_affixes))


_Cut = tuple[str, str, str]
"""A name around its last number: what stands before, the number's digits, what stands behind."""


def _cut(host: str) -> _Cut:
    match = re.fullmatch(_NUMBERED, host, re.DOTALL)
    return (match[1], match[2], match[3]) if match else (host, "", "")


def _affixes(cut: _Cut) -> tuple[str, bool, str]:
    return cut[0], bool(cut[1]), cut[2]


def _fold_run(run: list[_Cut]) -> str:
    """One item for names that differ in their last number, or have none."""
    if len(run) == 1 or not run[0][1]:
        return ",".join(map("".join, run))
    before, _, behind = run[0]
    return f"{before}[{_fold_numbers([number for _, number, _ in run])}]{behind}"


def _fold_numbers(numbers: Sequence[str]) -> str:
    """Numbers as text, such as 08, 09, 10 → 08-10; every text is reproduced digit by digit."""
    ranges: list[tuple[str, str]] = []
    for number in numbers:
        if ranges and number == _successor(*ranges[-1]):
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ",".join(first if first == last else f"{first}-{last}" for first, last in ranges)


def _successor(first: str, last: str) -> str:
    """The text that follows ``last`` in a range that starts with ``first``, whose width it keeps."""
    return str(int(last) + 1).zfill(len(first))


_Part = str | list[tuple[str, int]]
"""A literal, or the ranges of a bracket: the first number as text, which tells the width, and the last."""


def _size(part: _Part) -> int:
    return 1 if isinstance(part, str) else sum(last - int(first) + 1 for first, last in part)


def _expand(part: _Part) -> Iterator[str]:
    if isinstance(part, str):
        yield part
        return
    for first, last in part:
        for number in range(int(first), last + 1):
            yield str(number).zfill(len(first))


def _split(text: str) -> list[str]:
    """The items between the commas that stand outside of brackets."""
    items = [item.strip() for item in re.findall(_ITEM, text)]
    separators = re.sub(_ITEM, "", text)
    if not items or separators != "," * (len(items) - 1) or not all(items):
        problem = "has an unbalanced bracket" if set(separators) & set("[]") else "has an empty name"
        raise PlanError(f"--host {text!r} {problem}: {_CURE}")
    return items


def _read_item(item: str, text: str) -> list[_Part]:
    if address := re.fullmatch(_ADDRESS, item):
        return [address[1]]
    parts = re.findall(_PART, item)
    return [literal or _read_bracket(bracket, text) for bracket, literal in parts]


def _read_bracket(bracket: str, text: str) -> list[tuple[str, int]]:
    ranges = []
    for piece in map(str.strip, bracket.split(",")):
        match = re.fullmatch(_RANGE, piece)
        if match is None:
            raise PlanError(f"--host {text!r}: [{bracket}] holds {piece!r}, which is no number or range: {_CURE}")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise PlanError(f"--host {text!r}: the range {piece} runs backwards: write {last}-{first}")
        if last.startswith("0") and len(last) != len(first):
            raise PlanError(
                f"--host {text!r}: the ends of {piece} have different widths: give both as many digits"
            )
        ranges.append((first, int(last)))
    return ranges


def read_host_file(path: str) -> tuple[str, ...]:
    """The hosts that the file at ``path`` names, in its order; errors name the line."""
    from poprun.text.input_files import read_text  # noqa: PLC0415 - most jobs have no hostfile

    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from None
    hosts: list[str] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        try:
            hosts.extend(parse_hosts(text) if text else ())
        except PlanError as error:
            raise UsageError(f"{path}:{number}: {error}") from None
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host: write one on each line")
    check_hosts(hosts)
    return tuple(hosts)
