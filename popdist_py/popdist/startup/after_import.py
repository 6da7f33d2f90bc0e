"""Calls functions once modules have been imported, without importing or patching them.

The start-up hook (``startup/sitecustomize.py``) calls it in whatever Python the program runs, so this is written
for Python 3.8 and imports next to nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Call = Callable[[ModuleType], None]


class AfterImport:
    """The first finder in ``sys.meta_path``: it lets the others find, and is called back when a module has run."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Call]] = {}

    def call(self, name: str, function: Call) -> None:
        """Call ``function`` with the module ``name`` once it is imported; at once if it is imported already."""
        if name in sys.modules:
            function(sys.modules[name])
            return
        self._calls.setdefault(name, []).append(function)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have for a module that is waited for, with a loader that calls back."""
        if name not in self._calls:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if find is None or finder is self:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _CallingLoader(spec.loader, self)  # type: ignore[assignment] # by its methods
                return spec
        return None

    def run_calls(self, module: ModuleType) -> None:
        """Call what waits for ``module``; a function that fails does not disturb the program."""
        for function in self._calls.pop(module.__name__, ()):
            try:
                function(module)
            except Exception:  # noqa: BLE001, S112 - the program goes on as without it
                continue
        if not self._calls and self in sys.meta_path:
            sys.meta_path.remove(self)


class _CallingLoader:
    """Another loader's methods; when a module has run it is that loader's alone."""

    def __init__(self, loader: Any, finder: AfterImport) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The other loader's module."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module as the other loader does, then call back."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.run_calls(module)
