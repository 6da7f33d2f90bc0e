"""Calls of functions after the import of modules, without importing or patching these modules.

The start-up hook (``startup/sitecustomize.py``) uses this module in the Python of the program, whatever its
version. So the module is written for Python 3.8 and imports almost nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing takes longer than importing this module
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Call = Callable[[ModuleType], None]


class AfterImport:
    """A finder in ``sys.meta_path`` that finds no module itself, but calls functions after imports of modules."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Call]] = {}

    def call(self, name: str, function: Call) -> None:
        """Call ``function`` with the module ``name`` after its import, or now if it was imported before."""
        if name in sys.modules:
            function(sys.modules[name])
            return
        self._calls.setdefault(name, []).append(function)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader calls the functions registered for the module; None for other modules."""
        if name not in self._calls:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if find is None or finder is self:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _CallingLoader(spec.loader, self)  # type: ignore[assignment] # the object has a loader's methods
                return spec
        return None

    def run_calls(self, module: ModuleType) -> None:
        """Call the functions registered for ``module``, and ignore the errors that these functions raise."""
        for function in self._calls.pop(module.__name__, ()):
            try:
                function(module)
            except Exception:  # noqa: BLE001, S112 - the program must continue as if the function did not exist
                continue
        if not self._calls and self in sys.meta_path:
            sys.meta_path.remove(self)


class _CallingLoader:
    """A loader that runs a module with another loader, and then calls the functions registered for the module."""

    def __init__(self, loader: Any, finder: AfterImport) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the other loader makes for ``spec``."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run ``module`` with the other loader, and then call the functions registered for ``module``."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.run_calls(module)
