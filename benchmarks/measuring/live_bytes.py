"""Bytes of the tensors that are alive."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is entered, counts the bytes of all storages that operations return, until they are freed.

    Of a DTensor those are what the operations on its parts return. Memory that torch has not allocated is not
    counted, such as that of messages which another process sends.

    Attributes:
        peak: The most bytes that were alive at once; set it to 0 to count anew.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):  # DTensors do the operation by others, seen here
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.untyped_storage().resizable():
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def free(_: object) -> None:
            del self._known[key]
            self._now -= size

        self._known[key] = weakref.ref(storage, free)
        self._now += size
        self.peak = max(self.peak, self._now)
