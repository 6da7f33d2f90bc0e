"""A module that is measured without its weights, against popsize's equations and real tensors.

Holds popdist.parallel, popdist.parallel.measures.operation_meter and popdist.phases.repeated_layers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import gelu, scaled_dot_product_attention

import popdist
from popdist import DescriptionError
from popdist.parallel import Description, describe
from popsize.catalogue import model_of
from popsize.model import Layer, Split, Transformer, transformer

LAYERS, HIDDEN, HEADS, VOCAB, TOKENS, BATCH = 3, 64, 4, 128, 32, 2


class Block(nn.Module):
    """As in GPT-2."""

    def __init__(self, *, fused: bool, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.fused = fused

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """With a mask of what comes later."""
        if self.fused:
            fused: Tensor = scaled_dot_product_attention(query, key, value, is_causal=True)
            return fused
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        probabilities: Tensor = self.dropout(scores.masked_fill(later, -1e9).softmax(-1))
        attended: Tensor = probabilities @ value
        return attended

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each added to what it reads."""
        split = [it.unflatten(-1, (HEADS, -1)).transpose(1, 2) for it in self.qkv(self.norms[0](x)).chunk(3, -1)]
        x = x + self.dropout(self.out(self.attend(*split).transpose(1, 2).flatten(2)))
        result: Tensor = x + self.dropout(self.down(gelu(self.up(self.norms[1](x)))))
        return result


class Gpt(nn.Module):
    """As GPT-2; the logits are computed with the embedding's matrix."""

    def __init__(self, *, fused: bool, dropout: float = 0.0, num_layers: int = LAYERS) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.positions = nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.ModuleList(Block(fused=fused, dropout=dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


IDS = torch.zeros(BATCH, TOKENS, dtype=torch.int64)


def equations(*, fused: bool) -> tuple[Layer, ...]:
    """The layers that popsize has for the same transformer."""
    return transformer(
        Transformer(
            layers=LAYERS,
            hidden=HIDDEN,
            heads=HEADS,
            sequence=TOKENS,
            vocab=VOCAB,
            positions=TOKENS,
            tied=True,
            dropout=False,
            fused_attention=fused,
        )
    ).layers


def total(amount: Split) -> float:
    """Both parts."""
    return amount.divided + amount.whole


def kept_bytes(module: nn.Module, call: Callable[[], object]) -> float:
    """What a real forward pass keeps: each storage once, 16-bit, without parameters and buffers."""
    own = {it.untyped_storage().data_ptr() for it in (*module.parameters(), *module.buffers())}
    kept = dict[int, tuple[Tensor, float]]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor, storage.nbytes() / (2 if tensor.is_floating_point() else 1)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    assert result is not None  # else autograd would let go of what it keeps
    return sum(size for _, size in kept.values())


def measured_bytes(description: Description, batch: int) -> float:
    """What a description says of a batch."""
    return batch * sum(layer.count * total(layer.kept) for layer in description.layers)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gpt_has_what_the_equations_say(fused: bool) -> None:  # noqa: FBT001 - a case
    """Parameters, FLOPs, sums and divisors exactly, and in each part of a tensor group; bytes nearly."""
    with torch.device("meta"):
        module = Gpt(fused=fused)
    description = describe(module, IDS)

    assert description.sequence == TOKENS
    assert description.num_parameters == sum(it.numel() for it in module.parameters())
    assert description.tied_parameters == VOCAB * HIDDEN
    assert {("heads", HEADS), ("width", 3 * HIDDEN), ("width", 4 * HIDDEN)} <= set(description.divisors)
    assert [layer.name for layer in description.layers] == ["before", "Block", "behind"]
    for found, expected in zip(description.layers, equations(fused=fused), strict=True):
        for name in ("count", "parameters", "matmul_flops", "attention_flops", "output_bytes", "num_reductions"):
            assert getattr(found, name) == getattr(expected, name), (found.name, name)
        for name in ("mask_heads", "can_recompute", "loss_bytes"):
            assert getattr(found, name) == getattr(expected, name), (found.name, name)
        assert found.parts == pytest.approx(expected.parts)
        if found.count > 1:
            assert total(found.kept) == pytest.approx(total(expected.kept), rel=0.03)
            assert found.kept.divided == pytest.approx(expected.kept.divided, rel=0.03)
            assert found.cheap.divided == pytest.approx(expected.cheap.divided, rel=0.3 if fused else 0)
            assert bool(found.score_bytes.divided) is not fused
            assert found.num_kernels == (10 if fused else 20)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("fused", [False, True])
def test_real_tensors_keep_as_much(fused: bool, dropout: float) -> None:  # noqa: FBT001 - a case
    """To the byte; a module with weights is measured as one without, and keeps them."""
    module = Gpt(fused=fused, dropout=dropout)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    assert measured_bytes(describe(module, (IDS,)), BATCH) == kept_bytes(module, lambda: module(IDS))
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not module._forward_hooks
    assert not module.blocks[0]._forward_pre_hooks


@pytest.mark.parametrize(
    ("module", "sample"),
    [
        (nn.GRU(8, 16, 2, batch_first=True), torch.ones(4, 6, 8)),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3), torch.ones(4, 6, 8)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), torch.ones(2, 3, 8, 8)),
        (nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), torch.ones(4, 8)),
    ],
    ids=["gru", "encoder", "convolution", "linear"],
)
def test_modules_of_torch_keep_as_much(module: nn.Module, sample: Tensor) -> None:
    """What has buffers, flattened weights, or no layers at all is measured, too."""
    description = describe(module, sample)

    assert measured_bytes(description, len(sample)) == kept_bytes(module, lambda: module(sample))
    assert description.num_parameters == sum(it.numel() for it in module.parameters())
    assert description.sequence == (sample.shape[1] if sample.dim() == 3 else 1)


