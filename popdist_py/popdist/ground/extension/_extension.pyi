def square_sum(address: int, length: int, is_double: bool, /) -> float: ...
def round_by_chance(
    wide: int,
    held: int,
    length: int,
    dtype: int,
    first: int,
    position: int,
    tensor: int,
    seed: int,
    step: int,
    num_threads: int,
    /,
) -> None: ...
def add_rows(addresses: bytes, length: int, is_double: bool, over: float, /) -> None: ...
