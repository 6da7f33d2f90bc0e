"""Tensors of packed rows, several sequences in a row, with masks and positions that keep sequences apart.

A row is a list of samples, and a sample is a mapping of fields, one of which is ``input_ids``. Packed and unpacked
training have the same gradients under two conditions. Mask and positions must keep each sequence of a row from the
other sequences, and the weights must count each token, or each sequence, as without packing.
"""

import math
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import torch
from torch import Tensor
from torch.utils.data import default_collate

from popdist.errors import MOST_TOKENS, BatchError, DatasetError, as_float, whole_number

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from popdist.data.batch import Batch

TOKENS: Final = "input_ids"
"""The name of the field of a sample whose length is the length of the sequence."""

_MADE: Final = frozenset({"position_ids", "segment_ids", "attention_mask"})
"""The fields of samples that are not copied, because they are made anew or follow from ``segment_ids``."""

_IGNORED_LABEL: Final = -100
"""The label that torch's cross entropy ignores; this label fills the padding of ``labels``."""

Row = Sequence[Mapping[str, Any]]
"""The samples of one packed row, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The tensors of a micro batch whose rows each hold several sequences, one behind the other (packed rows).

    ``packed["input_ids"]`` returns a field of the samples by its name. ``packed.input_ids`` and ``packed.labels``
    are short forms for the two fields that most models have.

    Attributes:
        tokens: Fields with a value for each token: tensors of shape ``[rows, max_length]``.
        position_ids: Place of each token in its own sequence, from 0; 0 in padding. int64 of the same shape.
        segment_ids: 1 for the tokens of a row's first sequence, 2 for its second sequence, 0 for padding. int64.
        sequences: Fields with one value for each sequence, collated in the order of ``rows``.
        rows: Row of each sequence. int64 of shape ``[sequences]``, row by row.
        starts: Place of each sequence's first token in its row. int64 of shape ``[sequences]``.
        lengths: Tokens of each sequence, at least 1. int64 of shape ``[sequences]``.
        cu_seqlens: 0, then the end of each sequence in the concatenated real tokens of all rows, ``x[segment_ids >
            0]``. Attention kernels for sequences of several lengths take these ends. int32 of shape ``[sequences +
            1]``.
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

    def __getitem__(self, name: str) -> Any:
        for fields in (self.tokens, self.sequences):
            if name in fields:
                return fields[name]
        raise BatchError(
            f"the samples have no field {name!r}: there are {', '.join([*self.tokens, *self.sequences])}"
        )

    @property
    def input_ids(self) -> Tensor:
        """The token numbers of all rows: int64 of shape ``[rows, max_length]``."""
        ids: Tensor = self[TOKENS]
        return ids

    @property
    def labels(self) -> Any:
        """The labels of the tokens, with -100 in padding, or one label for each sequence."""
        return self["labels"]

    @property
    def num_rows(self) -> int:
        """The number of packed rows."""
        return len(self.segment_ids)

    @property
    def num_sequences(self) -> int:
        """The number of sequences in all packed rows."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding in all packed rows."""
        return int(self.cu_seqlens[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """A ``collate_fn`` that makes the tensors of a :class:`Packed` from the samples of packed rows.

    Attributes:
        max_length: Tokens of a row.
        padding: Value of each field in padding, by name. ``input_ids`` must have a value; otherwise ``labels`` get
            -100 and other fields 0.
        token_fields: Names of the fields with a value for each token; None for all fields that are as long as
            ``input_ids`` in all samples.
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
        """Return the tensors of ``rows``, each a list of samples; all samples must have the same fields."""
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
        position_ids, segment_ids = (
            torch.zeros(shape, dtype=torch.int64, device="cpu"),
            torch.zeros(shape, dtype=torch.int64, device="cpu"),
        )
        for (row, start, number), length in zip(places, lengths, strict=True):
            position_ids[row, start : start + length] = torch.arange(length, dtype=torch.int64, device="cpu")
            segment_ids[row, start : start + length] = number
        ends = torch.tensor([0, *lengths], dtype=torch.int64, device="cpu").cumsum(0)
        return Packed(
            tokens=tokens,
            position_ids=position_ids,
            segment_ids=segment_ids,
            sequences={name: default_collate([sample[name] for sample in samples]) for name in sequence_names},
            rows=torch.tensor([row for row, _, _ in places], dtype=torch.int64, device="cpu"),
            starts=torch.tensor([start for _, start, _ in places], dtype=torch.int64, device="cpu"),
            lengths=torch.tensor(lengths, dtype=torch.int64, device="cpu"),
            cu_seqlens=ends.to(torch.int32),
            max_seqlen=max(lengths),
        )

    def is_token_field(self, name: str, value: Any, length: int) -> bool:
        """Whether the field ``name`` of a sample of ``length`` tokens has a value for each token."""
        if self.token_fields is not None:
            return name == TOKENS or name in self.token_fields
        return _size(value) == length

    def _divide(self, samples: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> tuple[list[str], list[str]]:
        """Return two lists of field names: fields with a value per token, and with one per sequence."""
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
        """Make the tensor of the field ``name``: one row per packed row, with padding at the row's end."""
        tensors = [torch.as_tensor(value, device="cpu") for value in values]
        padding = self.padding.get(name, _IGNORED_LABEL if name == "labels" else 0)
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        if not dtype.is_floating_point and not float(padding).is_integer():
            raise BatchError(f"padding={padding} of {name!r}, whose values are of {dtype}: choose a whole number")
        filled = torch.full(shape, padding, dtype=dtype, device="cpu")
        for tensor, (row, start, _) in zip(tensors, places, strict=True):
            if tensor.dim() != 1 or start + len(tensor) > shape[1]:
                raise BatchError(
                    f"the field {name!r} of a sample has shape {tuple(tensor.shape)}: one value for each token "
                    "fits a row"
                )
            filled[row, start : start + len(tensor)] = tensor
        return filled


def _places(rows: Sequence[Row], lengths: Sequence[int], max_length: int) -> Iterator[tuple[int, int, int]]:
    """Yield, for each sequence, its row, the position of its first token there, and its number in the row."""
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


def _size(value: Any) -> int | None:
    """Return the length of a list, or the first dimension of a tensor; None for a value without a length."""
    if isinstance(value, Tensor) or hasattr(value, "__array__"):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None


Form = Literal["sdpa", "additive", "flex", "nested"]

_SHAPE: Final = ("rows", "length")

FORMS: Final = ("sdpa", "additive", "flex", "nested")


@overload
def attention_mask(segment_ids: Tensor, form: Literal["flex"], *, causal: bool = False) -> "BlockMask": ...


@overload
def attention_mask(
    segment_ids: Tensor,
    form: Literal["sdpa", "additive", "nested"] = "sdpa",
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
    masked: float = -1000.0,
) -> Tensor: ...


def attention_mask(
    segment_ids: Tensor,
    form: Form = "sdpa",
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
    masked: float = -1000.0,
) -> "Tensor | BlockMask":
    """Return an attention mask for rows of several sequences: a token attends only to its own sequence.

    Args:
        segment_ids: ``Packed.segment_ids``: whole numbers of shape ``[rows, length]``, 0 for padding.
        form: ``"sdpa"``: True where attention is allowed, for ``scaled_dot_product_attention`` and models of the
            library transformers. ``"additive"``: 0 where attention is allowed and ``masked`` elsewhere, to add to
            the scores. ``"flex"``: a ``BlockMask`` for ``flex_attention``. ``"nested"``: the ends of the
            sequences, for ``torch.nested.nested_tensor_from_jagged(x[segment_ids > 0], offsets)``.
        causal: Whether a token attends only to itself and to tokens before it. Not for ``"nested"``: pass
            ``is_causal=True`` to ``scaled_dot_product_attention`` instead.
        dtype: dtype of the form ``"additive"``; floating point.
        masked: What the form ``"additive"`` adds where attention is not allowed; below 0, also ``-math.inf``.

    Returns:
        A tensor of shape ``[rows, 1, length, length]`` (query, then key): bool for ``"sdpa"``, ``dtype`` for
        ``"additive"``; a ``BlockMask``; or int64 of shape ``[sequences + 1]``, beginning with 0. Padding attends
        to nothing; but if ``masked`` is ``-math.inf``, padding attends to itself, so that its softmax is not NaN.

    Raises:
        BatchError: If ``segment_ids`` has another shape, or another argument has none of these values.
    """
    _check(segment_ids)
    if form == "nested":
        if causal:
            raise BatchError(
                "causal=True: offsets know no order; pass is_causal=True to scaled_dot_product_attention"
            )
        return _offsets(segment_ids)
    if form == "flex":
        return _block_mask(segment_ids, causal=causal)
    if form not in FORMS:
        raise BatchError(f"form={form!r} must be one of {', '.join(map(repr, FORMS))}")
    real = segment_ids > 0
    allowed = (segment_ids[:, :, None] == segment_ids[:, None, :]) & real[:, :, None]
    if causal:
        allowed = allowed.tril()
    if form == "sdpa":
        return allowed[:, None]
    _check_kinds("attention_mask", torch.dtype, dtype=dtype)
    if not dtype.is_floating_point or not as_float(masked) < 0:
        raise BatchError(f"dtype={dtype} and masked={masked}: expected a floating point type and a number below 0")
    if masked == -math.inf:
        allowed = allowed | torch.diag_embed(~real)
    scores = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return scores.masked_fill_(~allowed, masked)[:, None]


def _offsets(segment_ids: Tensor) -> Tensor:
    rows, length = segment_ids.shape
    places = segment_ids + torch.arange(rows, dtype=torch.int64, device=segment_ids.device)[:, None] * (length + 1)
    _, lengths = torch.unique_consecutive(places[segment_ids > 0], return_counts=True)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _block_mask(segment_ids: Tensor, *, causal: bool) -> "BlockMask":
    from torch.nn.attention.flex_attention import create_block_mask

    def is_allowed(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = segment_ids[row, query]
        allowed = (own == segment_ids[row, key]) & (own > 0)
        return allowed & (key <= query) if causal else allowed

    rows, length = segment_ids.shape
    return create_block_mask(is_allowed, rows, None, length, length, device=str(segment_ids.device))


def _check(segment_ids: Any) -> None:
    is_tensor = isinstance(segment_ids, Tensor)
    if not is_tensor or segment_ids.dim() != len(_SHAPE) or segment_ids.is_floating_point():
        what = f"of shape {tuple(segment_ids.shape)}" if is_tensor else f"a {type(segment_ids).__name__}"
        raise BatchError(
            f"segment_ids is {what}: expected whole numbers of shape [rows, length], as Packed has them"
        )


def unpack(hidden: Tensor, packed: Packed, take: Literal["first", "last", "mean"] = "first") -> Tensor:
    """Return one vector for each sequence of packed rows, such as the vector of its first token.

    Args:
        hidden: Output of a model for the rows, of shape ``[rows, max_length, ...]`` and floating point.
        packed: The rows.
        take: Whether to return the vector of each sequence's first token, of its last token, or the mean of all.

    Returns:
        Shape ``[sequences, ...]``, in the order of ``packed.rows`` and of ``packed.sequences``.

    Raises:
        BatchError: If ``hidden`` has another shape or ``take`` has none of these values.
    """
    _check_kinds("unpack", Packed, packed=packed)
    _check_kinds("unpack", Tensor, hidden=hidden)
    if hidden.shape[:2] != packed.segment_ids.shape:
        raise BatchError(
            f"hidden has shape {tuple(hidden.shape)}, and the rows {tuple(packed.segment_ids.shape)}: expected "
            "one vector for each token of each row"
        )
    if take == "first":
        return hidden[packed.rows, packed.starts]
    if take == "last":
        return hidden[packed.rows, packed.starts + packed.lengths - 1]
    if take != "mean":
        raise BatchError(f"take={take!r} must be 'first', 'last' or 'mean'")
    tokens = hidden[packed.segment_ids > 0]
    owners = torch.repeat_interleave(packed.lengths)
    sums = tokens.new_zeros((packed.num_sequences, *tokens.shape[1:])).index_add(0, owners, tokens)
    return sums / packed.lengths.reshape(-1, *[1] * (sums.dim() - 1))


def token_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``losses`` over the tokens for which ``mask`` is true; 0 if there is no such token.

    If :func:`label_counts` gives the weights of the micro batches, the result is the mean over all tokens of the
    job.

    Args:
        losses: One loss for each token; any shape, floating point.
        mask: True, or not 0, for the tokens that count; same shape as ``losses``.

    Raises:
        BatchError: If the shapes differ.
    """
    _check_kinds("token_mean", Tensor, losses=losses, mask=mask)
    if losses.shape != mask.shape:
        raise BatchError(
            f"losses of shape {tuple(losses.shape)} and a mask of shape {tuple(mask.shape)} must be alike"
        )
    counted = mask.to(torch.bool)
    return losses.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def label_counts(batch: "Batch", name: str = "labels", *, ignored: int = -100) -> list[int]:
    """Return the number of labels of each micro batch, as ``weights`` for ``ReplicatedModel.micro_batches``.

    Args:
        batch: Batch of ``popdist.data_loader`` with ``packing``.
        name: The field of the labels.
        ignored: The label that does not count.

    Raises:
        BatchError: If a micro batch is no ``Packed``, or has no such field of tokens.
    """
    _check_kinds("label_counts", str, name=name)
    if not hasattr(batch, "micro_batches"):
        raise BatchError(
            f"label_counts: batch must be one of popdist.data_loader, and is a {type(batch).__name__}"
        )
    ignored = whole_number("ignored", ignored, BatchError, minimum=-(2**63))
    counts = []
    for micro in batch.micro_batches:
        content: Any = micro.content
        if content is None:
            counts.append(0)
            continue
        if not isinstance(content, Packed) or name not in content.tokens:
            raise BatchError(f"a micro batch is a {type(content).__name__} without a field {name!r} of tokens")
        counts.append(int((content.tokens[name] != ignored).sum()))
    return counts


def packed_betas(betas: tuple[float, float], packing_factor: float) -> tuple[float, float]:
    """Return Adam's betas for rows of ``packing_factor`` sequences: each beta to the power ``packing_factor``.

    With these betas a gradient is forgotten after as many sequences as before (https://arxiv.org/abs/2107.02027).

    Args:
        betas: Adam's betas without packing, each 0 to 1.
        packing_factor: Sequences a row, at least 1.

    Raises:
        BatchError: If a number is out of its range.
    """
    given: object = betas
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if not (is_pair and all(0 <= as_float(beta) <= 1 for beta in betas) and as_float(packing_factor) >= 1):
        raise BatchError(f"betas={betas} must lie in 0 to 1, and packing_factor={packing_factor} be at least 1")
    first, second = betas
    return first**packing_factor, second**packing_factor


def _check_kinds(call: str, kind: type, **given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, kind):
            raise BatchError(f"{call}: {name} must be a {kind.__name__}, and is a {type(value).__name__}")