def test_an_operation_with_unknown_insides_is_refused() -> None:
    """On a CPU torch runs an LSTM as one operation, and has no rule for what that computes and keeps."""
    with pytest.raises(DescriptionError, match=r"\(LSTM\).*mkldnn_rnn_layer"):
        describe(nn.Sequential(nn.LSTM(8, 16, batch_first=True)), torch.ones(4, 6, 8))


def test_a_16_bit_module_counts_as_it_is() -> None:
    """It keeps as many bytes as one of 32 bits, of which half are counted."""
    half, full = (describe(Gpt(fused=False).to("meta", dtype), IDS) for dtype in (torch.bfloat16, torch.float32))

    assert total(half.block.kept) == pytest.approx(total(full.block.kept), rel=0.01)


def test_layers_that_differ_are_not_joined() -> None:
    """Equal neighbours are one layer with a count; nobody divides what no product behind adds up again."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4), nn.ReLU())
    description = describe(module, torch.ones(4, 8))

    assert [(layer.name, layer.count) for layer in description.layers] == [
        ("Linear", 3),
        ("Linear", 1),
        ("behind", 1),
    ]
    assert description.divisors == (("largest_tensor_group", 1),)
    assert all(layer.kept.divided == 0 for layer in description.layers)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_hugging_face_has_what_the_equations_say(attention: str) -> None:
    """GPT-2 of transformers: its parameters and products, and the bytes of a real pass; a dict of arguments."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=LAYERS,
        n_embd=HIDDEN,
        n_head=HEADS,
        vocab_size=VOCAB,
        n_positions=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation=attention,
    )
    module = transformers.GPT2LMHeadModel(config)
    description = describe(module, {"input_ids": IDS})
    expected = equations(fused=attention == "sdpa")

    assert measured_bytes(description, BATCH) == kept_bytes(module, lambda: module(IDS))

    for name in ("parameters", "matmul_flops", "attention_flops"):
        assert [getattr(layer, name) for layer in description.layers] == [getattr(it, name) for it in expected]
    assert description.block.count == LAYERS
    if attention == "eager":  # the fused one copies what the equations think of as views
        assert total(description.block.kept) == pytest.approx(total(expected[1].kept), rel=0.03)


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    """What save() writes is the model that the catalogue reads."""
    description = describe(Gpt(fused=True), IDS)
    description.save(tmp_path / "m.json")
    table = json.loads((tmp_path / "m.json").read_text())
    read = model_of(table, "m.json")

    assert [repr(layer) for layer in read.layers] == [repr(layer) for layer in description.layers]
    assert (read.divisors, read.num_parameters) == (description.divisors, description.num_parameters)


class Reading(nn.Module):
    """What a value decides in the second layer."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.layers[1].register_forward_pre_hook(lambda _, args: read(args[0]) and None)

    def forward(self, x: Tensor) -> Tensor:
        """Both layers."""
        result: Tensor = self.layers[1](self.layers[0](x))
        return result


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda x: x.sum().item(), "aten._local_scalar_dense"),
        (lambda x: bool(x.sum() > 0), "aten._local_scalar_dense"),
        (lambda x: x.detach().numpy(), "numpy"),
        (lambda x: x @ torch.ones(3, 3), "aten.mm"),
    ],
    ids=["item", "if", "numpy", "wrong shapes"],
)
def test_what_cannot_run_is_named(read: Callable[[Tensor], Any], words: str) -> None:
    """The operation and the layer; and it is an error of popdist's."""
    with pytest.raises(DescriptionError, match=rf"(?s)layers\.1.*{words}") as caught:
        describe(Reading(read), torch.ones(4, 8))

    assert isinstance(caught.value, popdist.PopdistError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"module": print}, "nn.Module"),
        ({"sample": {}}, "needs a tensor"),
        ({"sample": torch.ones(0, 4)}, "needs a tensor"),
        ({"device": "tpu"}, "device='tpu', and torch"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    """What was asked is named."""
    with pytest.raises(DescriptionError, match=words):
        describe(**{"module": nn.Linear(4, 4), "sample": torch.ones(2, 4), **arguments})


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch is built for CUDA")
def test_a_torch_without_cuda_refuses_it() -> None:
    """Asked for it, torch would end the process; a torch that is built for CUDA needs no GPU."""
    with pytest.raises(DescriptionError, match="is for the CPU"):
        describe(nn.Linear(4, 4), torch.ones(2, 4), device="cuda")
