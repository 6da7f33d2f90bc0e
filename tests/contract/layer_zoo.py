"""Layers as people write them; in a phased model each gives the bits of memory, or an error by name.

A case makes a model, and says how its loss is computed and which error is expected, if one is.
"""

# mypy: disable-error-code="no-any-return,override,operator"
# what people write is not annotated, and has other signatures than the class above it

import contextvars
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import popdist
from popdist.parallel import PhasedOptimizer, phased

WORDS, LENGTH, WIDTH = 11, 6, 8

Loss = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it is trained, and the error that is expected of its phases, or none."""

    make: Callable[[], nn.Module]
    loss: Loss
    refused: str = ""
    is_chain: bool = True  # else gradients of a tensor that several layers read may be added in another order
    has_backward: bool = False  # whether the loss is passed back already
    around: Callable[[], Any] | None = None  # a context around each forward pass only
    prepare: Callable[[Any], object] = field(default=lambda _: None)  # once, behind phased() or ReplicatedModel()


CASES: dict[str, Case] = {}
"""All of them by name."""


def words_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss of the next word."""
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Net(nn.Module):
    """An embedding, three layers and a head."""

    def __init__(
        self, make: Callable[[], nn.Module], forward: Callable[["Net", Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = self.words(x)
        if self.run is not None:
            y = self.run(self, y)
        else:
            for layer in self.layers:
                y = layer(y)
        logits: Tensor = self.head(y)
        return logits


def case(
    name: str,
    refused: str = "",
    run: Callable[[Net, Tensor], Tensor] | None = None,
    loss: Loss = words_loss,
    **options: Any,
) -> Callable[[Any], Any]:
    """Register the class or function below as the layer of a case."""

    def register(make: Any) -> Any:
        CASES[name] = Case(make=lambda: Net(make, run), loss=loss, refused=refused, **options)
        return make

    return register


class Linear(nn.Module):
    """A layer with one weight matrix, from which others are derived."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        """Hidden states."""
        return x + functional.gelu(self.linear(x))


case("plain")(Linear)

# Gradients that leave a layer in another way than as its result

LEFT = "came to a tensor that layers.. has computed and not returned"


@case(
    "an attribute in the loss",
    LEFT,
    loss=lambda model, x, y: words_loss(model, x, y) + 0.5 * sum(it.aux for it in model.layers),
)
class Attribute(Linear):
    """Leaves a tensor in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        y = self.linear(x)
        self.aux = y.square().mean()
        return x + y


SEEN: list[Tensor] = []
"""What hooks have found."""


def hooked() -> nn.Module:
    """A layer with a hook inside."""
    made = Linear()
    made.linear.register_forward_hook(lambda *it: SEEN.append(it[2]))
    return made


def seen_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Add what hooks have found."""
    SEEN.clear()
    return words_loss(model, x, y) + sum(it.square().mean() for it in SEEN)


case("a hook in the layer", LEFT, loss=seen_loss)(hooked)


def hooked_outside() -> nn.Module:
    """A layer with a hook on itself."""
    made = Linear()
    made.register_forward_hook(lambda *it: SEEN.append(it[2]))
    return made


case("a hook on the layer", "", loss=seen_loss, is_chain=False)(hooked_outside)


@case("a SimpleNamespace", LEFT, lambda net, y: net.layers[2](net.layers[1](net.layers[0](y).x).x).x)
class Spaced(Linear):
    """Returns what nobody opens."""

    def forward(self, x: Tensor) -> SimpleNamespace:
        """Hidden states."""
        return SimpleNamespace(x=super().forward(x))


class Registered:
    """A class that torch's pytree knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


pytree.register_pytree_node(Registered, lambda it: ([it.x], None), lambda children, _: Registered(*children))


@case("a class that is registered", "", lambda net, y: net.layers[2](net.layers[1](net.layers[0](y).x).x).x)
class Opened(Linear):
    """Returns what torch opens."""

    def forward(self, x: Tensor) -> Registered:
        """Hidden states."""
        return Registered(super().forward(x))


@dataclass
class Output:
    """A dataclass, in a dict."""

    x: Tensor
    mask: Tensor | None = None


@case(
    "dataclasses, dicts and None",
    "",
    lambda net, y: net.layers[2](net.layers[1](net.layers[0](y)[1]["a"].x)[1]["a"].x)[1]["a"].x,
)
class Nested(Linear):
    """Returns a nest."""

    def forward(self, x: Tensor) -> tuple[None, dict[str, Output]]:
        """Hidden states."""
        return None, OrderedDict(a=Output(super().forward(x), x > 0))


def with_list(net: Net, y: Tensor) -> Tensor:
    """Give all layers a list."""
    taken: list[Tensor] = []
    for layer in net.layers:
        y = layer(y, taken)
    return y + sum(taken)


@case("appends to its caller's list", "adds to or changes a list", with_list)
class Appending(Linear):
    """Appends to a list."""

    def forward(self, x: Tensor, taken: list[Tensor]) -> Tensor:
        """Hidden states."""
        y = self.linear(x)
        taken.append(y)
        return x + y


def with_dict(net: Net, y: Tensor) -> Tensor:
    """Give all layers a dict."""
    taken: dict[str, Tensor] = {}
    for layer in net.layers:
        y = layer(y, taken=taken)
    return y + taken["y"]


@case("sets a key of its caller's dict", "adds to or changes a list", with_dict)
class Setting(Linear):
    """Sets a key."""

    def forward(self, x: Tensor, taken: dict[str, Tensor]) -> Tensor:
        """Hidden states."""
        taken["y"] = self.linear(x)
        return x + taken["y"]


def with_object(net: Net, y: Tensor) -> Tensor:
    """Give all layers an object."""
    taken = SimpleNamespace(y=0)
    for layer in net.layers:
        y = layer(y, taken)
    return y + taken.y


@case("changes its caller's object", LEFT, with_object)
class Changing(Linear):
    """Sets an attribute."""

    def forward(self, x: Tensor, taken: SimpleNamespace) -> Tensor:
        """Hidden states."""
        taken.y = taken.y + self.linear(x)
        return x + 2 * self.linear(x)


def functional_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Compute with tensors of the program's own."""
    tensors = {name: torch.full(it.shape, 0.1, requires_grad=True) for name, it in model.named_parameters()}
    logits = torch.func.functional_call(getattr(model, "module", model), tensors, (x,))
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


case("functional_call", "is another tensor than the parameter", loss=functional_loss)(Linear)

# Weights that a layer derives from others

case("weight_norm")(lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)))
case("spectral_norm")(lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)))
case("parametrized weight_norm")(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))
case("parametrized spectral_norm")(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
case("parametrize.cached()", "cached", around=parametrize.cached)(
    lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
)


def normed_inside() -> nn.Module:
    """A layer within which a weight is normed."""
    made = Linear()
    nn.utils.weight_norm(made.linear)
    return made


case("weight_norm in the layer")(normed_inside)

# Inputs and results in one memory

case("ReLU in place first")(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))


