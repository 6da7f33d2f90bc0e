from typing import Self

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
    def reduce(self, tensors: object, /) -> bool | None: ...

def add_rows(addresses: bytes, length: int, is_double: bool, over: float, /) -> None: ...
