"""What a build does besides packing files: compile popdist's extension, where there is a C compiler.

Without one, or without Python's headers, the wheel is for every machine, and large all-reduces and rounded steps
take longer.
"""

import os
import runpy
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES: Final = "popdist_py"
PLACE: Final = "popdist/ground/extension"
NAME: Final = "_extension.abi3.so"
"""What the C files there become."""

FLAGS: Final = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-shared")
"""Contracted operations would have other bits than those of Python's code."""


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the extension to a wheel; an editable installation has it beside its sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what the wheel is for."""
        self._scratch = tempfile.mkdtemp(prefix="popdist-extension-")
        folder, made = Path(self.root, PACKAGES, PLACE), Path(self._scratch, NAME)
        if trouble := _compiled_with_digest(folder, made):
            self.app.display_warning(f"popdist goes without {PLACE}/{NAME}: {trouble}")
            return
        if version == "editable":
            temporary = shutil.copy(made, folder / f"{NAME}.new")
            Path(temporary).replace(folder / NAME)
        else:
            build_data["force_include"][str(made)] = f"{PLACE}/{NAME}"
        _mark_as_compiled(build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatch's
        """Leave nothing."""
        shutil.rmtree(self._scratch)


def _mark_as_compiled(build_data: dict[str, Any]) -> None:
    """The wheel is for this kind of machine only."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    build_data["pure_python"] = False
    build_data["tag"] = f"cp311-abi3-{platform}"


def _compiled_with_digest(folder: Path, made: Path) -> str:
    """Compile the sources in ``folder``, and write a digest of them at the end; else why not, in words."""
    extension = runpy.run_path(str(folder / "__init__.py"))
    sources = extension["sources_in"](folder)
    trouble = compiled([path for path in sources if path.suffix == ".c"], made)
    if not trouble:
        with made.open("ab") as file:
            file.write(extension["digest_of_sources"](sources))
    return trouble


def compiled(sources: list[Path], made: Path) -> str:
    """Compile ``sources`` into ``made``; why not, in words, where that does not work."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    headers = sysconfig.get_path("include")
    command = [*compiler, *FLAGS, f"-I{headers}", *map(str, sources), "-o", str(made), "-lm", "-ldl"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ended.stderr if ended.returncode else ""
