"""A finder of stand-ins for libraries of PopTorch's programs, which Python asks if all other finders fail.

The stand-ins belong to poptorch, a separate distribution: if poptorch is not installed, nothing is found.
poptorch, `popdist.poptorch` and poprun's start-up hook register the finder; `import popdist` does not. The finder
answers import statements only: ``importlib.util.find_spec`` and metadata still say that the library is not
installed. The hook loads only this file, in any Python from 3.8 on, so the file imports almost nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing takes longer than importing this module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType

ORIGIN = "poptorch"
"""The origin in the import specs of the stand-ins."""

_FOLDER = "poptorch.stubs"

_SERVED = {
    "horovod": "",
    "horovod.torch": "horovod_torch",
    "popart": "popart_enums",
    "libpvti": "trace_points",
    "pvti": "trace_points",
    "examples_utils": "operation_loading",
    "examples_utils.load_lib_utils": "operation_loading",
    "examples_utils.load_lib_utils.load_lib_utils": "operation_loading",
}
"""For each library with a stand-in, the module in poptorch that has the public names of the library."""

_MACHINERY = "<frozen importlib._bootstrap>"


class LastFinder:
    """A finder of poptorch's substitutes for libraries such as horovod; Python asks this finder last."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of poptorch's substitute for the library ``name`` in an import statement, else None."""
        if name not in _SERVED:
            return None
        from importlib.machinery import ModuleSpec
        from inspect import currentframe

        if not _is_from_import(currentframe()):  # because Python does not say which code asks
            return None
        for other in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = other.find_spec(name, path, target)
            if spec is not None:
                return spec
        parent = sys.modules.get(name.rpartition(".")[0])
        if parent is not None and getattr(parent.__spec__, "origin", None) != ORIGIN:
            return None
        if not _is_poptorch_here():
            return None
        is_package = any(other.startswith(name + ".") for other in _SERVED)
        return ModuleSpec(name, _Loader(), origin=ORIGIN, is_package=is_package)  # type: ignore[arg-type] # the object has a loader's methods


class _Loader:
    """A loader that fills a library's substitute with the public names of a module of poptorch."""

    def create_module(self, _spec: ModuleSpec) -> None:
        """Return None, so that Python makes the module itself."""

    def exec_module(self, module: ModuleType) -> None:
        """Copy the public names of poptorch's module into ``module``."""
        source = _SERVED[module.__name__]
        if source:
            names = vars(__import__(_FOLDER + "." + source, fromlist=["__all__"]))
            module.__dict__.update({name: names[name] for name in ("__doc__", "__getattr__", *names["__all__"])})


def _is_from_import(finder_frame: FrameType | None) -> bool:
    """Whether an import statement calls the finder, and not ``importlib.util.find_spec``."""
    frame = None if finder_frame is None else finder_frame.f_back
    if frame is None or frame.f_code.co_filename != _MACHINERY:
        return False
    while frame is not None and frame.f_code.co_filename == _MACHINERY:
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__") != "importlib.util"


def _is_poptorch_here() -> bool:
    """Whether poptorch can be imported in this Python."""
    if "poptorch" in sys.modules:
        return True
    from importlib.util import find_spec

    return find_spec("poptorch") is not None


def begin() -> None:
    """Add the finder of poptorch's substitutes to ``sys.meta_path``, unless such a finder is there already."""
    if not any(type(finder).__name__ == LastFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(LastFinder())
