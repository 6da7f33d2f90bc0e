"""Descriptions of models: layers with their parameters, activation bytes, and numbers of operations.

The equations of a transformer layer come from Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (arXiv 2205.05198), and are extended to grouped-query heads, gated MLPs and fused attention.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, get_args

from popsize.errors import ModelError

Recompute = Literal["none", "attention", "layer"]
RECOMPUTE: Final[tuple[Recompute, ...]] = get_args(Recompute)

HALF_BYTES: Final = 2
"""Bytes of a 16-bit activation. Other precisions multiply the bytes of activations by a factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An amount, such as bytes or operations, in two parts: one part that tensor parallelism divides over devices,
    and one part that each device has in full.
    """

    divided: float = 0.0  # the part that is divided over the devices of a tensor group
    whole: float = 0.0  # the part that each of these devices has in full, unless sequence parallelism divides it

    def on_device(self, tensor: int, *, sequence_parallel: bool = False) -> float:
        """Return the amount, such as bytes, on each of ``tensor`` devices that share each layer of a model."""
        return self.divided / tensor + self.whole / (tensor if sequence_parallel else 1)

    def __add__(self, other: "Split") -> "Split":
        """Return the sum of two amounts, such as bytes: the sum of the two parts that tensor parallelism divides,
        and the sum of the two parts that each device has in full.
        """
        return Split(divided=self.divided + other.divided, whole=self.whole + other.whole)


_NOTHING: Final = Split()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """A layer of a model, or several equal layers in a row. All amounts are for one layer."""

    name: str  # such as ``block`` or ``embedding``
    count: int = 1  # how many such layers follow each other
    parameters: Split  # number of parameters
    kept: Split = _NOTHING  # bytes of 16-bit activations that a sample leaves for the backward pass
    # The part of ``kept`` that selective recomputation (``recompute=attention``) does not keep: activations of the
    # core of attention, or with fused attention those that torch's selective checkpointing computes again.
    cheap: Split = _NOTHING
    cheap_flops: Split = _NOTHING  # operations of the matrix products that selective recomputation computes again
    # Bytes of the output of one sample. If the layer is recomputed, only these bytes are kept; if a stage ends
    # after the layer, these bytes are sent.
    output_bytes: float = 0.0
    # Operations of the matrix products in the forward pass of one sample. The backward pass has twice as many.
    matmul_flops: Split = _NOTHING
    attention_flops: Split = _NOTHING  # operations of attention's products of activations in this forward pass
    score_bytes: Split = _NOTHING  # bytes that the attention's scores move in the forward pass of one sample
    memory_bytes: Split = _NOTHING  # bytes that elementwise operations move in the forward pass of one sample
    num_kernels: float = 0.0  # kernels of the forward pass; the backward pass counts as two forward passes
    # All-reduces of ``output_bytes`` that tensor parallelism adds to each of the forward and the backward pass.
    num_reductions: int = 0
    loss_bytes: Split = _NOTHING  # bytes that a loss at the layer's output needs for a sample while it is computed
    # Bytes of gradients of activations that the backward pass of a sample needs at the same time, without the
    # activations that the forward pass kept and without the gradient of the output.
    backward_bytes: Split = _NOTHING
    # Parameters of the largest matrix, because its gradient needs memory of its own before it is added.
    largest_matrix: Split = _NOTHING
    # Heads whose scores a separate kernel masks and scales; 0 if attention is fused or the layer has no attention.
    mask_heads: int = 0
    can_recompute: bool = True  # whether the layer can be recomputed; an embedding and logits cannot
    parts: tuple[float, ...] = (1.0,)  # shares of the parameters between the places where a phase may end

    def stored(self, recompute: Recompute) -> Split:
        """Return the bytes of activations that a sample keeps, if the activations ``recompute`` are recomputed."""
        if recompute == "none" or not self.can_recompute:
            return self.kept
        if recompute == "layer":
            return Split(whole=self.output_bytes)
        return Split(divided=self.kept.divided - self.cheap.divided, whole=self.kept.whole - self.cheap.whole)


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model: its layers in order, and the sizes that tensor parallelism has to divide."""

    name: str  # the model's usual name
    sequence: int  # tokens of a sample; 1 for models without sequences
    layers: tuple[Layer, ...]  # the layers, first to last
    # Sizes that a tensor group has to divide: names and numbers, such as ``(("heads", 96), ("hidden", 12288))``.
    divisors: tuple[tuple[str, int], ...] = ()
    # Parameters that the last layer shares with the first layer. If both are on different stages, each has a copy.
    tied_parameters: float = 0.0

    def undivided(self, tensor: int) -> list[tuple[str, int]]:
        """Return the name and value of each size, such as heads, that ``tensor`` devices cannot share evenly."""
        pairs = [(name, number) for name, number in self.divisors if number % tensor]
        return [(name, number) for name, number in pairs if name != "kv_heads" or tensor % number]

    @cached_property
    def num_parameters(self) -> float:
        """Number of parameters of the whole model; tied parameters count once."""
        total = sum(layer.count * (layer.parameters.divided + layer.parameters.whole) for layer in self.layers)
        return total - self.tied_parameters

    @cached_property
    def every_layer(self) -> tuple[Layer, ...]:
        """All layers in order; of several equal layers in a row, the same layer several times."""
        return tuple(layer for layer in self.layers for _ in range(layer.count))

    @cached_property
    def num_layers(self) -> int:
        """Number of layers in the model's longest run of equal layers, which the pipeline stages divide."""
        return self.block.count

    @cached_property
    def block(self) -> Layer:
        """The layer that the model repeats most often, usually a transformer block."""
        return max(self.layers, key=lambda layer: layer.count)

    @cached_property
    def flops_per_sample(self) -> float:
        """Number of operations of the forward and backward pass of a sample, without recomputation."""
        return 3 * sum(it.count * (it.matmul_flops + it.attention_flops).on_device(1) for it in self.layers)


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The sizes and options of a transformer, as papers print them."""

    layers: int  # number of blocks
    hidden: int  # width of the residual stream
    heads: int  # attention heads
    sequence: int  # tokens of a sample
    vocab: int = 0  # words; 0: neither embedding nor logits are counted
    head_width: int = 0  # width of a head; 0: ``hidden`` divided by ``heads``
    kv_heads: int = 0  # heads of keys and values (grouped queries); 0: as many as ``heads``
    ffn: int = 0  # width inside the MLP; 0: four times ``hidden``
    gated: bool = False  # whether the MLP has a gate (SwiGLU): three matrices in place of two
    tied: bool = False  # whether the logits are computed with the embedding's matrix
    positions: int = 0  # learned position embeddings; 0: none
    biases: bool = True  # whether matrices have biases, and norms a shift
    dropout: bool = True  # whether dropout masks are kept
    fused_attention: bool = False  # whether attention runs in one kernel that keeps no scores (FlashAttention)
    # whether a token attends to earlier ones only; a fused kernel then computes half of the scores
    causal: bool = True
    # whether the loss works on a 32-bit copy of the logits (14 bytes a logit in place of 6)
    full_loss: bool = False

    def __post_init__(self) -> None:
        """Check the sizes. Raise ModelError if one is out of range, or heads do not divide a size evenly."""
        needed = ("layers", "hidden", "heads", "sequence")
        for name in (*needed, "vocab", "head_width", "kv_heads", "ffn", "positions"):
            least, most = int(name in needed), 10**5 if name == "layers" else 10**9
            if not least <= getattr(self, name) <= most:
                raise ModelError(f"{name} is {getattr(self, name)}: give a number from {least} to {most:,}")
        if self.hidden % self.heads and not self.head_width:
            raise ModelError(f"{self.heads} heads do not divide a hidden size of {self.hidden}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ModelError(f"{self.kv_heads} heads of keys do not divide {self.heads} heads")

    @property
    def query_width(self) -> int:
        """Number of query values of a token in all attention heads together."""
        return self.heads * (self.head_width or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Size of a token's keys over all attention heads; the token's values (V) have the same size."""
        return (self.kv_heads or self.heads) * (self.head_width or self.hidden // self.heads)

    @property
    def ffn_width(self) -> int:
        """Number of hidden values of a token inside the MLP."""
        return self.ffn or 4 * self.hidden


def transformer(numbers: Transformer, name: str = "transformer") -> Model:
    """Return the model with the sizes ``numbers``, without embedding and logits if ``numbers.vocab`` is 0."""
    layers: tuple[Layer, ...] = (replace(_block(numbers), count=numbers.layers),)
    if numbers.vocab:
        layers = (_embedding(numbers), *layers, _head(numbers))
    kv_heads = numbers.kv_heads or numbers.heads
    return Model(
        name=name,
        sequence=numbers.sequence,
        layers=layers,
        divisors=(
            *(("hidden", numbers.hidden), ("heads", numbers.heads)),
            *(("kv_heads", kv_heads), ("ffn", numbers.ffn_width)),
        ),
        tied_parameters=float(numbers.vocab * numbers.hidden) if numbers.tied else 0.0,
    )


def _block(n: Transformer) -> Layer:
    """Return the layer for one block of a transformer: attention and MLP, with a norm before each."""
    width, query, tokens = n.hidden, n.query_width, n.sequence
    attending = 2 * width * (query + n.kv_width)
    matrices = attending + (3 if n.gated else 2) * width * n.ffn_width
    biases = (
        2 * width + query + 2 * n.kv_width + (1 if n.gated else 0) * n.ffn_width + n.ffn_width if n.biases else 0
    )
    norms = (4 if n.biases else 2) * width
    scores = float(n.heads * tokens * tokens)
    inner = HALF_BYTES * n.ffn_width * (4 if n.gated else 2)
    core = 4.0 * n.heads * tokens if n.fused_attention else (5 if n.dropout else 2) * scores
    kept = Split(
        divided=tokens * (HALF_BYTES * (2 * query + 2 * n.kv_width) + inner) + core,
        whole=tokens * width * (HALF_BYTES * 4 + (2 if n.dropout else 0)),
    )
    cheap, again = Split(divided=core), Split()
    if n.fused_attention:
        again = Split(divided=2.0 * tokens * width * (n.kv_width + query + n.ffn_width))
        # torch keeps the input, queries, values, attention's output, and the last and one more product of the MLP.
        cheap = Split(
            divided=kept.divided - tokens * HALF_BYTES * (2 * query + n.kv_width + n.ffn_width),
            whole=kept.whole - tokens * HALF_BYTES * 2 * width,
        )
    moved = Split(
        divided=float(tokens * (2 * HALF_BYTES * query + inner)), whole=11.0 * HALF_BYTES * tokens * width
    )
    return Layer(
        name="block",
        parameters=Split(
            divided=matrices + (biases and biases - 2 * width), whole=norms + (2 * width if biases else 0)
        ),
        kept=kept,
        cheap=cheap,
        cheap_flops=again,
        output_bytes=float(HALF_BYTES * tokens * width),
        matmul_flops=Split(divided=2.0 * tokens * matrices),
        attention_flops=Split(
            divided=4.0 * tokens * tokens * query / (2 if n.fused_attention and n.causal else 1)
        ),
        score_bytes=Split(divided=0.0 if n.fused_attention else 9 * scores),
        memory_bytes=moved,
        num_kernels=18.5 if n.fused_attention else 27.5,
        num_reductions=2,
        backward_bytes=Split(divided=float(HALF_BYTES * tokens * n.ffn_width * (2 if n.gated else 1))),
        largest_matrix=Split(divided=float(width * n.ffn_width)),
        mask_heads=0 if n.fused_attention else n.heads,
        parts=(attending / matrices, 1 - attending / matrices),
    )


def _embedding(n: Transformer) -> Layer:
    """Return the layer for a transformer's embeddings of words and positions."""
    return Layer(
        name="embedding",
        parameters=Split(divided=float(n.vocab * n.hidden), whole=float(n.positions * n.hidden)),
        kept=Split(whole=float(n.sequence * n.hidden if n.dropout else 0)),
        output_bytes=float(HALF_BYTES * n.sequence * n.hidden),
        can_recompute=False,
    )


def _head(n: Transformer) -> Layer:
    """Return the layer for a transformer's last norm, the logits and the loss."""
    tokens, matrix = n.sequence, float(n.vocab * n.hidden)
    return Layer(
        name="head",
        parameters=Split(divided=matrix, whole=(2.0 if n.biases else 1.0) * n.hidden),
        kept=Split(whole=float(2 * HALF_BYTES * tokens * n.hidden)),
        output_bytes=float(HALF_BYTES * tokens * n.hidden),
        matmul_flops=Split(divided=2.0 * tokens * matrix),
        memory_bytes=Split(divided=20.0 * tokens * n.vocab),
        num_reductions=1,
        can_recompute=False,
        loss_bytes=Split(divided=float(tokens * n.vocab * (14 if n.full_loss else 6))),
    )