@case("x += 1")
class AddsInPlace(Linear):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        x += 1
        return x * 2 + self.linear(x)


def reads_the_input_again(net: Net, y: Tensor) -> Tensor:
    """Read what a layer has changed, behind the layer."""
    for layer in net.layers:
        z = layer(y)
        y = y + z
    return y


case("x += 1, and the caller reads x", "", reads_the_input_again)(AddsInPlace)


@case("writes its input by a weight", "", reads_the_input_again)
class MultipliesInPlace(Linear):
    """Changes its input by a weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        x.mul_(self.linear.bias)
        return self.linear(x)


def freeze_words(model: Any) -> None:
    """Let the first layer's input have no gradient."""
    model.words.weight.requires_grad_(False)  # noqa: FBT003 - torch's own


case("x += 1 where x has no gradient", prepare=freeze_words)(AddsInPlace)


def adds_to_result(net: Net, y: Tensor) -> Tensor:
    """Change what a layer has returned."""
    for layer in net.layers:
        z = layer(y)
        z += 1
        y = z * y
    return y


@case("returns a view, which is changed", "", adds_to_result)
class View(Linear):
    """Returns a view of what it has made."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return self.linear(x).reshape(-1, WIDTH).view(x.shape)


@case("returns a view of its input, which is changed", "", adds_to_result)
class InputView(Linear):
    """Returns a view of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x.view(-1).view(x.shape)


