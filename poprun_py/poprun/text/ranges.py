"""Conversion of numbers, host names, sizes and durations to text; parsing of numbers and host names. Pure.

Numbers look like ``0-3,6`` and hosts like ``node[00-03,07]-ib``. Parsing of such a text returns the same numbers
or hosts in the same order.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise, product
from typing import Annotated, Final

from poprun.errors import PlanError, UsageError

MAX_NUMBERS: Final = 65_536

_BYTES: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_SECONDS: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))

_RANGES = r"(?:[0-9]{1,9}(?:-[0-9]{1,9})?(?:,(?!$)|$))*"

Hosts = Annotated[tuple[str, ...], "in range notation"]  # names of hosts, which a file contains as one text

MAX_HOSTS: Final = 65_536
MAX_NAME_LENGTH: Final = 253

_ITEM: Final = r"(?:[^,\[\]]|\[[^\[\]]*\])+"
_PART: Final = r"\[([^\[\]]*)\]|([^\[\]]+)"
_RANGE: Final = r"([0-9]{1,253})(?:-([0-9]{1,253}))?"
_NAME: Final = r"[A-Za-z0-9_:][A-Za-z0-9_.:-]*"
_ADDRESS: Final = r"\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]"
_WITH_USER: Final = r"([^@\s]+)@([^@\s]+)"
_WITH_SLOTS: Final = r"([^:\s]+)(?::[0-9]+|\s+(?:max[_-])?slots\s*=.*)"
_NUMBERED: Final = r"(.*?)([0-9]+)([^0-9]*)"

_CURE: Final = "write hosts like a,b or host[0-2,4]"


def counted(count: int, noun: str) -> str:
    """Return ``count`` with the noun in singular or plural, such as ``1 host`` or ``1,024 hosts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def unit_of_bytes(num_bytes: float) -> tuple[str, int]:
    """Return the name and the bytes of the largest unit, from B to TiB, that is not larger than ``num_bytes``."""
    return next((it for it in _BYTES if num_bytes >= it[1]), _BYTES[-1])


def describe_bytes(num_bytes: int) -> str:
    """Return ``num_bytes`` as text with two or three digits and a unit, such as ``11.8 GiB``."""
    unit, factor = unit_of_bytes(num_bytes)
    size = num_bytes / factor
    return f"{size:.0f} {unit}" if size >= 100 or factor == 1 else f"{size:.1f} {unit}"


def describe_seconds(seconds: float) -> str:
    """Return ``seconds`` as text with one or two units, such as ``3.2 s``, ``1 min 20 s`` or ``2 h``."""
    whole = round(seconds)
    for (unit, size), (smaller, smaller_size) in pairwise(_SECONDS):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds:.3g} s"


def describe_rate(per_second: float) -> str:
    """Return the rate ``per_second`` as text: with three digits, such as ``35.7``; from 100 on, as ``1,234``."""
    return f"{per_second:.3g}" if per_second < 100 else f"{per_second:,.0f}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return ``noun`` followed by ascending ``numbers``, such as ``replica 3`` or ``replicas 0-3``."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {fold_numbers(numbers)}"


def fold_numbers(numbers: Iterable[int]) -> str:
    """Return ascending ``numbers`` as text with ranges: ``0-3,6`` for (0, 1, 2, 3, 6); an empty text for ()."""
    if isinstance(numbers, range) and numbers.step == 1:
        return _piece(str(numbers[0]), str(numbers[-1])) if numbers else ""
    return _fold_digits(list(map(str, numbers)))


