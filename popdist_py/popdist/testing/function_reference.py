"""The call that every instance of a test world makes: a reference to its function, and its outcome.

pickle knows functions by their module's name alone. That is not enough for a script (its module is ``__main__``)
and for test modules, which pytest loads from their files. So a reference names the module's file, too, which is
loaded where the name does not lead to it.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self

from popdist.errors import WorldError

JOB_FILE: Final = "job.pickle"
"""Name of the file with the call."""

MAIN_ALIAS: Final = "__mp_main__"
"""The name of the program's ``__main__`` in the instances; the same as multiprocessing's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReference:
    """A module-level function, as another process finds it."""

    module: str
    path: str
    qualname: str

    @classmethod
    def of(cls, fn: Callable[..., object]) -> Self:
        """Make the reference to ``fn``; an error if another process could not find it."""
        qualname = getattr(fn, "__qualname__", repr(fn))
        if not inspect.isfunction(fn) or "<" in qualname:
            raise WorldError(
                f"{qualname} cannot run in other processes: give a function that a module defines by name"
            )
        path = inspect.getsourcefile(fn)
        if path is None or not Path(path).is_file():
            raise WorldError(f"{qualname} cannot run in other processes: its module is not in a file")
        sys.modules.setdefault(MAIN_ALIAS, sys.modules["__main__"])
        return cls(module=fn.__module__, path=str(Path(path).resolve()), qualname=qualname)

    def load(self) -> Callable[..., Any]:
        """Import the function in this process."""
        fn: Callable[..., Any] = attrgetter(self.qualname)(_load_module(self.module, Path(self.path)))
        return fn


def _load_module(name: str, path: Path) -> ModuleType:
    if name == "__main__":
        module = sys.modules["__main__"] = _load_file(MAIN_ALIAS, path)
        return module
    try:
        module = import_module(name)
    except ImportError:
        return _load_file(name, path)
    found = getattr(module, "__file__", None)
    return module if found is not None and Path(found).resolve() == path else _load_file(name, path)


def _load_file(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorldError(f"{path} cannot be loaded as a Python module")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a call on one instance."""

    value: object = None
    failure: str | None = None


def outcome_path(directory: Path, instance: int) -> Path:
    """The path where an instance's outcome is written."""
    return directory / f"outcome-{instance}.pickle"