@case("returns its changed input, which is changed", "", adds_to_result)
class ChangedInput(Linear):
    """Returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        x.mul_(self.linear.bias)
        return x


@case("returns its input", "", adds_to_result)
class Identity(Linear):
    """Does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x


def thirds(net: Net, y: Tensor) -> Tensor:
    """Join three results of a layer."""
    for layer in net.layers:
        q, k, v = layer(y)
        y = y + torch.tanh(q * k) * v
    return y


@case("returns three chunks", "", thirds)
class Chunks(nn.Module):
    """Returns views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values."""
        return self.linear(x).chunk(3, dim=-1)


def with_weight(net: Net, y: Tensor) -> Tensor:
    """Use a weight that a layer has returned."""
    for layer in net.layers:
        y, weight = layer(y)
        y = functional.linear(y, weight)
    return y


@case("returns a weight", "", with_weight)
class Weight(Linear):
    """Returns a weight."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states and a weight."""
        return self.linear(x), self.linear.weight


@case(
    "a detached result",
    "",
    lambda net, y: net.layers[0](y)[0] + net.layers[1](y)[1] + net.layers[2](y)[0],
    is_chain=False,
)
class Detached(Linear):
    """Returns a tensor without gradient, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the same without gradient."""
        y = super().forward(x)
        return y, y.detach()


def in_place_residual(net: Net, y: Tensor) -> Tensor:
    """Add to what a layer returns."""
    for layer in net.layers:
        z = layer(y)
        z += y
        y = z
    return y


case("a residual in place", "", in_place_residual)(
    lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
)

# What a layer reads of Python

SAME = "has computed something else the second time"


def numbered(net: Net, y: Tensor) -> Tensor:
    """Set an attribute before each call of one layer."""
    layer: Any = net.layers[0]
    for number in range(3):
        layer.number = number
        y = layer(y)
    return y


@case("an attribute before each call", SAME, numbered)
class Numbered(Linear):
    """Reads an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x + self.linear(x) * (1 + self.number)


NUMBER = contextvars.ContextVar("NUMBER", default=0)


def in_context(net: Net, y: Tensor) -> Tensor:
    """Set a variable around each call."""
    for number, layer in enumerate(net.layers):
        token = NUMBER.set(number)
        y = layer(y)
        NUMBER.reset(token)
    return y


@case("a ContextVar", SAME, in_context)
class InContext(Linear):
    """Reads a variable."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x + self.linear(x) * (1 + NUMBER.get())


@case("a generator of its own", SAME)
class Generating(Linear):
    """Draws from a generator that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x + self.linear(x) * torch.rand(WIDTH, generator=self.generator)


@contextmanager
def double() -> Iterator[None]:
    """Let new tensors be of double precision."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@case("set_default_dtype around the forward pass", SAME, around=double)
class Defaulting(Linear):
    """Makes a tensor of the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x + (self.linear(x) * (torch.ones(WIDTH) / 3)).to(x.dtype)


class Attention(nn.Module):
    """Attention by torch's fused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        q, k, v = (it.view(*x.shape[:2], 2, -1).transpose(1, 2) for it in self.qkv(x).chunk(3, dim=-1))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + found.transpose(1, 2).reshape(x.shape)


case("attention")(Attention)
case("sdpa_kernel around the forward pass", SAME, around=lambda: sdpa_kernel(SDPBackend.MATH))(Attention)

# Branches of torch