def parse_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a text such as ``0-3,6``. Raise ValueError if they do not ascend, or are too many."""
    if not re.fullmatch(_RANGES, text):
        raise ValueError(f"{text!r} is no list of numbers and ranges such as 0-3,6")
    ranges = [
        (int(first), int(last or first))
        for first, _, last in (piece.partition("-") for piece in text.split(","))
        if first
    ]
    bounds = [bound for pair in ranges for bound in pair]
    ascends = all(first <= last for first, last in ranges) and all(
        before[1] < after[0] for before, after in pairwise(ranges)
    )
    if not ascends:
        raise ValueError(f"the numbers of {text!r} do not ascend")
    if bounds and sum(last - first + 1 for first, last in ranges) > MAX_NUMBERS:
        raise ValueError(f"{text!r} holds more than {MAX_NUMBERS:,} numbers")
    return tuple(number for first, last in ranges for number in range(first, last + 1))


def _piece(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"


def parse_hosts(text: str) -> tuple[str, ...]:
    """Return the host names in a list such as ``a,node[00-03]-ib``, in order; leading zeros are kept."""
    items = [_read_item(item, text) for item in _split(text)]
    num_hosts = sum(math.prod(map(_size, parts)) for parts in items)
    if num_hosts > MAX_HOSTS:
        raise PlanError(f"--host {text} names {num_hosts:,} hosts: at most {MAX_HOSTS:,} are possible")
    hosts = tuple("".join(words) for parts in items for words in product(*map(_expand, parts)))
    check_hosts(hosts)
    return hosts


def check_hosts(hosts: Sequence[str]) -> None:
    """Raise PlanError if a name in ``hosts`` is no host name for a shell and ssh, or occurs twice."""
    for host in hosts:
        if slots := re.fullmatch(_WITH_SLOTS, host):
            raise PlanError(
                f"--host: {host!r}: name the host alone, {slots[1]}: poprun deals equally many instances to each, "
                "and --num-instances says how many run in all"
            )
        if login := re.fullmatch(_WITH_USER, host):
            raise PlanError(
                f"--host: {host!r}: name the host alone, {login[2]}; write 'Host {login[2]}' and below it "
                f"'User {login[1]}' into ~/.ssh/config, or into the file of --ssh-config"
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
    """Return the host names ``hosts`` as one text such as ``node[00-03]``, which :func:`parse_hosts` reads."""
    cuts = map(_cut, hosts)
    return ",".join(
        _fold_run(list(run)) for _, run in groupby(cuts, key=lambda cut: (cut[0], cut[1] != "", cut[2]))
    )


_Cut = tuple[str, str, str]
"""A host name, cut at its last number: the text before the number, the digits, and the text after the number."""


def _cut(host: str) -> _Cut:
    match = re.fullmatch(_NUMBERED, host, re.DOTALL)
    return (match[1], match[2], match[3]) if match else (host, "", "")


def _fold_run(run: list[_Cut]) -> str:
    """Return names that differ only in their last number as ``node[1-3]``; join names without number by ``,``."""
    if len(run) == 1 or not run[0][1]:
        return ",".join(map("".join, run))
    before, _, behind = run[0]
    return f"{before}[{_fold_digits([number for _, number, _ in run])}]{behind}"


def _fold_digits(numbers: Sequence[str]) -> str:
    """Return numbers as text with ranges, such as ``08-10`` for 08, 09, 10; leading zeros are kept."""
    ranges: list[tuple[str, str]] = []
    for number in numbers:
        first, last = ranges[-1] if ranges else ("", "")
        if last and number == str(int(last) + 1).zfill(len(first)):  # all numbers of a range have the same width
            ranges[-1] = (first, number)
        else:
            ranges.append((number, number))
    return ",".join(_piece(first, last) for first, last in ranges)


_Part = str | list[tuple[str, int]]
"""A part of a host name: a literal text, or the ranges in a bracket. A range is its first number, as text with
leading zeros, and its last number."""


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
    """Return the items of the list ``text``, cut at commas outside of brackets. Raises PlanError if malformed."""
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
    """Return the host names in the file ``path``, one or more a line. Raise UsageError if a name is wrong."""
    from poprun.text.input_files import read_text

    hosts: list[str] = []
    for number, line in enumerate(read_text(path, "--hostfile").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        try:
            hosts.extend(parse_hosts(text) if text else ())
        except PlanError as error:
            raise UsageError(f"{path}:{number}: {error}") from None
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host: write one on each line")
    check_hosts(hosts)
    return tuple(hosts)
