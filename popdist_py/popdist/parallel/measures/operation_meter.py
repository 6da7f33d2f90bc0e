"""A meter of a forward pass, operation by operation: FLOPs, kernels, and the bytes moved and kept.

The pass is divided into stretches: each repeated layer is a stretch, and so are the operations before, between and
behind the layers. The meter knows for each storage whether tensor parallelism divides it. A product with a weight
divides a whole activation (by columns), and the next product (by rows) adds the parts again.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from popsize.model import HALF_BYTES, Split

_PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm", "convolution", "scaled_mm")
_ATTENTION: Final = "scaled_dot_product"
_UNWRITTEN: Final = ("empty", "new_empty")
_OPAQUE: Final = ("mkldnn_rnn_layer", "cudnn_rnn")
_IMAGE_DIMENSIONS: Final = 4
_LOOKUPS: Final = ("embedding", "gather", "index", "index_select")
"""The operations that read no more bytes of a table than they write."""


@dataclass(eq=False)
class Stretch:
    """A part of a forward pass (a repeated layer, or the operations between layers), with its costs per batch."""

    name: str = ""
    # the keys are fields of popsize.model.Layer; "stored" is what selective recomputation leaves of "kept"
    amounts: defaultdict[str, Split] = field(default_factory=lambda: defaultdict(Split))
    output: Tensor | None = None
    num_kernels: int = 0
    num_reductions: int = 0
    num_products: int = 0
    heads: int = 0
    fused: bool = False
    divisors: dict[tuple[str, int], None] = field(default_factory=dict)
    # elements of the weights between two sums over a tensor group
    parts: list[int] = field(default_factory=lambda: [0])

    def add(self, what: str, amount: float, *, divided: bool) -> None:
        """Add ``amount`` to the cost named ``what``; ``divided`` says whether tensor parallelism divides it."""
        self.amounts[what] += Split(divided=amount) if divided else Split(whole=amount)

    def raise_to(self, what: str, amount: float, *, divided: bool) -> None:
        """Set the cost named ``what`` to ``amount``, unless this cost is larger already."""
        if amount > self.amounts[what].on_device(1):
            self.amounts.pop(what)
            self.add(what, amount, divided=divided)

    def join(self, other: "Stretch") -> None:
        """Add the costs of ``other``, a part of the same layer; take its name and output if this part has none."""
        if not self.name and self.output is None:
            self.name, self.output = other.name, other.output
        for what, amount in other.amounts.items():
            self.amounts[what] += amount
        self.num_kernels += other.num_kernels
        self.num_reductions += other.num_reductions
        self.heads = max(self.heads, other.heads)
        self.fused |= other.fused
        self.parts = [*self.parts, *other.parts]


@dataclass(eq=False)
class Weight:
    """The size of a parameter, the layers that use it, and whether tensor parallelism divides the parameter."""

    numel: int
    users: list[int] = field(default_factory=list)
    divided: bool = False


@dataclass(eq=False)
class Storage:
    """The known facts about the memory of tensors, such as the part of the pass that has written the memory."""

    maker: int = 0  # the stretch that wrote the memory
    weight: Weight | None = None  # the parameter in the memory, or the parameter from which it was computed
    constant: bool = False  # whether the memory is the same for every sample
    given: bool = False  # whether the memory is an input of the module
    divided: bool = False  # whether tensor parallelism divides the memory
    score: bool = False  # whether it was computed from the scores of an attention
    kept_bytes: float = 0.0
    keepers: set[int] = field(default_factory=set)  # the stretches whose backward pass needs the memory


class OperationMeter:
    """A meter of a forward pass: it runs and counts operations, and counts tensors kept for the backward pass."""

    def __init__(
        self, weights: list[Tensor], constants: list[Tensor], inputs: list[Tensor], *, has_layers: bool
    ) -> None:
        """Make a meter for a module; ``has_layers`` says whether the module has repeated layers."""
        item_bytes = max((it.element_size() for it in weights if it.is_floating_point()), default=HALF_BYTES)
        self._scale = HALF_BYTES / item_bytes
        self._has_layers = has_layers
        self.num_samples = inputs[0].shape[0]
        self.stretches = [Stretch()]
        self.operator: object = None
        self.can_divide = True
        self.weights = {StorageWeakRef(it.untyped_storage()): Weight(it.numel()) for it in weights}
        self.storages = {ref: Storage(weight=it, constant=True) for ref, it in self.weights.items()}
        self.storages |= {StorageWeakRef(it.untyped_storage()): Storage(constant=True) for it in constants}
        self.storages |= {StorageWeakRef(it.untyped_storage()): Storage(given=True) for it in inputs}

    def enter(self, name: str, value: object) -> None:
        """Begin to count the operations of the repeated layer ``name``, whose arguments are ``value``."""
        if len(self.stretches) == 1:
            self.stretches[0].output = _first(value)
        self.stretches.append(Stretch(name))
        if (tensor := _first(value)) is not None:
            self.stretches[-1].add("stored", self.bytes_of(tensor), divided=False)

    def exit(self, value: object) -> None:
        """End the count of the operations of a layer, or of the whole forward pass, with the result ``value``."""
        tensor = self.stretches[-1].output = _first(value)
        if self.stretches[-1].name:
            self.can_divide &= tensor is not None and not self.known(tensor).divided
            self.stretches.append(Stretch())

    def known(self, tensor: Tensor) -> Storage:
        """Return the recorded facts about the memory of ``tensor``; new memory gets a new record."""
        new = Storage(maker=len(self.stretches) - 1)
        return self.storages.setdefault(StorageWeakRef(tensor.untyped_storage()), new)

    def bytes_of(self, tensor: Tensor | None, *, view: bool = True) -> float:
        """Return the bytes of ``tensor``, or of its whole storage if not ``view``; a float counts as 16 bits."""
        if tensor is None:
            return 0.0
        size = tensor.untyped_storage().nbytes()
        scale = self._scale if tensor.is_floating_point() else 1.0
        return scale * (min(size, tensor.numel() * tensor.element_size()) if view else size)

    def keep(self, tensor: Tensor) -> Tensor:
        """Record that autograd keeps the storage of ``tensor`` for the backward pass; return ``tensor``."""
        storage = self.known(tensor)
        storage.kept_bytes = self.bytes_of(tensor, view=False)
        storage.keepers.add(len(self.stretches) - 1)
        return tensor

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run the operation ``operator``, count its cost, and return its result."""
        self.operator = operator
        name = str(operator.overloadpacket.__name__).lstrip("_")
        if name in _OPAQUE:
            raise NotImplementedError("torch has no rule for what it computes and keeps")
        result: object = operator(*args, **kwargs)
        inputs = {id(it): (it, self.known(it)) for it in tensors_in((args, kwargs))}
        before = {id(storage) for _, storage in inputs.values()}
        outputs = [(it, self.known(it)) for it in tensors_in(result)]
        for _, storage in inputs.values():
            if storage.weight is not None:
                storage.weight.users.append(len(self.stretches) - 1)
        # an operation that writes nothing, such as a view, starts no kernel
        if name.endswith("_") or any(id(storage) not in before for _, storage in outputs):
            if name.startswith(_ATTENTION):
                self._count_attention(name, args, kwargs, outputs)
            elif name in _PRODUCTS:
                work = flop_registry[operator.overloadpacket](*args, **kwargs, out_val=result)
                self._count_product(args[1:3] if name in {"addmm", "baddbmm"} else args[:2], work, outputs[0])
                self._divide([storage for _, storage in inputs.values()], outputs[0][1])
            else:
                self._count_elementwise(name, list(inputs.values()), outputs)
        self.operator = None
        return result

    def _count_attention(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[tuple[Tensor, Storage]]
    ) -> None:
        """Count the cost of a fused attention; torch's own counter misses CPU kernels and ignores causal masks."""
        query, key, value = args[:3]
        place = 4 if "flash" in name else 6
        causal = kwargs.get("is_causal", args[place] if len(args) > place else False)
        work = 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        divided = any(self.known(it).divided for it in (query, key, value))
        stretch = self.stretches[-1]
        stretch.fused = True
        stretch.num_kernels += 1
        stretch.add("attention_flops", work / (2 if causal else 1), divided=divided)
        stretch.divisors |= {("heads", query.shape[-3]): None, ("kv_heads", key.shape[-3]): None}
        for _, storage in outputs:
            storage.divided = divided
        stretch.add("stored", self.bytes_of(outputs[0][0]), divided=divided)

    def _count_product(self, operands: tuple[Tensor, ...], work: float, output: tuple[Tensor, Storage]) -> None:
        """Count a matrix product's cost: of a weight and an activation, or of two activations, as in attention."""
        tensor, made = output
        stretch = self.stretches[-1]
        stretch.num_kernels += 1
        known = [self.known(it) for it in operands]
        free = [it for it in known if not it.constant]
        made.constant = not free
        made.divided = any(it.divided for it in free)
        if len(free) > 1:
            made.score = not any(it.score for it in free)
            stretch.add("attention_flops", work, divided=made.divided)
            stretch.heads = tensor.shape[0] // self.num_samples if tensor.dim() == 3 else 1
            stretch.divisors[("heads", max(1, stretch.heads))] = None
            return
        weight = next((it.weight for it in known if it.weight is not None), None) if free else None
        if weight is not None:
            self._count_weight(weight, tensor, made)
        stretch.add("matmul_flops", work, divided=weight is not None and weight.divided)

    def _count_weight(self, weight: Weight, tensor: Tensor, made: Storage) -> None:
        """Count a matrix product with the parameter ``weight``, which tensor parallelism can divide."""
        stretch = self.stretches[-1]
        stretch.num_products += 1
        stretch.parts[-1] += weight.numel
        # before the layers, only tables are divided
        weight.divided |= not self._has_layers or len(self.stretches) > 1
        if made.divided:
            stretch.num_reductions += 1
            stretch.parts.append(0)
        made.divided = weight.divided and not made.divided
        if made.divided:
            width = tensor.shape[1] if tensor.dim() >= _IMAGE_DIMENSIONS else tensor.shape[-1]
            stretch.divisors[("width", width)] = None
        # torch's policy of selective recomputation stores every second product
        if stretch.num_products % 2:
            stretch.add("stored", self.bytes_of(tensor), divided=made.divided)

    @staticmethod
    def _divide(inputs: list[Storage], made: Storage) -> None:
        """Mark each weight in ``inputs`` as divided if the result ``made`` of the operation is divided."""
        for storage in inputs:
            if storage.weight is not None and not made.constant:
                storage.weight.divided |= made.divided

    def _count_elementwise(
        self, name: str, inputs: list[tuple[Tensor, Storage]], outputs: list[tuple[Tensor, Storage]]
    ) -> None:
        """Count an operation on single elements, whose cost is the bytes that are read and written."""
        known = [storage for _, storage in inputs]
        free = [storage for storage in known if not storage.constant]
        divided = any(storage.divided for storage in free)
        score = any(storage.score for storage in free)
        for _, storage in outputs:
            storage.constant = bool(known) and not free
            storage.weight = storage.weight or (known[0].weight if storage.constant else None)
            storage.divided, storage.score = divided, score
            self._divide(known, storage)
        if name.startswith(_UNWRITTEN):
            return
        stretch = self.stretches[-1]
        stretch.num_kernels += 1
        written = sum(self.bytes_of(tensor) for tensor, _ in outputs)
        read = sum(self.bytes_of(tensor) for tensor, _ in inputs)
        if name in _LOOKUPS:
            read = min(read, written + self.bytes_of(inputs[-1][0]))
            weight = known[0].weight
            if weight is not None and any(storage.given for storage in free):
                # A lookup is added over the group in the forward pass only, and logits in the backward pass only.
                # Both together count as one sum, which the last layer has.
                weight.divided = True
        stretch.add("score_bytes" if score else "memory_bytes", read + written, divided=divided)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def _first(value: object) -> Tensor | None:
    """Return the first floating-point tensor in the nested ``value``; None if there is no such tensor."""
    return next((it for it in tensors_in(value) if it.is_floating_point()), None)