class Recurrent(nn.Module):
    """A recurrent layer of torch."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.norm, self.cells = nn.LayerNorm(WIDTH), kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        found: Tensor = self.cells(self.norm(x))[0]
        return x + found[..., :WIDTH]


case("LSTM")(lambda: Recurrent(nn.LSTM))
case("LSTM of two layers")(lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True))
case("GRU")(lambda: Recurrent(nn.GRU))


def encoder(dropout: float = 0.1) -> nn.Module:
    """Of torch."""
    return nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout, batch_first=True)


case("TransformerEncoderLayer")(encoder)
case("TransformerEncoderLayer in eval mode", prepare=lambda model: model.eval())(encoder)


@case("is_grad_enabled()")
class Asking(Linear):
    """Asks whether there are gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x + self.linear(x) * (2 if torch.is_grad_enabled() else 3)


def autocast() -> torch.autocast:
    """In bfloat16."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


case("autocast", around=autocast)(encoder)


@case("autocast(enabled=False) in the layer", around=autocast)
class Precise(Linear):
    """Computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        with torch.autocast("cpu", enabled=False):
            return x.float() + functional.gelu(self.linear(x.float()))


def backward_in_autocast(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Have the backward pass run under autocast, too."""
    with autocast():
        loss = words_loss(model, x, y)
        loss.backward()
    return loss.detach()


def off_within(net: Net, y: Tensor) -> Tensor:
    """Switch autocast off for a layer."""
    for number, layer in enumerate(net.layers):
        with torch.autocast("cpu", enabled=number == 1, dtype=torch.bfloat16):
            y = layer(y.float())
    return y.float()


case(
    "autocast off around a layer, backward() within autocast",
    "",
    off_within,
    backward_in_autocast,
    has_backward=True,
)(Linear)


def three_times(net: Net, y: Tensor) -> Tensor:
    """Call a layer three times."""
    for _ in range(3):
        y = net.layers[0](y)
    return y


case("a layer three times", "", three_times)(encoder)
case("a layer three times under autocast", "", three_times, around=autocast)(encoder)


def apart(net: Net, y: Tensor) -> Tensor:
    """Call a layer three times, each within an autocast of its own."""
    for _ in range(3):
        with autocast():
            y = net.layers[0](y)
    return y.float()


case("a layer three times, each under autocast", "", apart)(encoder)


@case("casts its weight under autocast", "", three_times, around=autocast)
class Casting(Linear):
    """Casts its weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return self.linear(x) + functional.linear(x.bfloat16(), self.linear.weight.to(torch.bfloat16))


# Named tuples


class Pair(NamedTuple):
    """Two tensors."""

    x: Tensor
    y: Tensor


@case("named tuples", "", lambda net, y: net.layers[2](net.layers[1](net.layers[0](Pair(y, y)))).x, is_chain=False)
class Paired(Linear):
    """Takes and returns a named tuple."""

    def forward(self, pair: Pair) -> Pair:
        """Hidden states."""
        return Pair(pair.x + self.linear(pair.y), pair.y)


def packed(net: Net, y: Tensor) -> Tensor:
    """Pack sequences of unequal lengths."""
    lengths = torch.arange(len(y)) % LENGTH + 1
    it: Any = pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False)
    for layer in net.layers:
        it = layer(it)
    return pad_packed_sequence(it, batch_first=True, total_length=LENGTH)[0]


@case("PackedSequence", "", packed)
class Packed(nn.Module):
    """Takes and returns a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, it: PackedSequence) -> PackedSequence:
        """Hidden states."""
        found: PackedSequence = self.cells(it)[0]
        return found


# Weights that somebody else touches

WRITTEN = "layers.2.linear.weight was written in place"


def initialized(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Write a weight that is away."""
    nn.init.zeros_(model.layers[2].linear.weight)
    return words_loss(model, x, y)


