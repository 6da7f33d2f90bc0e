from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Self
from weakref import WeakMethod

class Quick:
    num_shared: int
    def __new__(
        cls,
        tensor_type: type,
        flags: object,
        settle: object,
        rank: int,
        size: int,
        num_looks: int,
        yield_seconds: float,
        most_sleeps: int,
        offered_bytes: int,
        pages: bytes,
        pairs: bytes,
        purposes: bytes,
        /,
    ) -> Self: ...
    def lay(self, slots: bytes, slot_bytes: int, most_bytes: int, memory: object, /) -> None: ...
    def leave(self, ends: bytes, /) -> None: ...
    def know(self, numbers: bytes, places: bytes, rows: bytes, memory: object, /) -> None: ...
    def forget(self) -> None: ...

class QuickCall:
    num_sums: int
    def __new__(
        cls,
        quick: Quick | None,
        options_type: type,
        sum_op: object,
        pending: set[Any],
        lock: Lock,
        num_modes: Callable[[], int],
        profiler: dict[str, Any],
        work: object,
        large: Callable[[Sequence[object]], None] | None,
        otherwise: WeakMethod[Any],
        /,
    ) -> Self: ...
    def __call__(self, *args: object, **named: object) -> Any: ...  # noqa: ANN401 - a work of torch's

def add_rows(addresses: bytes, length: int, is_double: bool, over: float, /) -> None: ...
