"""Files of tensors in the format of torch.distributed.checkpoint (DCP), without DCP's process groups.

Any tool that reads DCP's directories reads these files. DCP's index is a pickle, which could run any code, so the
index is read by an unpickler that allows only the types of an index. Importing DCP takes a second or two, so only
an instance that writes or reads imports this module.
"""

import io
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, EnumType
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from popdist.checkpoint.manifest import digest_of_file
from popdist.checkpoint.tensor_pieces import TensorPiece, piece_of
from popdist.ground.local_tensors import TensorForm, local_part

INDEX: Final = ".metadata"
"""The file name of the index of a DCP directory."""

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
        "torch.distributed.checkpoint.planner TensorWriteData",
        "torch.distributed.checkpoint.planner WriteItem",
        "torch.distributed.checkpoint.planner WriteItemType",
        "torch.distributed.checkpoint.storage WriteResult",
        "torch.serialization _get_layout",
        "torch Size",
        "pathlib PosixPath",
        "pathlib._local PosixPath",
    }
)
"""The types, in addition to dtypes, that a pickle of a DCP index or of an instance's results may contain."""


def write_pieces(directory: Path, instance: int, tensors: Mapping[str, tuple[TensorForm, Tensor]]) -> bytes:
    """Write this instance's pieces of ``tensors`` into a file; return the data that :func:`write_index` needs."""
    items = [_item(name, form, tensor) for name, (form, tensor) in tensors.items()]
    writer = FileSystemWriter(directory, sync_files=True)
    plan = writer.prepare_global_plan([SavePlan([])] * instance + [SavePlan(items)])[instance]
    with _system_errors():
        results = writer.write_data(
            plan, _PieceWriter({name: local_part(it) for name, (_, it) in tensors.items()})
        ).wait()
    files = {result.storage_data.relative_path for result in results}
    return pickle.dumps((items, results, {name: digest_of_file(directory / name) for name in files}))


def write_index(directory: Path, written: Iterable[bytes]) -> dict[str, str]:
    """Write torch.distributed.checkpoint's index of all instances' pieces; return the digests of all files."""
    items, results, digests = zip(*(_IndexUnpickler(io.BytesIO(it)).load() for it in written), strict=True)
    _, metadata = create_default_global_save_plan([SavePlan(mine) for mine in items])
    FileSystemWriter(directory, sync_files=False).finish(metadata, list(results))
    return {name: digest for some in digests for name, digest in some.items()} | {
        INDEX: digest_of_file(directory / INDEX)
    }


def read_pieces(directory: Path, pieces: Mapping[str, tuple[TensorPiece, Tensor]], files: Collection[str]) -> None:
    """Read from ``directory``, for each name in ``pieces``, a piece of the saved tensor into the given tensor."""
    reader = _Reader(directory)
    metadata = reader.read_metadata()
    if others := {it.relative_path for it in metadata.storage_data.values()} - {*files}:
        raise pickle.UnpicklingError(f"the index names {min(others)!r}, which is no file of this checkpoint")
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    items: list[ReadItem] = []
    for name, (piece, _) in pieces.items():
        found = metadata.state_dict_metadata[name]
        if not isinstance(found, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{name} is no tensor")
        items += create_read_items_for_chunk_list(name, found, [_chunk(piece)])
    reader.read_data(LoadPlan(items), _PieceReader({name: tensor for name, (_, tensor) in pieces.items()})).wait()


def _item(name: str, form: TensorForm, tensor: Tensor) -> WriteItem:
    chunk = _chunk(piece_of(tensor))
    properties = TensorProperties.create_from_tensor(local_part(tensor))
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(form.shape)),
    )


def _chunk(piece: TensorPiece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))


class _PieceWriter(DefaultSavePlanner):
    """A planner that gives this instance's pieces of tensors to the writer of torch.distributed.checkpoint."""

    def __init__(self, pieces: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict = dict(pieces)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return this instance's piece of the tensor that ``write_item`` names."""
        piece: Tensor = self.state_dict[write_item.index.fqn]
        return piece.resolve_conj().resolve_neg()


class _PieceReader(DefaultLoadPlanner):
    """A planner that gives the tensors to overwrite to the reader of torch.distributed.checkpoint."""

    def __init__(self, pieces: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict = dict(pieces)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the view of a tensor that the reader overwrites with the saved piece of ``read_item``."""
        where = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        piece: Tensor = self.state_dict[read_item.dest_index.fqn]
        return piece[tuple(slice(start, start + length) for start, length in where)]


class _Reader(FileSystemReader):
    """A reader of torch.distributed.checkpoint that refuses to unpickle types that an index file never has."""

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        """Read and return the directory's index; raise UnpicklingError if the file is no index."""
        with Path(self.path, INDEX).open("rb") as file:
            found = _IndexUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"the index is a {type(found).__name__}")
        return found


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that allows only dtypes and the types in an index of torch.distributed.checkpoint."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return a dtype or a type of an index; raise UnpicklingError for any other name."""
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member_of
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_dtype or f"{module_name} {global_name}" in _INDEX_TYPES:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"the index asks for {module_name}.{global_name}, which is no part of one")


def _member_of(enumeration: object, name: str) -> Enum:
    """Return the member ``name`` of an enumeration; it replaces ``getattr`` in pickles of Python 3.11.0-3.11.3."""
    if isinstance(enumeration, EnumType) and name in enumeration.__members__:
        member: Enum = enumeration.__members__[name]
        return member
    raise pickle.UnpicklingError(f"the index asks for {name!r} of {enumeration!r}, which is no part of one")


@contextmanager
def _system_errors() -> Iterator[None]:
    """A context in which torch's RuntimeError is replaced by the OSError that caused it, if there is one."""
    try:
        yield
    except RuntimeError as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, OSError):
            found = found.__cause__ or found.__context__
        raise found or error from error
