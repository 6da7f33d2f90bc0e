"""Completions of poprun's command line for a shell: options, values of options, hosts and partitions."""

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from click import Command
from click.shell_completion import CompletionItem, get_completion_class

from poprun.cli.command_line import begins_with_option, long_names, take_options
from poprun.cli.options import COMPLETION, FILE, FOLDER, HOSTS, OPTIONS, SIZES, Option
from poprun.devices.pool.place import DEFAULT_POOL, POOL_VARIABLE
from poprun.devices.pool.pool import Pool
from poprun.errors import PoprunError, UsageError

Names = Mapping[str, Callable[[], Sequence[str]]]

_FILES: Final = ("~/.ssh/config", "~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts", "/etc/hosts")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_BYTES: Final = 2**20


def known_hosts(files: Iterable[str] = _FILES) -> list[str]:
    """Return the sorted host names in ``files``, such as ~/.ssh/config; a file that cannot be read is ignored."""
    names: set[str] = set()
    for file in files:
        try:
            with open(os.path.expanduser(file), encoding="utf-8", errors="replace") as stream:
                names.update(host_names_in(os.path.basename(file), stream.read(_MAX_BYTES)))
        except OSError:
            continue
    return sorted(names)


def host_names_in(kind: str, text: str) -> Iterator[str]:
    """Yield host names, but no patterns or addresses, from ``text`` of a file named ``kind``, as known_hosts."""
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if kind == "config":
            candidates = words[1:] if words and words[0].lower() == "host" else []
        elif kind == "hosts":
            candidates = words[1:]
        else:
            candidates = words[0].split(",") if words and words[0][0] not in "|@" else []
        yield from (name for name in candidates if _NAME.fullmatch(name) and not name.replace(".", "").isdigit())


def _partitions() -> Sequence[str]:
    try:
        state = Pool(os.environ.get(POOL_VARIABLE) or DEFAULT_POOL, busy_seconds=1.0).state()
    except (PoprunError, OSError):  # an error is ignored because the shell shows no messages
        return ()
    return sorted(partition.name for partition in state.partitions)


NAMES: Final = {"host": known_hosts, "vipu-partition": _partitions}
"""Functions that list the possible values of an option, for options whose values depend on this machine."""


def answer(instruction: str) -> str:
    """Return the answer to the shell's request ``instruction``: a completion script, or completions of a word."""
    shell, _, what = instruction.partition("_")
    shell_class = get_completion_class(shell)
    if shell_class is None or what not in ("source", "complete"):
        raise UsageError(f"{COMPLETION}={instruction}: give bash_source, zsh_source or fish_source")
    completer = shell_class(Command("poprun"), {}, "poprun", COMPLETION)
    if what == "source":
        return completer.source() + "\n"
    args, incomplete = completer.get_completion_args()
    return "".join(completer.format_completion(item) + "\n" for item in completions(args, incomplete, NAMES))


def completions(args: Sequence[str], incomplete: str, names: Names) -> "list[CompletionItem[str]]":
    """Return the completions of ``incomplete``, the last word of a command line that begins with ``args``."""
    rest, awaiting = deque(word for word in args if word != "="), None  # bash makes "=" a word of its own
    while begins_with_option(rest):
        awaiting = next((option for option, text in _options(rest) if text is None), None)
    word = "" if incomplete == "=" else incomplete
    if awaiting is not None:
        return _values(awaiting, word, names)
    if rest or not word.startswith("-"):
        return [CompletionItem(word, type="file")]
    name, equals, value = word.partition("=")
    if equals:
        offered = [item for option, _ in _options(deque([name])) for item in _values(option, value, names)]
        return [CompletionItem(f"{name}={item.value}", type=item.type) for item in offered]
    short = [f"-{option.short}" for option in OPTIONS if option.short]
    long = [name for name in long_names() if word.startswith("--no-") or not name.startswith("--no-")]
    return [CompletionItem(form) for form in sorted([*short, *long]) if form.startswith(word)]


def _options(words: deque[str]) -> list[tuple[Option, str | None]]:
    """Remove the first option and its value from ``words``; return [(option, value)], [] for an unknown option."""
    try:
        return take_options(words)
    except UsageError:
        return []


def _values(option: Option, begun: str, names: Names) -> "list[CompletionItem[str]]":
    """Return the values of ``option`` that begin with ``begun``; in a list of hosts, complete the last host."""
    if option.kind in (FILE, FOLDER, SIZES):
        return [CompletionItem(begun, type="dir" if option.kind is FOLDER else "file")]
    before, comma, last = begun.rpartition(",") if option.kind is HOSTS else ("", "", begun)
    possible = names[option.name]() if option.name in names else option.kind.choices
    return [CompletionItem(f"{before}{comma}{value}") for value in possible if value.startswith(last)]
