"""What holds for `popdist.parallel.phased`: run on every instance of jobs of several sizes.

A law is a function ``law_...`` of a folder for stores. Each trains a model in phases, and beside it the same one
in memory, with recomputed layers.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, relu

import popdist
from popdist.job import context
from popdist.parallel import PhasedOptimizer, phased, recompute
from popdist.parallel.mesh import device_mesh
from tests.contract.collective_laws import refused

WORDS, LENGTH, WIDTH, LAYERS, NUM_SAMPLES = 20, 5, 16, 4, 26


class Layer(nn.Module):
    """Draws random numbers, and writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        y = self.dropout(self.down(relu(self.up(self.norm(x))))) * self.scale.clone()
        if self.training:
            self.scale.mul_(0.99).add_(y.detach().mean(dim=(0, 1)))
        result: Tensor = x + y
        return result


class Net(nn.Module):
    """An embedding, layers and a head that is tied to the embedding; one weight is of no layer."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = self.words(x) + self.shift
        for layer in self.layers:
            y = layer(y)
        logits: Tensor = self.head(self.norm(y))
        return logits


def net(*, is_tied: bool = False) -> Net:
    """The same one on all instances."""
    torch.manual_seed(1)
    return Net(is_tied=is_tied)


def share(step: int, num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    """This instance's samples of a step; the replicas have unequal numbers."""
    draw = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (num_samples, LENGTH), generator=draw)
    num_local, place = popdist.num_local_replicas(), context.environment().contract.data_parallel_index
    first, last = (num_samples * (place + end) * num_local // popdist.num_replicas() for end in (0, 1))
    return words[first:last], (words[first:last] + 1) % WORDS


def losses_of(
    model: Any,
    optimizer: torch.optim.Optimizer,
    accumulation: int = 1,
    num_steps: int = 2,
    num_samples: int = NUM_SAMPLES,
    **options: Any,
) -> list[float]:
    """Train; the losses of this instance's micro batches."""
    losses = []
    for step in range(num_steps):
        for x, y in model.micro_batches(share(step, num_samples), accumulation, **options):
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Its own copy of weights and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same names and bits."""
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


def law_bits_are_those_of_the_model_in_memory(folder: Path) -> None:
    """With any number of phases, and any accumulation."""
    for accumulation, optimizer_class, numbers in ((1, torch.optim.SGD, (2,)), (3, torch.optim.AdamW, (1, 7))):
        whole = popdist.ReplicatedModel(recompute(net()))
        wanted = losses_of(whole, optimizer_class(whole.parameters(), lr=0.1), accumulation)
        for number in numbers:
            model = phased(net(), phases=number, store=f"{folder}/{accumulation} {number}")
            optimizer = PhasedOptimizer(model, optimizer_class, lr=0.1)
            assert losses_of(model, optimizer, accumulation) == wanted
            assert_equal(state_of(model), state_of(whole))
            model.close()


def trained_alike(
    folder: Path | str,
    make: Callable[[], nn.Module] = net,
    optimizer_class: Any = torch.optim.AdamW,
    accumulation: int = 1,
    num_phases: int = 3,
    **options: Any,
) -> None:
    """Check that a model learns the same in phases and in memory."""
    whole = popdist.ReplicatedModel(recompute(make()))
    wanted = losses_of(whole, optimizer_class(whole.parameters(), lr=0.1), accumulation, **options)
    model = phased(make(), phases=num_phases, store=folder)
    optimizer = PhasedOptimizer(model, optimizer_class, lr=0.1)
    assert losses_of(model, optimizer, accumulation, **options) == wanted
    assert_equal(state_of(model), state_of(whole))
    model.close()


def law_tied_weights_are_final_with_their_first_layer(folder: Path) -> None:
    """With a head that has the weights of the embedding, in one phase with it or in another."""
    trained_alike(f"{folder}/1", lambda: net(is_tied=True), num_phases=1)
    trained_alike(f"{folder}/3", lambda: net(is_tied=True), accumulation=2)


def adapters() -> Net:
    """Of which a small part of each layer is trained."""
    made = net()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name.endswith("down.bias"))
    return made


def law_only_trained_weights_are_written(folder: Path) -> None:
    """Frozen layers before the first trained one have no backward pass."""
    trained_alike(f"{folder}/1", adapters, accumulation=2)


class Sparing(Net):
    """Leaves out a layer for some samples, and calls another one twice."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = self.words(x) + self.shift
        for number, layer in enumerate(self.layers):
            if number != 1 or int(x[0, 0]) % 2:
                y = layer(y)
        logits: Tensor = self.head(self.norm(self.layers[2](y)))
        return logits


def sparing() -> Sparing:
    """The same one on all instances."""
    torch.manual_seed(1)
    return Sparing()


def law_layers_may_be_left_out_or_called_twice(folder: Path) -> None:
    """Weights that no replica uses are not updated."""
    trained_alike(f"{folder}/1", sparing, num_samples=popdist.num_replicas())
    trained_alike(f"{folder}/2", sparing, accumulation=2)


class Translator(nn.Module):
    """An encoder and a decoder, whose layers all read what the encoder gives; some get one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.body = nn.Transformer(WIDTH, 2, 2, 1, WIDTH, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = self.words(x)
        logits: Tensor = self.head(self.body(src=y, tgt=y.flip(1)))
        return logits


def translator() -> Translator:
    """The same one on all instances."""
    torch.manual_seed(1)
    return Translator()


def law_gradients_keep_their_order_of_memory(folder: Path) -> None:
    """Between layers: sums over transposed ones have other bits."""
    trained_alike(folder, translator, torch.optim.SGD)


def law_micro_batches_count_as_asked(folder: Path) -> None:
    """With a sum, with weights, and where a replica or an instance has no samples."""
    trained_alike(f"{folder}/1", reduction="sum")
    number = 2 * popdist.num_local_replicas()
    trained_alike(f"{folder}/2", accumulation=2, weights=[float(1 + it % 3) for it in range(number)])
    trained_alike(f"{folder}/3", accumulation=2, num_samples=1)

    def with_gaps(batch: tuple[Tensor, Tensor]) -> list[Any]:
        first = tuple(tensor[:1] for tensor in batch)
        return [None if it % 4 == 1 else first for it in range(2 * number)]

    trained_alike(f"{folder}/4", accumulation=4, split=with_gaps)


def clipped_alike(folder: Path | str, make: Callable[[], nn.Module]) -> None:
    """Check that a model learns the same in phases and in memory, with the norm of all gradients bounded."""
    whole = popdist.ReplicatedModel(recompute(make()))
    model = phased(make(), phases=3, store=folder)
    for it, optimizer in (
        (whole, torch.optim.AdamW(whole.parameters(), lr=0.1)),
        (model, PhasedOptimizer(model, torch.optim.AdamW, step_in_backward=False, lr=0.1)),
    ):
        for step in range(3):
            for x, y in it.micro_batches(share(step), 2):
                cross_entropy(it(x).flatten(0, 1), y.flatten()).backward()
            norm = popdist.clip_grad_norm_(it.parameters(), 0.1)
            assert norm > 0.1
            optimizer.step()
    assert_equal(state_of(model), state_of(whole))
    model.close()


def law_evaluation_changes_nothing(folder: Path) -> None:
    """Between steps; outputs are those of the model in memory."""
    whole, model = popdist.ReplicatedModel(recompute(net())), phased(net(), phases=3, store=folder)
    optimizers = torch.optim.SGD(whole.parameters(), lr=0.1), PhasedOptimizer(model, torch.optim.SGD, lr=0.1)
    x, _ = share(9)
    for _ in range(2):
        outputs = []
        for it, optimizer in zip((whole, model), optimizers, strict=True):
            losses_of(it, optimizer)
            it.eval()
            with torch.no_grad():
                outputs.append(it(x))
            with torch.inference_mode():
                assert torch.equal(it(x), outputs[-1])
            it.train()
        assert torch.equal(*outputs)
    assert_equal(state_of(model), state_of(whole))
    model.close()


def law_a_state_dict_goes_on_in_another_store(folder: Path) -> None:
    """The weights, and the optimizer's state, whatever the phases; also into a model in memory."""
    model = phased(net(), phases=3, store=f"{folder}/1")
    optimizer = PhasedOptimizer(model, torch.optim.AdamW, lr=0.1)
    losses_of(model, optimizer)
    other = phased(net(), phases=2, store=f"{folder}/2")
    another = PhasedOptimizer(other, torch.optim.AdamW, lr=0.1)
    other.load_state_dict(model.state_dict())
    another.load_state_dict(optimizer.state_dict())
    other.randomness.load_state_dict(model.randomness.state_dict())
    assert losses_of(other, another) == losses_of(model, optimizer)
    assert_equal(state_of(other), state_of(model))
    plain = net()
    plain.load_state_dict(model.state_dict())
    assert_equal(state_of(plain), state_of(model))
    model.close()
    other.close()


def law_a_loop_that_is_left_is_lost_on_all_instances(folder: Path) -> None:
    """And the next one works; unless weights were updated already."""
    model = phased(net(), phases=3, store=folder)
    optimizer = PhasedOptimizer(model, torch.optim.SGD, lr=0.1)
    before = state_of(model)
    is_last = popdist.instance_index() == popdist.num_instances() - 1
    others = refused(popdist.MicroBatchError, "left the micro_batches loop")
    with refused(KeyError, "mine") if is_last else others:
        for x, y in model.micro_batches(share(0)):
            if is_last:
                raise KeyError("mine")
            cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert_equal(state_of(model), before)
    losses_of(model, optimizer)
    model.close()


def refuse_stages(folder: Path) -> None:
    """In a job of pipelines."""
    with refused(popdist.WeightsError, "pipelines of 2 stages.*pipeline=1"):
        phased(nn.Linear(2, 2), phases=1, store=folder)


def law_what_cannot_be_trained_is_refused(folder: Path) -> None:
    """And the next step works."""
    model = phased(net(), phases=3, store=f"{folder}/1")
    with refused(popdist.OptimizerError, "PhasedOptimizer"):
        losses_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = PhasedOptimizer(model, torch.optim.SGD, lr=0.1)
    x, _ = share(0)
    for mine, y in model.micro_batches(share(0)):
        cross_entropy(model(mine).flatten(0, 1), y.flatten()).backward()
    with refused(popdist.BatchError, "call optimizer.step"), torch.no_grad():
        model(x)
    optimizer.step()
    with refused(popdist.BatchError, "outside micro_batches.*phased"):
        model(x).sum().backward()
    with refused(AttributeError, "no 'micro_batch'"):
        _ = model.micro_batch
    with refused(popdist.GradientError, "add=True, and a phased model"):
        next(model.micro_batches(share(0), add=True))
    model.temperature = 2.0
    assert vars(model.module)["temperature"] == model.temperature
    with refused(popdist.WeightsError, "model.head = ... after phased"):
        model.head = nn.Linear(WIDTH, WORDS)
    with refused(popdist.WeightsError, "copied or pickled"):
        copy.deepcopy(model)
    with refused(popdist.WeightsError, "before phased"):
        model.half()
    with refused(popdist.WeightsError, "state_dict"):
        popdist.checksum(model)
    with refused(popdist.WeightsError, "missing: shift"):
        model.load_state_dict({})
    model.module.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    for use in (lambda: losses_of(model, optimizer), lambda: PhasedOptimizer(model, torch.optim.SGD, lr=0.1)):
        with refused(popdist.WeightsError, "extra.*after phased"):
            use()
    model.close()
    for arguments, message in (
        ({"phases": 1, "memory": "1 GB"}, "either phases="),
        ({"phases": 0}, "phases=0"),
        ({"phases": 1, "layers": ["layers.0", "layers.0.up"]}, "layers.0.up within it"),
        ({"phases": 1, "layers": ["layer"]}, "layer"),
    ):
        with refused(popdist.WeightsError, message):
            phased(net(), store=f"{folder}/2", **arguments)
    for module, message in ((nn.Linear(2, 2), "no layers"), (recompute(net()), "recomputed already")):
        with refused(popdist.WeightsError, message):
            phased(module, store=f"{folder}/2", phases=1)


def law_a_store_is_free_again_after_an_error(folder: Path) -> None:
    """Also while somebody holds the error."""
    with torch.device("meta"):
        unset = net()
    with pytest.raises(popdist.WeightsError, match=r"nothing has set layers\.0\.scale") as held:
        phased(unset, phases=1, store=folder)
    phased(net(), phases=1, store=folder).close()
    assert held.value.__traceback__ is not None


def law_a_step_that_fails_among_updates_is_half_made(folder: Path) -> None:
    """Until a state dict is loaded."""
    model = phased(net(), phases=3, store=folder)
    optimizer = PhasedOptimizer(model, torch.optim.SGD, lr=0.1)
    for number, (x, y) in enumerate(model.micro_batches(share(0))):
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward(retain_graph=True)
        if number == popdist.num_local_replicas() - 1:
            with refused(popdist.BatchError, "second backward pass"):
                loss.backward()
            break
    for use in (lambda: losses_of(model, optimizer), lambda: model(share(0)[0])):
        with refused(popdist.StoreError, "step 1 is half made.*Load"):
            use()
    model.load_state_dict(net().state_dict())
    losses_of(model, optimizer)
    model.close()


class Borrowing(Net):
    """Uses a weight outside its layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return super().forward(x) + self.get_parameter("layers.0.up.weight").sum()


def law_a_weight_is_used_in_its_layer_only(folder: Path) -> None:
    """Elsewhere it is NaN, and its gradient an error on all instances."""
    model = phased(Borrowing(), phases=3, store=folder)
    optimizer = PhasedOptimizer(model, torch.optim.SGD, lr=0.1)
    with refused(popdist.WeightsError, "layers.0.up.weight was used outside"):
        losses_of(model, optimizer)
    model.close()


def law_a_closed_model_says_so(folder: Path) -> None:
    """And one that nobody has a name of any more gives its store back, as a cell of a notebook that runs again."""
    model = phased(net(), phases=3, store=folder)
    optimizer = PhasedOptimizer(model, torch.optim.SGD, lr=0.1)
    with refused(popdist.StoreError, "another phased model of this program"):
        phased(net(), phases=3, store=folder)
    losses_of(model, optimizer)
    model.close()
    for use in (
        lambda: model(share(0)[0]),
        lambda: model.module(share(0)[0]),
        lambda: losses_of(model, optimizer),
        partial(optimizer.step, None),
        model.state_dict,
        lambda: model.load_state_dict(net().state_dict()),
        partial(PhasedOptimizer, model, torch.optim.SGD, lr=0.1),
    ):
        with refused(popdist.StoreError, "this phased model was closed"):
            use()
    other = phased(net(), phases=3, store=folder)
    del other
    phased(net(), phases=1, store=folder).close()


def law_a_write_from_outside_is_an_error_and_no_other_weights(folder: Path) -> None:
    """Of a weight that is away, or in memory; torch itself refuses random numbers."""
    model = phased(net(), phases=7, store=folder)
    model.eval()
    x, _ = share(0)
    output = model(x).detach()
    away = model.get_parameter("layers.2.up.weight")
    for number in range(2):
        if number:
            away.data.fill_(2)
        else:
            nn.init.zeros_(away)
        assert model.get_parameter("layers.3.up.weight").isnan().all()
        with refused(popdist.WeightsError, "layers.2.up.weight was written in place.*load_state_dict"):
            model.state_dict()
    with refused(RuntimeError, "single memory location"):
        nn.init.normal_(away)
    with torch.no_grad():
        model(x)
        model.get_parameter("head.weight").mul_(2)
    with refused(popdist.WeightsError, "head.weight was written in place"):
        model(x)
    assert torch.equal(model(x), output)
    model.close()


def law_expanded_parameters_are_refused(folder: Path) -> None:
    """Their elements cannot differ."""
    model = net()
    model.norm.weight = nn.Parameter(torch.ones(1).expand(WIDTH))
    for wrap in (lambda: phased(model, phases=1, store=folder), lambda: popdist.ReplicatedModel(model)):
        with refused(popdist.WeightsError, r"norm.weight was made by expand\(\)"):
            wrap()


def train_on_hosts(folder: Path) -> None:
    """Each host has a store of its own, in which all of its instances update weights."""
    host = context.environment().contract.host_index
    trained_alike(f"{folder}/{host}", accumulation=2)


def train_in_parts(folder: Path) -> None:
    """The instances of a replica have parts of each layer, and each keeps its own in the store."""

    def divided() -> nn.Module:
        made = net()
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in made.layers:
            parallelize_module(layer, device_mesh()["tensor"], plan)
        return made

    trained_alike(f"{folder}/backward", divided, accumulation=2)
    clipped_alike(f"{folder}/pass", divided)


def keep_some(folder: Path) -> None:
    """The laws that depend on the number of instances, on many of them."""
    popdist.init(timeout_seconds=60)
    law_bits_are_those_of_the_model_in_memory(folder / "bits")
    law_micro_batches_count_as_asked(folder / "counts")
    law_a_loop_that_is_left_is_lost_on_all_instances(folder / "left")
