"""What a build does besides packing files: compile popdist's extension, where there is a C compiler.

Without one, or without Python's headers, the wheel is for every machine, and small all-reduces take longer.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER: Final = "popdist_py/popdist/host_memory"
NAME: Final = "_quick.abi3.so"
FLAGS: Final = ("-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-shared")


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the extension to a wheel; an editable installation has it beside its sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what the wheel is for."""
        folder = Path(self.root, FOLDER)
        self._scratch = tempfile.mkdtemp(prefix="popdist-extension-")
        made = Path(self._scratch, NAME)
        if trouble := compiled(sorted(folder.glob("quick*.c")), made):
            self.app.display_warning(f"popdist goes without its extension: {trouble}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        if version == "editable":
            temporary = shutil.copy(made, folder / f"{NAME}.new")
            Path(temporary).replace(folder / NAME)
        else:
            build_data["force_include"][str(made)] = f"popdist/host_memory/{NAME}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatch's
        """Leave nothing."""
        shutil.rmtree(self._scratch)


def compiled(sources: list[Path], made: Path) -> str:
    """Compile ``sources`` into ``made``; why not, in words, where that does not work."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    headers = sysconfig.get_path("include")
    command = [*compiler, *FLAGS, f"-I{headers}", *map(str, sources), "-o", str(made), "-lm"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ended.stderr if ended.returncode else ""
