"""How what a worker has made comes to the loop: small tensors as bytes, all others as torch sends them.

torch puts each tensor into shared memory of its own and hands over a file descriptor. For all but large tensors
that takes longer than a copy through the pipe that tells of the batch.
"""

import ctypes
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch import Tensor

SMALL_BYTES: Final = 2**18
"""Up to so many bytes a tensor is copied: of more, torch's way takes less of the loop's time."""

_DTYPES: Final = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
_NUMBERS: Final = {dtype: number for number, dtype in enumerate(_DTYPES)}


class SentContents:
    """The contents of micro batches, pickled: what they are sent as, and what becomes of it is a copy of them.

    That is done when this is made, where an error is that of the step; the thread that sends would only print it,
    and the loop would wait for ever. Of tensors that share their memory, small ones share it no more.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: If they cannot be pickled.
    """

    def __init__(self, contents: list[Any]) -> None:
        stream = io.BytesIO()
        _Pickler(stream).dump(contents)
        self._pickled = stream.getvalue()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._pickled,)


class _Pickler(ForkingPickler):
    """Copies small tensors."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - as pickle has it
        """What makes ``value`` again, and from what; NotImplemented leaves it to torch."""
        if type(value) is not Tensor or not _is_copied(value):
            return NotImplemented
        content = ctypes.string_at(value.data_ptr(), value.nbytes)
        return _tensor_of, (content, _NUMBERS[value.dtype], *value.shape)


def _is_copied(tensor: Tensor) -> bool:
    """Whether ``tensor`` is small, and no more than its elements in their order."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and 0 < tensor.nbytes <= SMALL_BYTES
        and tensor.nbytes == tensor.untyped_storage().nbytes()
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensor_of(content: bytes, dtype: int, *shape: int) -> Tensor:
    tensor = torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")
    ctypes.memmove(tensor.data_ptr(), content, len(content))
    return tensor
