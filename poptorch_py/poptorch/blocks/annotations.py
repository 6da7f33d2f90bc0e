"""Blocks: parts of a model that a program gives a name and a virtual IPU. They change no number of the model."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any, Self

from torch import nn

from poptorch.blocks.pipeline_stages import EnteredBlock, recorded_forward
from poptorch.errors import Error, check_arguments, is_whole

Id = str | int | None


class Block(ContextDecorator):
    """Statements that belong together: ``with poptorch.Block("encoder", ipu_id=1): ...``.

    Args:
        user_id: What an execution strategy calls it; blocks of one name are one block.
        ipu_id: Which virtual IPU of the replica it is for, from 0: blocks of one are one stage.
    """

    def __init__(self, user_id: Id = None, ipu_id: int | None = None) -> None:
        _check_ipu(ipu_id)
        self._user_id = user_id
        self._ipu_id = ipu_id

    @staticmethod
    def useAutoId() -> None:
        """In a forward: call blocks without a name "0", "1", and so on, in the order in which they are entered."""
        if (seen := recorded_forward.get()) is not None:
            seen.num_automatic = 0

    @staticmethod
    def start(user_id: Id = None, ipu_id: int | None = None) -> None:
        """In a forward: what follows is a block, up to the next one."""
        _check_ipu(ipu_id)
        if (seen := recorded_forward.get()) is not None:
            seen.enter(EnteredBlock(user_id=_text(user_id), ipu_id=ipu_id))

    def __enter__(self) -> Self:
        self.start(self._user_id, self._ipu_id)
        return self

    def __exit__(self, *_error: object) -> None:
        pass


def BlockFunction(user_id: Id = None, ipu_id: int | None = None) -> Block:
    """Decorate a function or a method so that it runs in a ``Block`` of these arguments."""
    return Block(user_id, ipu_id)


class BlockModule(nn.Module):
    """A module that begins a block. ``BeginBlock`` derives its class from this; pickles have the plain one."""

    _plain: type[nn.Module]
    _user_id: Id
    _ipu_id: int | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - torch's modules have no docstring there
        if (seen := recorded_forward.get()) is not None:
            seen.enter(begun_by(self))
        return super().__call__(*args, **kwargs)

    def __dir__(self) -> list[str]:
        with _plain_class(self):
            return list(dir(self))

    def __copy__(self) -> Self:
        return self._copied(copy.copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._copied(lambda one: copy.deepcopy(one, memo))

    def _copied(self, copied: Callable[[Any], Any]) -> Self:
        with _plain_class(self):
            made = copied(self)
        object.__setattr__(made, "__class__", type(self))
        return made  # type: ignore[no-any-return]  # a module of such a class

    def __reduce_ex__(self, protocol: Any) -> Any:
        del protocol
        with _plain_class(self):
            return self.__reduce_ex__(1)  # of later protocols, pickle wants the class that this has just now


class FunctionBlock:
    """A function that begins a block whenever it is called."""

    def __init__(self, function: Callable[..., Any], user_id: Id, ipu_id: int | None) -> None:
        self._function = function
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - the docstring is the function's
        Block.start(self._user_id, self._ipu_id)
        return self._function(*args, **kwargs)


def BeginBlock(layer_to_call: Any, user_id: Id = None, ipu_id: int | None = None) -> Any:
    """Have a block begin whenever a module is called, up to the next block; the same module is returned.

    A function stays as it is, and what is returned is called in its place.

    Args:
        layer_to_call: A module, whose parameters keep their names, or a function; it begins no block yet.
        user_id: What an execution strategy calls the block.
        ipu_id: Which virtual IPU of the replica it is for, from 0.
    """
    _check_ipu(ipu_id)
    if isinstance(layer_to_call, BlockModule | FunctionBlock):
        raise Error(
            f"{type(layer_to_call).__name__} has already been assigned to a block; poptorch.removeBlocks(model) "
            "takes blocks away"
        )
    if isinstance(layer_to_call, nn.Module):
        plain = type(layer_to_call)
        names = {"_plain": plain, "_user_id": user_id, "_ipu_id": ipu_id, "__doc__": plain.__doc__}
        names |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
        object.__setattr__(layer_to_call, "__class__", type(plain.__name__, (BlockModule, plain), names))
        return layer_to_call
    if not callable(layer_to_call):
        raise Error(f"BeginBlock takes a module or a function, and was given {layer_to_call!r}")
    return FunctionBlock(layer_to_call, user_id, ipu_id)


def removeBlocks(module: nn.Module) -> None:
    """Take away what ``BeginBlock`` did to ``module`` and the modules in it; not while a model trains with it."""
    check_arguments("removeBlocks", "a module", module=module)
    for part in module.modules():
        if isinstance(part, BlockModule):
            object.__setattr__(part, "__class__", part._plain)  # noqa: SLF001 - this module sets the attribute


def begun_by(module: BlockModule) -> EnteredBlock:
    """The block that ``module`` begins."""
    return EnteredBlock(user_id=_text(module._user_id), ipu_id=module._ipu_id, module=module)  # noqa: SLF001 - this module sets the attributes


def module_repr(m: nn.Module) -> str:
    """``repr(m)``, with ``BeginBlock(user_id=..., ipu_id=...)`` before each module that begins a block."""
    check_arguments("module_repr", "a module", m=m)
    parts = [f"({name}): {module_repr(child)}" for name, child in m.named_children()]
    extra = m.extra_repr().splitlines()
    head = f"{repr(m).partition('(')[0]}("  # the name that the module chooses
    if isinstance(m, BlockModule):
        block = begun_by(m)
        head = f"BeginBlock(user_id={block.user_id}, ipu_id={block.ipu_id}) {head}"
    if not parts and len(extra) <= 1:
        return f"{head}{''.join(extra)})"
    inner = "\n".join([*extra, *parts]).replace("\n", "\n  ")
    return f"{head}\n  {inner}\n)"


@contextmanager
def _plain_class(module: BlockModule) -> Iterator[None]:
    """Meanwhile ``module`` is of its own class."""
    kind = type(module)
    object.__setattr__(module, "__class__", module._plain)  # noqa: SLF001 - this module sets the attribute
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", kind)


def _check_ipu(ipu_id: int | None) -> None:
    if ipu_id is not None and (not is_whole(ipu_id) or ipu_id < 0):
        raise Error(f"ipu_id must be a whole number from 0, or None, and is {ipu_id!r}")


def _text(user_id: Id) -> str | None:
    return None if user_id is None else str(user_id)
