"""Rows of several sequences as tensors, with what a model needs to keep the sequences apart.

A row is a list of samples, and a sample a mapping of fields with ``input_ids`` among them. A field that has one
value for each token is laid into the row at the place of its sequence; any other belongs to the sequence as a
whole and is collected in a list, whose order ``rows`` and ``starts`` tell.
"""

import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import default_collate

from popdist.errors import MOST_TOKENS, BatchError, DatasetError, whole_number

TOKENS: Final = "input_ids"
"""The field whose length is that of the sequence."""

_MADE: Final = frozenset({"position_ids", "segment_ids", "attention_mask"})
"""Fields of samples that say nothing of a packed row: they are made anew, or follow from ``segment_ids``."""

_IGNORED_LABEL: Final = -100
"""The label that torch's cross entropy ignores; it fills the padding of ``labels``."""

Row = Sequence[Mapping[str, Any]]
"""The samples of one row, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A micro batch of packed rows.

    ``packed["input_ids"]`` is any field of the samples, and ``packed.input_ids`` and ``packed.labels`` are short
    for the two that most models have.

    Attributes:
        tokens: Fields with a value for each token: tensors of shape ``[rows, max_length]``.
        position_ids: Place of each token in its own sequence, from 0; 0 in padding. int64 of the same shape.
        segment_ids: 1 for the tokens of a row's first sequence, 2 for its second one, 0 for padding. int64.
        sequences: Fields with one value for each sequence, collated in the order of ``rows``.
        rows: Row of each sequence. int64 of shape ``[sequences]``, row by row.
        starts: Place of each sequence's first token in its row. int64 of shape ``[sequences]``.
        lengths: Tokens of each sequence, at least 1. int64 of shape ``[sequences]``.
        cu_seqlens: 0, and where each sequence ends when the real tokens of all rows, ``x[segment_ids > 0]``, lie
            end to end: what attention kernels for sequences of several lengths take. int32 of shape ``[sequences
            + 1]``.
        max_seqlen: Tokens of the longest sequence.
    """

    tokens: dict[str, Tensor]
    position_ids: Tensor
    segment_ids: Tensor
    sequences: dict[str, Any]
    rows: Tensor
    starts: Tensor
    lengths: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - a tensor, or what default_collate made
        for fields in (self.tokens, self.sequences):
            if name in fields:
                return fields[name]
        raise BatchError(
            f"the samples have no field {name!r}: there are {', '.join([*self.tokens, *self.sequences])}"
        )

    @property
    def input_ids(self) -> Tensor:
        """The tokens: int64 of shape ``[rows, max_length]``."""
        ids: Tensor = self[TOKENS]
        return ids

    @property
    def labels(self) -> Any:  # noqa: ANN401 - as above
        """The labels: of tokens, with -100 in padding, or of sequences."""
        return self["labels"]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.segment_ids)

    @property
    def num_sequences(self) -> int:
        """Number of sequences in all rows."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Real tokens in all rows."""
        return int(self.cu_seqlens[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Collates a list of rows into a :class:`Packed`.

    Attributes:
        max_length: Tokens of a row.
        padding: What stands in padding, by field. ``input_ids`` must be there; ``labels`` have -100 and others 0
            unless they are named.
        token_fields: Names of the fields with a value for each token; None for all that are as long as their
            sample's ``input_ids``, in all samples.
    """

    max_length: int
    padding: Mapping[str, float] = field(default_factory=dict)
    token_fields: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        whole_number("max_length", self.max_length, DatasetError, maximum=MOST_TOKENS)
        if not isinstance(self.padding, Mapping):
            raise DatasetError(f"padding={self.padding!r} must be a dict, as {{'input_ids': 0}}")
        names: object = self.token_fields
        if isinstance(names, str) or not isinstance(names, Collection | None):
            raise DatasetError(
                f"token_fields={self.token_fields!r} must be names, as ('labels', 'token_type_ids')"
            )
        if TOKENS not in self.padding:
            raise DatasetError(
                f"padding={dict(self.padding)!r} has no {TOKENS!r}: give the id of the tokenizer's padding "
                "token, as in padding={'input_ids': tokenizer.pad_token_id}"
            )
        for name, value in self.padding.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise DatasetError(f"padding={dict(self.padding)!r}: {value!r} of {name!r} is no number")

    def __call__(self, rows: Sequence[Row]) -> Packed:
        """Make the tensors of ``rows``, whose samples must all have the same fields."""
        given: object = rows
        if (
            not isinstance(given, Sequence)
            or not any(given)
            or not all(isinstance(row, Sequence) for row in given)
        ):
            raise BatchError(f"expected a list of rows, each a list of samples, and found {reprlib.repr(given)}")
        samples = [sample for row in rows for sample in row]
        lengths = [_num_tokens(sample, self.max_length) for sample in samples]
        token_names, sequence_names = self._divide(samples, lengths)
        places = list(_places(rows, lengths, self.max_length))
        shape = (len(rows), self.max_length)
        tokens = {
            name: self._place(name, [sample[name] for sample in samples], places, shape) for name in token_names
        }
        position_ids, segment_ids = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        for (row, start, number), length in zip(places, lengths, strict=True):
            position_ids[row, start : start + length] = torch.arange(length, dtype=torch.int64)
            segment_ids[row, start : start + length] = number
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        return Packed(
            tokens=tokens,
            position_ids=position_ids,
            segment_ids=segment_ids,
            sequences={name: default_collate([sample[name] for sample in samples]) for name in sequence_names},
            rows=torch.tensor([row for row, _, _ in places], dtype=torch.int64),
            starts=torch.tensor([start for _, start, _ in places], dtype=torch.int64),
            lengths=torch.tensor(lengths, dtype=torch.int64),
            cu_seqlens=ends.to(torch.int32),
            max_seqlen=max(lengths),
        )

    def is_token_field(self, name: str, value: Any, length: int) -> bool:  # noqa: ANN401 - any field
        """Whether a field of a sample of ``length`` tokens has a value for each of them."""
        if self.token_fields is not None:
            return name == TOKENS or name in self.token_fields
        return _size(value) == length

    def _divide(self, samples: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> tuple[list[str], list[str]]:
        """The names of the fields of tokens, and of those of sequences."""
        names = [name for name in samples[0] if name not in _MADE]
        for sample in samples:
            if {name for name in sample if name not in _MADE} != set(names):
                raise BatchError(
                    f"a sample has the fields {', '.join(sample)}, and another {', '.join(samples[0])}"
                )
        tokens = []
        for name in names:
            found = {
                self.is_token_field(name, sample[name], size)
                for sample, size in zip(samples, lengths, strict=True)
            }
            if len(found) > 1:
                raise BatchError(
                    f"the field {name!r} is as long as {TOKENS!r} in some samples only: say which fields have a "
                    "value for each token, as in token_fields=('labels', 'token_type_ids')"
                )
            if True in found:
                tokens.append(name)
        return tokens, [name for name in names if name not in tokens]

    def _place(
        self, name: str, values: Sequence[Any], places: Sequence[tuple[int, int, int]], shape: tuple[int, int]
    ) -> Tensor:
        """Make the tensor of one field, a row for each packed row."""
        tensors = [torch.as_tensor(value) for value in values]
        padding = self.padding.get(name, _IGNORED_LABEL if name == "labels" else 0)
        laid = torch.full(shape, padding, dtype=tensors[0].dtype)
        for tensor, (row, start, _) in zip(tensors, places, strict=True):
            if tensor.dim() != 1 or start + len(tensor) > shape[1]:
                raise BatchError(
                    f"the field {name!r} of a sample has shape {tuple(tensor.shape)}: one value for each token "
                    "fits a row"
                )
            laid[row, start : start + len(tensor)] = tensor
        return laid


def _places(rows: Sequence[Row], lengths: Sequence[int], max_length: int) -> Iterator[tuple[int, int, int]]:
    """Row, first place and number in its row (from 1) of each sequence."""
    sizes = iter(lengths)
    for number, row in enumerate(rows):
        start = 0
        for count in range(1, len(row) + 1):
            yield number, start, count
            start += next(sizes)
        if start > max_length:
            raise BatchError(
                f"a row of {len(row)} sequences has {start} tokens, more than max_length={max_length}"
            )


def _num_tokens(sample: object, max_length: int) -> int:
    if not isinstance(sample, Mapping) or TOKENS not in sample:
        raise BatchError(
            f"a sample is a {type(sample).__name__} without {TOKENS!r}: pack mappings of fields, or give "
            "data_loader a collate_fn of your own, which gets a list of rows, each a list of samples"
        )
    length = _size(sample[TOKENS])
    if length is None or not 1 <= length <= max_length:
        raise BatchError(f"a sample has {length} tokens in {TOKENS!r}: a row takes 1 to {max_length}")
    return length


def _size(value: Any) -> int | None:  # noqa: ANN401 - any field
    """Length of a list or one-dimensional tensor; None for anything else."""
    if isinstance(value, Tensor) or hasattr(value, "__array__"):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None
