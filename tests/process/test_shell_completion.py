"""Completion in real shells, by the scripts that poprun gives them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import DEADLINE_SECONDS, run

SCRIPT = """
cd "$HOME"
mkdir -p bin .ssh
printf '#!/bin/sh\\nexec "%s" -m poprun "$@"\\n' "$POPRUN_PYTHON" > bin/poprun
chmod +x bin/poprun
PATH="$HOME/bin:$PATH"
printf 'Host gpu1 gpu2\\n' > .ssh/config
eval "$(_POPRUN_COMPLETE=bash_source poprun)"
offer() {
    COMP_WORDS=(poprun "$@")
    COMP_CWORD=$#
    COMPREPLY=()
    _poprun_completion poprun
    echo "${COMPREPLY[*]}"
}
offer --topology-for
offer --topology-format h
offer -n 2 --host gpu
offer --emit ""
complete -p poprun
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash(tmp_path: Path) -> None:
    """What bash offers for four words, with a host that ssh's configuration names."""
    finished = run(
        ["bash", "--norc", "-c", SCRIPT], env={"HOME": str(tmp_path), "POPRUN_PYTHON": sys.executable}
    ).succeeded()
    *offers, registered = finished.out.splitlines()

    assert offers == ["--topology-format", "html", "gpu1 gpu2", "mpijob jobset sbatch"]
    assert "-F _poprun_completion poprun" in registered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell: str) -> None:
    """Its syntax is right, where that shell is here."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} (Debian: apt install {shell})")
    script = run([sys.executable, "-m", "poprun"], env={"_POPRUN_COMPLETE": f"{shell}_source"}).succeeded().out
    checked = subprocess.run(
        [shell, "-n"], input=script, text=True, env=os.environ, timeout=DEADLINE_SECONDS, check=False
    )
    assert checked.returncode == 0
