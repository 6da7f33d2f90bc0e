"""Calls and results of launched functions, as bytes of cloudpickle in a folder that only its user may open.

cloudpickle sends the functions and classes of a script or a notebook by value, and the functions and classes of a
module by name. A module that other processes cannot import, such as a test file of pytest, is sent by value.
"""

import inspect
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any, Final, Self

from popdist.errors import LaunchError
from popdist.ground.trusted_paths import open_below, opened_own_folder

_CALL_FILE: Final = "call.pickle"


def name_of(fn: Callable[..., object]) -> str:
    """Return the name of the function ``fn`` for messages."""
    return getattr(getattr(fn, "func", fn), "__name__", repr(fn))  # a partial has no name itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function and its arguments, pickled for the instances of a job."""

    name: str  # name of the function, for messages
    pickled: bytes
    search_path: tuple[str, ...]  # the ``sys.path`` that the unpickling process needs
    sources: Mapping[str, Sequence[str]]  # the lines of files that are on no disk, such as a notebook's cells

    @classmethod
    def of(cls, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Self:
        """Pickle the call ``fn(*args, **kwargs)`` for instances. Raise LaunchError if this is impossible."""
        module = sys.modules.get(getattr(fn, "__module__", None) or "")
        by_value = _cloudpickle().list_registry_pickle_by_value()
        is_lost = module is not None and module.__name__ not in by_value and not _is_found(module)
        if is_lost:
            _cloudpickle().register_pickle_by_value(module)
        try:
            pickled = pickle_values((name_of(fn), fn), ("args", tuple(args)), ("kwargs", dict(kwargs)))
        finally:
            if is_lost:
                _cloudpickle().unregister_pickle_by_value(module)
        file = getattr(getattr(fn, "__code__", None), "co_filename", __file__)
        sources = {} if Path(file).exists() else {file: linecache.getlines(file)}
        return cls(
            name=name_of(fn), pickled=pickled, search_path=tuple(map(os.path.abspath, sys.path)), sources=sources
        )

    def save(self, folder: Path) -> None:
        """Write the call to a file in ``folder``, from which the instances read the call."""
        (folder / _CALL_FILE).write_bytes(pickle.dumps(self))


def load_call(folder: Path) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    """Return the function and arguments in ``folder``; set ``sys.path``, and the source lines of tracebacks."""
    with opened_own_folder(str(folder)) as own, os.fdopen(open_below(own, _CALL_FILE, os.O_RDONLY), "rb") as file:
        call: Call = pickle.load(file)
    sys.path[:] = call.search_path
    for name, lines in call.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
    try:
        fn, args, kwargs = pickle.loads(call.pickled)
    except Exception as why:  # noqa: BLE001 - the code of the values' classes may raise anything
        users = why.__traceback__ and why.__traceback__.tb_next
        launch_error = LaunchError(f"{call.name} and its arguments cannot be read on an instance: {why}")
        raise launch_error from why.with_traceback(users)
    if inspect.isfunction(fn):
        _name_globals(fn)
    return fn, args, kwargs


def _name_globals(fn: FunctionType) -> None:
    """Put the functions and classes that were sent with ``fn`` into the module of ``fn``, where pickle looks."""
    module = sys.modules.setdefault(fn.__module__, ModuleType(fn.__module__))
    for name, value in fn.__globals__.items():
        if getattr(value, "__module__", None) == fn.__module__:
            setattr(module, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result or the exception of a launched function on one instance."""

    pickled: bytes  # the result of the function, or its exception
    traceback: str = ""  # text of the exception's traceback; empty for a result

    @classmethod
    def of_error(cls, error: Exception, traceback: str) -> Self:
        """Make the outcome for the exception ``error``, or for a LaunchError if ``error`` cannot be pickled."""
        try:
            pickled = _cloudpickle().dumps(error)
            try:
                pickle.loads(pickled)
            except Exception:  # noqa: BLE001 - an __init__ that does not accept args may raise anything
                pickled = _cloudpickle().dumps(_RebuiltError(error))
            return cls(pickled=pickled, traceback=traceback)
        except Exception as why:  # noqa: BLE001 - the code of the exception's class may raise anything
            launch_error = LaunchError(f"{type(error).__name__}: {error}\n(which cannot be sent itself: {why})")
            return cls(pickled=pickle.dumps(launch_error), traceback=traceback)

    def load(self) -> Any:
        """Unpickle and return the function's result or exception."""
        return pickle.loads(self.pickled)

    def save(self, folder: Path, instance: int) -> None:
        """Write the outcome of ``instance`` to a file in ``folder``, completely or not at all."""
        path = outcome_path(folder, instance)
        path.with_suffix(".part").write_bytes(pickle.dumps(self))
        path.with_suffix(".part").replace(path)


class _RebuiltError:
    """A substitute for an exception, which unpickling turns into the exception without calling ``__init__``."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Callable[..., Exception], tuple[object, ...]]:
        return _made_again, (type(self._error), self._error.args, self._error.__dict__)


def _made_again(kind: type[Exception], args: tuple[object, ...], attributes: Mapping[str, object]) -> Exception:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def load_outcome(folder: Path, instance: int) -> Outcome | None:
    """Return the launched function's outcome on ``instance``; None if the process was killed or has not ended."""
    path = outcome_path(folder, instance)
    outcome: Outcome | None = pickle.loads(path.read_bytes()) if path.exists() else None
    return outcome


def outcome_path(folder: Path, instance: int) -> Path:
    """Return the path of the file in ``folder`` with the launched function's outcome on ``instance``."""
    return folder / f"outcome-{instance}.pickle"


def pickle_values(*named: tuple[str, object]) -> bytes:
    """Pickle named values as a tuple. Raise LaunchError, which names the part that cannot be pickled."""
    try:
        pickled: bytes = _cloudpickle().dumps(tuple(value for _, value in named))
    except Exception:
        innermost = next(filter(None, (_innermost(value, name, set()) for name, value in named)), None)
        if innermost is None:
            raise
        path, part, why = innermost
        raise LaunchError(
            f"{path} cannot be sent to another process, because it is a {type(part).__name__}: {why}\n"
            "make it in the function, or send what it is made from"
        ) from None
    return pickled


def _innermost(value: object, path: str, seen: set[int]) -> tuple[str, object, Exception] | None:
    """Return the smallest part of ``value`` that cannot be pickled, its path and the error; None if all can be."""
    if id(value) in seen:
        return None
    seen.add(id(value))
    try:
        _cloudpickle().dumps(value)
    except Exception as error:  # noqa: BLE001 - the code of the value's class may raise anything
        inside = (_innermost(part, f"{path}{name}", seen) for name, part in _parts(value))
        return next(filter(None, inside), (path, value, error))
    return None


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of ``value``: variables of a function, items of a container, attributes of an object."""
    if inspect.isfunction(value):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        named = {name: cell.cell_contents for name, cell in cells if cell != CellType()}  # a cell may be empty
        named |= {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
        yield from ((f" → {name}", part) for name, part in named.items())
    elif inspect.ismethod(value):
        yield ".__self__", value.__self__
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _is_found(module: ModuleType) -> bool:
    """Whether another process with the same ``sys.path`` finds the same file of ``module`` by its name."""
    if module.__name__ == "__main__":  # cloudpickle sends __main__ by value
        return True
    places: Sequence[str] | None = None
    origin = None
    words = module.__name__.split(".")
    for number in range(1, len(words) + 1):
        name = ".".join(words[:number])
        spec = next(filter(None, (finder.find_spec(name, places) for finder in sys.meta_path)), None)
        if spec is None:
            return False
        places, origin = spec.submodule_search_locations, spec.origin
    return module.__spec__ is not None and origin == module.__spec__.origin


def _cloudpickle() -> ModuleType:
    try:
        return import_module("cloudpickle")
    except ModuleNotFoundError:
        raise LaunchError(
            "popdist.launch sends functions with cloudpickle, which is not installed: pip install 'poprun[launch]'"
        ) from None
