"""Attention masks, outputs and losses that keep the sequences of a packed row apart.

Packed and unpacked training have the same gradients, if nothing of a sequence reaches another one (the mask, and
positions that begin again) and if each token, or each sequence, weighs the same as without packing (the weights).
"""

import math
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import torch
from torch import Tensor

from popdist.errors import BatchError, as_float, whole_number
from popdist.packing.collation import Packed

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from popdist.data.batch import Batch

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
    """Who may attend to whom, so that no sequence sees another one of its row.

    Args:
        segment_ids: Of ``Packed``: whole numbers of shape ``[rows, length]``, 0 for padding.
        form: ``"sdpa"``: True where attention is allowed, for ``scaled_dot_product_attention`` and models of the
            library transformers. ``"additive"``: 0 there and ``masked`` elsewhere, to add to the scores.
            ``"flex"``: a ``BlockMask`` for ``flex_attention``. ``"nested"``: where each sequence ends, for
            ``torch.nested.nested_tensor_from_jagged(x[segment_ids > 0], offsets)``.
        causal: Whether a token may attend to those before it and to itself only. Not for ``"nested"``, where
            ``is_causal=True`` goes to ``scaled_dot_product_attention``.
        dtype: Of the form ``"additive"``; floating point.
        masked: What the form ``"additive"`` adds where attention is not allowed; below 0, and ``-math.inf`` too.

    Returns:
        A tensor of shape ``[rows, 1, length, length]`` (query, then key): bool for ``"sdpa"``, ``dtype`` for
        ``"additive"``; a ``BlockMask``; or int64 of shape ``[sequences + 1]``, beginning with 0. Padding attends
        to nothing; where ``masked`` is ``-math.inf`` it attends to itself, so that its softmax is not NaN.

    Raises:
        BatchError: If ``segment_ids`` has another shape, or another argument is none of these.
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
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 - it loads torch's compiler

    def is_allowed(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = segment_ids[row, query]
        allowed = (own == segment_ids[row, key]) & (own > 0)
        return allowed & (key <= query) if causal else allowed

    rows, length = segment_ids.shape
    return create_block_mask(is_allowed, rows, None, length, length, device=str(segment_ids.device))


def _check(segment_ids: Any) -> None:  # noqa: ANN401 - what was given, checked here
    is_tensor = isinstance(segment_ids, Tensor)
    if not is_tensor or segment_ids.dim() != len(_SHAPE) or segment_ids.is_floating_point():
        found = f"of shape {tuple(segment_ids.shape)}" if is_tensor else f"a {type(segment_ids).__name__}"
        raise BatchError(
            f"segment_ids is {found}: expected whole numbers of shape [rows, length], as Packed has them"
        )


def unpack(hidden: Tensor, packed: Packed, take: Literal["first", "last", "mean"] = "first") -> Tensor:
    """One vector for each sequence, such as a classifier needs; gradients flow through it.

    Args:
        hidden: What a model made of the rows, of shape ``[rows, max_length, ...]`` and floating point.
        packed: The rows.
        take: The vector of a sequence's first token, of its last one, or the mean over its tokens.

    Returns:
        Shape ``[sequences, ...]``, in the order of ``packed.rows`` and of ``packed.sequences``.

    Raises:
        BatchError: If ``hidden`` has another shape or ``take`` is none of these.
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
    """Mean of the losses of tokens, over those that count; 0 when none does.

    With :func:`label_counts` as the weights of the micro batches it is the mean over all tokens of the job.

    Args:
        losses: One for each token; any shape, floating point.
        mask: True, or not 0, for those that count; of the same shape.

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
    """How many labels of tokens each micro batch has: ``weights`` for ``ReplicatedModel.micro_batches``.

    Args:
        batch: Of ``popdist.data_loader`` with ``packing``.
        name: The field of the labels.
        ignored: The label that does not count.

    Raises:
        BatchError: If the contents are no ``Packed``, or have no such field of tokens.
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
    """Momenta for a step that has ``packing_factor`` times as many sequences as before: ``(b1 ** p, b2 ** p)``.

    So a gradient is forgotten after as many sequences as before (https://arxiv.org/abs/2107.02027).

    Args:
        betas: As Adam has them, each 0 to 1.
        packing_factor: Sequences a row, at least 1.

    Raises:
        BatchError: If a number is out of its range.
    """
    given: object = betas
    is_pair = isinstance(given, tuple | list) and len(given) == 2  # noqa: PLR2004 - as Adam has them
    if not (is_pair and all(0 <= as_float(beta) <= 1 for beta in betas) and as_float(packing_factor) >= 1):
        raise BatchError(f"betas={betas} must lie in 0 to 1, and packing_factor={packing_factor} be at least 1")
    first, second = betas
    return first**packing_factor, second**packing_factor


def _check_kinds(call: str, kind: type, **given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, kind):
            raise BatchError(f"{call}: {name} must be a {kind.__name__}, and is a {type(value).__name__}")
