"""The running collective of a torch process group, written on the page of memory that poprun reads.

Only for the backend ``popdist``, because torch's recorder does not know this backend.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from popdist.errors import name_instances
from popdist.ground.progress import progress_page


def do_watched(text: str, members: Sequence[int], do: Callable[..., None], *arguments: object) -> None:
    """Run the collective ``do``, and meanwhile show ``text`` to poprun, so that poprun can name missing ranks."""
    progress_page.wait(text, members)
    try:
        do(*arguments)
    finally:
        progress_page.end_wait()


def call_in_words(do: Callable[..., None], arguments: Sequence[object], members: tuple[int, ...]) -> str:
    """Return a collective as text: its name, its first tensor's dtype and shape, and the ranks ``members``."""
    tensor = next(_tensors(arguments), None)
    if tensor is None:
        return _words(do.__name__, None, (), members)
    return _words(do.__name__, tensor.dtype, tuple(tensor.shape), members)


@lru_cache(maxsize=256)
def _words(name: str, dtype: torch.dtype | None, shape: tuple[int, ...], members: tuple[int, ...]) -> str:
    what = "" if dtype is None else f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    ranks = f" of {name_instances(members, 'rank')}" if members else ""
    return f"{name.strip('_')}({what}){ranks}"


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
