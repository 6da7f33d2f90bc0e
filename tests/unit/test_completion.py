"""What is offered for a word that is being typed."""

import pytest

from poprun.cli.completion import answer, completions, host_names_in, known_hosts
from poprun.errors import UsageError

NAMES = {"host": lambda: ["gpu1", "gpu2", "login"], "vipu-partition": lambda: ["half", "whole"]}


@pytest.mark.parametrize(
    ("args", "incomplete", "offered"),
    [
        ([], "--topo", ["--topology-format"]),
        ([], "--no-tag-o", ["--no-tag-output"]),
        (["--dry-run"], "--num-r", ["--num-replicas"]),
        (["--topology-format"], "", ["table", "text", "json", "yaml", "svg", "html", "mermaid"]),
        (["--topology-f"], "ht", ["html"]),
        (["--topology-format", "="], "m", ["mermaid"]),
        (["--topology-format"], "=", ["table", "text", "json", "yaml", "svg", "html", "mermaid"]),
        ([], "--topology-format=s", ["--topology-format=svg"]),
        (["-n", "2", "--host"], "g", ["gpu1", "gpu2"]),
        (["-H"], "gpu1,l", ["gpu1,login"]),
        ([], "--host=gpu1,g", ["--host=gpu1,gpu1", "--host=gpu1,gpu2"]),
        (["--vipu-partition"], "", ["half", "whole"]),
        (["--num-instances"], "", []),
        (["--no-such-option"], "--num-i", ["--num-ilds", "--num-instances"]),
        (["-v"], "--emi", ["--emit"]),
        ([], "--hel", ["--help", "--help-all"]),
        ([], "--nonsense", []),
        ([], "--nonsense=", []),
    ],
)
def test_what_is_offered(args: list[str], incomplete: str, offered: list[str]) -> None:
    """Options, their values, and names that the machine knows; in PopRun's spellings."""
    assert [item.value for item in completions(args, incomplete, NAMES)] == offered


@pytest.mark.parametrize(
    ("args", "incomplete", "kind"),
    [
        ([], "", "file"),
        (["--dry-run"], "tr", "file"),
        (["--dry-run", "python"], "--num", "file"),
        (["--", "-x"], "-", "file"),
        (["-n", "2", "train.py", "--host"], "g", "file"),
        (["--plan"], "", "file"),
        (["--log-dir"], "", "dir"),
    ],
)
def test_files(args: list[str], incomplete: str, kind: str) -> None:
    """The shell itself completes the program, all of the program's words, and files of options."""
    (item,) = completions(args, incomplete, NAMES)
    assert (item.type, item.value) == (kind, incomplete)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell: str) -> None:
    """Each shell is given a script that asks poprun."""
    assert f"_POPRUN_COMPLETE={shell}_complete" in answer(f"{shell}_source")


@pytest.mark.parametrize("instruction", ["csh_source", "bash", "bash_forget", ""])
def test_other_shells(instruction: str) -> None:
    """Nobody else is known, and the message says who is."""
    with pytest.raises(UsageError, match="give bash_source, zsh_source or fish_source"):
        answer(instruction)


@pytest.mark.parametrize(
    ("kind", "text", "names"),
    [
        ("config", "Host gpu1 gpu2 *.cluster !x\n  HostName 10.0.0.1\nhost login # me", ["gpu1", "gpu2", "login"]),
        (
            "known_hosts",
            "gpu1,10.0.0.1 ssh-ed25519 AAAA\n|1|abc= ssh-rsa AAAA\n@revoked gpu3 ssh-rsa A\n\n[n]:22 x y",
            ["gpu1"],
        ),
        ("hosts", "127.0.0.1 localhost\n::1 ip6-localhost # six\n10.0.0.1 gpu1 gpu1.example.org", None),
    ],
)
def test_hosts_that_files_know(kind: str, text: str, names: list[str] | None) -> None:
    """No pattern, no hashed name and no address."""
    assert list(host_names_in(kind, text)) == (names or ["localhost", "ip6-localhost", "gpu1", "gpu1.example.org"])


def test_files_that_are_not_there() -> None:
    """A user without such files knows no hosts."""
    assert known_hosts(["/nowhere/config"]) == []
