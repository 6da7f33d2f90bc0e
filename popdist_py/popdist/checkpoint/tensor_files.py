"""Tensors on the disk, in the format of torch.distributed.checkpoint (DCP), without its process groups.

Any tool that reads DCP's directories reads these. DCP's index is a pickle, which could run anything: here an
unpickler reads it that knows the types of an index only. Importing DCP takes a second or two, so only the instance
that writes or reads imports this module.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_INDEX_TYPES: Final = frozenset(
    {
        "torch.distributed.checkpoint.metadata Metadata",
        "torch.distributed.checkpoint.metadata TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata TensorProperties",
        "torch.distributed.checkpoint.metadata ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata MetadataIndex",
        "torch.distributed.checkpoint.metadata StorageMeta",
        "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem _StorageInfo",
        "torch.serialization _get_layout",
        "torch Size",
        "pathlib PosixPath",
        "pathlib._local PosixPath",
    }
)
"""The types that the pickle of a DCP index may contain, beside dtypes."""


def write_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors``, from any device, into ``directory``, which is made."""
    writer = FileSystemWriter(directory, sync_files=False)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with _alone():
        save(dict(tensors), storage_writer=writer, planner=planner, no_dist=True)


def read_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite each of ``tensors`` with the one of its name in ``directory``."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    with _alone():
        load(dict(tensors), storage_reader=_Reader(directory), planner=planner, no_dist=True)


class _Reader(FileSystemReader):
    """DCP's reader, which unpickles only the types of an index."""

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        """Read the index of the tensors."""
        with Path(self.path, ".metadata").open("rb") as file:
            found = _IndexUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"the index is a {type(found).__name__}")
        return found


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that refuses all types except those of an index."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:  # noqa: ANN401 - pickle's own signature
        """Find a type of an index, or a dtype; an error for anything else."""
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_dtype or f"{module_name} {global_name}" in _INDEX_TYPES:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"the index asks for {module_name}.{global_name}, which is no part of one")


@contextmanager
def _alone() -> Iterator[None]:
    """A context that hides DCP's warning about a missing process group, and raises the causes of its errors."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        raise _cause(next(iter(error.failures.values()))[0]) from error


def _cause(error: BaseException) -> BaseException:
    """The system's error behind torch's, which says only that a file is too short."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error
