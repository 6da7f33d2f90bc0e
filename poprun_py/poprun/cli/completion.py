"""What the shell offers when Tab is pressed behind `poprun`: click's scripts, and the table of options.

Click's own resolution is left out: it does not know PopRun's spellings, nor that the program's words are its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from click import Command
from click.shell_completion import CompletionItem, get_completion_class

from poprun.cli.kinds import FILE, FOLDER, HOSTS
from poprun.cli.option import COMPLETION, Option
from poprun.cli.options import BY_NAME, OPTIONS
from poprun.errors import UsageError

Item = CompletionItem[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Where names are looked for that only the machine knows.

    Attributes:
        hosts: Gives the hosts.
        partitions: Gives the partitions of virtual IPUs.
    """

    hosts: Callable[[], Sequence[str]]
    partitions: Callable[[], Sequence[str]]


def answer(instruction: str, names: Names) -> str:
    """The script for a shell, or what its script is to offer, as ``instruction`` says: ``bash_source``.

    Raises:
        UsageError: If it names another shell, or asks for something else.
    """
    shell, _, what = instruction.partition("_")
    known = get_completion_class(shell)
    if known is None or what not in ("source", "complete"):
        raise UsageError(f"{COMPLETION}={instruction}: give bash_source, zsh_source or fish_source")
    asked = known(Command("poprun"), {}, "poprun", COMPLETION)
    if what == "source":
        return asked.source() + "\n"
    args, incomplete = asked.get_completion_args()
    return "".join(asked.format_completion(item) + "\n" for item in completions(args, incomplete, names))


def completions(args: Sequence[str], incomplete: str, names: Names) -> list[Item]:
    """What may stand for ``incomplete``, the beginning of a word, behind the words ``args``."""
    option, has_program = _walk(args)
    word = "" if incomplete == "=" else incomplete
    if option is not None:
        return _values(option, word, names)
    if has_program or not word.startswith("-"):
        return [CompletionItem(word, type="file")]
    name, equals, value = word.partition("=")
    option = _option(name)
    if equals:
        items = [] if option is None else _values(option, value, names)
        return [CompletionItem(f"{name}={item.value}", type=item.type) for item in items]
    return [CompletionItem(it) for it in _option_names(word) if it.startswith(word)]


def _walk(args: Sequence[str]) -> tuple[Option | None, bool]:
    """The option whose value comes next, if one does, and whether the program stands there already."""
    pending: Option | None = None
    for word in args:
        if word == "=":  # bash takes it for a word of its own
            continue
        if pending is not None:
            pending = None
        elif word == "--" or not word.startswith("-"):
            return None, True
        else:
            pending = None if "=" in word else _option(word)
            if pending is not None and (pending.kind.is_switch or pending.kind.is_counted):
                pending = None
    return pending, False


def _option(word: str) -> Option | None:
    """The option that ``word`` is, or begins; None where there is none, or several."""
    if not word.startswith("--"):
        return next((it for it in OPTIONS if it.short and word == f"-{it.short}"), None)
    written = word.removeprefix("--")
    found = [BY_NAME[written]] if written in BY_NAME else [it for it in OPTIONS if it.name.startswith(written)]
    return found[0] if len(found) == 1 else None


def _option_names(word: str) -> list[str]:
    names = ["--help", *(f"--{it.name}" for it in OPTIONS), *(f"-{it.short}" for it in OPTIONS if it.short)]
    if word.startswith("--no-"):
        names += [f"--no-{it.name}" for it in OPTIONS if it.kind.is_switch]
    return sorted(names)


def _values(option: Option, begun: str, names: Names) -> list[Item]:
    """What the value of ``option`` may be; of a list of hosts the last one is completed."""
    if option.kind in (FILE, FOLDER):
        return [CompletionItem(begun, type="file" if option.kind is FILE else "dir")]
    before, comma, last = begun.rpartition(",") if option.kind is HOSTS else ("", "", begun)
    if option.kind is HOSTS:
        found = names.hosts()
    else:
        found = names.partitions() if option.name == "vipu-partition" else option.kind.choices
    return [CompletionItem(f"{before}{comma}{it}") for it in found if it.startswith(last)]