def zeroed(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Write a weight that is away, past autograd."""
    model.layers[2].linear.weight.data.zero_()
    return words_loss(model, x, y)


case("nn.init of a weight", WRITTEN, loss=initialized)(Linear)
case("p.data.zero_()", "layers.2.linear.weight was written in place|", loss=zeroed)(Linear)


def doubled(model: Any) -> None:
    """Have gradients changed by hooks."""
    for layer in model.layers:
        layer.linear.weight.register_hook(lambda it: it.clamp(-0.01, 0.01))


case("a hook on a weight", prepare=doubled)(Linear)
case(
    "a hook on the weight of a layer that is called thrice", "has a hook of its own", three_times, prepare=doubled
)(Linear)

# Larger layers


class Experts(nn.Module):
    """A mixture of experts, with the loss of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the loss."""
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(2, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).any(-1)
            if rows.any():
                share = (weights * (chosen == number)).sum(-1)[rows]
                y[rows] += expert(x[rows]) * share[:, None]
        return x + y, shares.mean((0, 1)).square().sum()


def expert_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Add the losses of the routers."""
    logits, extra = model(x)
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * extra


class ExpertNet(Net):
    """Sums the losses of its layers."""

    def forward(self, x: Tensor) -> Any:
        """Logits and losses."""
        y, total = self.words(x), torch.zeros(())
        for layer in self.layers:
            y, extra = layer(y)
            total = total + extra
        return self.head(y), total


CASES["a mixture of experts"] = Case(make=lambda: ExpertNet(Experts), loss=expert_loss)


class Block(nn.Module):
    """A residual block of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
            nn.Conv2d(WIDTH, WIDTH, 1, bias=False),
        )
        self.norm, self.norm2, self.relu = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        y = self.norm2(self.two(self.relu(self.norm(self.one(x)))))
        y += x
        result: Tensor = self.relu(y)
        return result


def images(net: Net, y: Tensor) -> Tensor:
    """Let layers see images."""
    y = y.transpose(1, 2).unflatten(2, (2, -1))
    for layer in net.layers:
        y = layer(y)
    return y.flatten(2).transpose(1, 2)


case("a ResNet block", "", images)(Block)
case("a dropout")(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU()))


@case("checkpoint() in the layer")
class Checkpointed(Linear):
    """Computes itself again."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class Square(torch.autograd.Function):
    """With a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The square."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """A part of the gradient."""
        return ctx.saved_tensors[0] * gradient


@case("a function of its own")
class Squaring(Linear):
    """Uses it."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        found: Tensor = Square.apply(self.linear(x))  # type: ignore[no-untyped-call] # torch's
        return x + found


@case("complex numbers")
class Fourier(nn.Module):
    """Has complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x + torch.fft.ifft(torch.fft.fft(x) * self.weight).real


def with_mask(net: Net, y: Tensor) -> Tensor:
    """Give layers a mask and a number."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for layer in net.layers:
        y, mask = layer(y, mask=mask, scale=0.5)
    return y


@case("a mask and a number", "", with_mask)
class Masked(nn.Module):
    """Takes and returns a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Hidden states, and the mask."""
        y, _ = self.attention(x, x, x, attn_mask=~mask, need_weights=False)
        return x + scale * y, mask


def memory_of_first(net: Net, y: Tensor) -> Tensor:
    """Set an attribute to what another layer has made."""
    first = net.layers[0](y)
    for layer in list(net.layers)[1:]:
        layer.memory = first
        y = layer(y)
    return y


@case("an attribute with another layer's graph", "(reads a tensor|second time)", memory_of_first)
class Remembering(Linear):
    """Reads a tensor that it was not given."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        y = self.linear(x)
        return x + (y if self.memory is None else y * self.memory)


# Hooks, and what a layer does with torch inside


def hooks(name: str, hook: Callable[..., Any]) -> Callable[[], nn.Module]:
    """A layer with a hook on itself, registered by the method ``name``."""

    def make() -> nn.Module:
        made = Linear()
        getattr(made, name)(hook)
        return made

    return make


case("a hook that changes the result")(hooks("register_forward_hook", lambda _module, _inputs, y: 2 * y))
case("a hook on the backward pass")(hooks("register_full_backward_hook", lambda _module, it, _: (it[0] / 2,)))
case("a hook that reads a weight")(
    hooks("register_forward_pre_hook", lambda layer, it: (it[0] * layer.linear.weight.detach().mean(),))
)
case("a hook that trains a weight", "was used outside the forward pass of its layer")(
    hooks("register_forward_pre_hook", lambda layer, it: (it[0] * layer.linear.weight.mean(),))
)
INSIDE = "layers.0 computes gradients in its forward pass"


@case("torch.func.grad in the layer", INSIDE)
class FunctionalGradient(Linear):
    """Computes a gradient by a transformation."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x + torch.func.grad(lambda it: self.linear(it).square().sum())(x)


@case("torch.autograd.grad in the layer", INSIDE)
class Gradient(Linear):
    """Computes a gradient by autograd."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        y = self.linear(x)
        found = torch.autograd.grad(y.square().sum(), self.linear.weight, retain_graph=True)
        return x + y * found[0].mean()


@case("vmap in the layer")
class Mapped(Linear):
    """Computes sample by sample."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x + torch.vmap(self.linear)(x)


@case("checkpoint(use_reentrant=True) in the layer")
class Reentrant(Linear):
    """Computes itself again, in torch's older way."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x + checkpoint(self.linear, x, use_reentrant=True)


def in_place(make: Callable[[], nn.Module] = Linear) -> nn.Module:
    """A layer that is compiled by its method."""
    made = make()
    made.compile()
    return made


case("layer.compile()", r"was compiled by its method compile\(\)")(in_place)
case("orthogonal")(lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)))


class Scripted(nn.Module):
    """What torch.jit can compile."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        return x + torch.tanh(x @ self.weight)


case("torch.jit.script")(lambda: torch.jit.script(Scripted()))
case(
    "a view of its caller's, changed",
    "that is a view of another tensor",
    lambda net, y: net.layers[0](y.clone()[:, :]),
)(AddsInPlace)


# Models of transformers


def of_transformers(
    name: str,
    config: str,
    refused: str = "",
    loss: Loss | None = None,
    *,
    is_chain: bool = True,
    **options: Any,
) -> None:
    """Register a model of transformers."""

    def make() -> nn.Module:
        import transformers

        settings = getattr(transformers, config)(**options)
        settings._attn_implementation = "eager" if "output_attentions" in options else "sdpa"
        return getattr(transformers, name)(settings)

    def labelled(model: Any, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = model(input_ids=x, labels=y).loss
        return found

    flags = [key for key, value in options.items() if value is True]
    CASES[" ".join([name, *flags])] = Case(make=make, loss=loss or labelled, refused=refused, is_chain=is_chain)


_TINY: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": WIDTH,
}
of_transformers("BertForMaskedLM", "BertConfig", **_TINY)
_GPT: dict[str, Any] = {
    "vocab_size": WORDS,
    "n_embd": WIDTH,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
of_transformers("GPT2LMHeadModel", "GPT2Config", **_GPT)


def extra_loss(what: str) -> Loss:
    """Add a loss on what the model returns besides."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        found = model(input_ids=x, labels=y)
        extra: Tensor = sum(it.square().mean() for it in getattr(found, what))
        result: Tensor = found.loss + 0.5 * extra
        return result

    return loss


of_transformers(
    "GPT2LMHeadModel",
    "GPT2Config",
    LEFT.replace("layers..", r"transformer\.h\.."),
    extra_loss("attentions"),
    output_attentions=True,
    **_GPT,
)
of_transformers(
    "GPT2LMHeadModel",
    "GPT2Config",
    "",
    extra_loss("hidden_states"),
    is_chain=False,
    output_hidden_states=True,
    **_GPT,
)
of_transformers("LlamaForCausalLM", "LlamaConfig", **_TINY)
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_key_value_heads": 2, **_TINY}
of_transformers("MixtralForCausalLM", "MixtralConfig", **_MOE)
of_transformers(
    "MixtralForCausalLM",
    "MixtralConfig",
    LEFT.replace("layers..", r"model\.layers\.."),
    output_router_logits=True,
    router_aux_loss_coef=0.5,
    **_MOE,
)


def image_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Classify images made of words."""
    pixels = x[:, :4].float().reshape(-1, 1, 2, 2).expand(-1, 3, -1, -1).repeat(1, 1, 2, 2) / WORDS
    found: Tensor = model(pixel_values=pixels, labels=y[:, 0] % 2).loss
    return found


_VIT: dict[str, Any] = {"image_size": 4, "patch_size": 2} | {
    key: value for key, value in _TINY.items() if key != "vocab_size"
}
of_transformers("ViTForImageClassification", "ViTConfig", "", image_loss, **_VIT)
of_transformers("AlbertForMaskedLM", "AlbertConfig", embedding_size=WIDTH, **_TINY)
of_transformers(
    "T5ForConditionalGeneration",
    "T5Config",
    is_chain=False,
    vocab_size=WORDS,
    d_model=WIDTH,
    d_kv=4,
    d_ff=WIDTH,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
    pad_token_id=0,
)


# The law


def trained(model: Any, optimizer: torch.optim.Optimizer, case: Case, accumulation: int) -> list[float]:
    """Train two steps; return the losses of this instance's micro batches."""
    losses = []
    num_local, place = popdist.num_local_replicas(), popdist.instance_index()
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        x = torch.randint(1, WORDS, (4 * popdist.num_replicas(), LENGTH), generator=draw)
        x = x[4 * num_local * place : 4 * num_local * (place + 1)]
        for mine, wanted in model.micro_batches((x, (x + 1) % WORDS), accumulation):
            with nullcontext() if case.around is None else case.around():
                loss = case.loss(model, mine, wanted)
            if not case.has_backward:
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def made(case: Case) -> nn.Module:
    """The same module each time."""
    torch.manual_seed(1)
    return case.make()


def fault_of(case: Case, folder: Path, accumulation: int, num_phases: int) -> str:
    """Train a case in memory and in phases; return what is not as the law has it, or an empty text."""
    whole = popdist.ReplicatedModel(made(case))
    try:
        model = phased(made(case), phases=num_phases, store=folder)
    except popdist.WeightsError as error:
        return "" if case.refused and re.search(case.refused, str(error)) else repr(error)
    try:
        case.prepare(model)
        optimizer = PhasedOptimizer(model, torch.optim.AdamW, lr=0.1)
        try:
            losses = trained(model, optimizer, case, accumulation)
        except popdist.PopdistError as error:
            is_other = "left the micro_batches loop" in str(error)  # another instance was faster
            return "" if case.refused and (is_other or re.search(case.refused, str(error))) else repr(error)
        if case.refused:
            return "not refused"
        case.prepare(whole)
        wanted = trained(whole, torch.optim.AdamW(whole.parameters(), lr=0.1), case, accumulation)
        found, state = model.state_dict(), whole.state_dict()
        close = torch.equal if case.is_chain else partial(torch.allclose, atol=0.02)
        different = [name for name, it in state.items() if not close(found[name], it)]
        return f"{different[:3]} differ" if different or (case.is_chain and losses != wanted) else ""
    finally:
        model.close()


def keep_the_law(folder: Path, sizes: Sequence[tuple[int, int]]) -> dict[str, str]:
    """Train each case with one of the ``sizes``, an accumulation and a number of phases; return the faults."""
    popdist.init(timeout_seconds=60)
    faults = {}
    for (name, it), (accumulation, num_phases) in zip(CASES.items(), cycle(sizes), strict=False):
        with warnings.catch_warnings(action="ignore"):
            fault = fault_of(it, folder / name.replace("/", " "), accumulation, num_phases)
        if fault:
            faults[f"{name}, accumulation {accumulation}, {num_phases} phases"] = fault
    return faults


def prepare() -> None:
    """Import what is slow, once for all instances."""
    for it in CASES.values():
        it.make()
