"""What holds for `popdist.parallel.parallelize`: run on every instance of jobs whose replicas have several.

A law is a function ``law_...``. Each trains a divided transformer, and the whole one beside it, alone.
"""

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring.live_bytes import LiveBytes
from pytest import approx  # noqa: PT013 - the one name
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy, dropout, gelu, scaled_dot_product_attention

import popdist
from popdist.ground.local_tensors import local_part
from popdist.job import context
from popdist.parallel import Roles, describe, parallelize
from popdist.parallel.mesh import device_mesh
from popsize.footprint import memory_of
from popsize.hardware import named_machine
from popsize.mapping import Mapping, Training, Workload
from tests.contract.collective_laws import refused

WORDS, LENGTH, WIDTH, HEADS, LAYERS = 19, 8, 16, 4, 4
NUM_MICRO_BATCHES, MICRO_BATCH_SIZE = 2, 2
NUM_SAMPLES = NUM_MICRO_BATCHES * MICRO_BATCH_SIZE
"""Of each replica in a step."""

ROLES = Roles(
    layers="blocks",
    columns=("attention.query", "attention.key", "attention.value", "up"),
    rows=("attention.out", "down"),
    norms=("norms.0", "norms.1"),
    dropouts=("attention",),
    divided=("attention.heads",),
    embedding="words",
    positions="positions",
    last=("norm",),
    head="head",
)


class Attention(nn.Module):
    """Of which each instance may have some of the heads."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads, self.p = HEADS, p

    def forward(self, x: Tensor) -> Tensor:
        """Each token of those before it."""
        parts = [linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.query, self.key, self.value)]
        query, key, value = (dropout(it, self.p, self.training).transpose(1, 2) for it in parts)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(p)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        x = x + self.attention(self.norms[0](x))
        result: Tensor = x + self.down(gelu(self.up(self.norms[1](x))))
        return result


class Gpt(nn.Module):
    """A transformer as people write it."""

    def __init__(self, *, tied: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(p) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits; hidden states of a stage that has no head."""
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def llama() -> nn.Module:
    """A small one of transformers."""
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
    )
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made


def prepare() -> None:
    """Import what all worlds need, in the process that forks them."""
    import_module("torch._dynamo")
    import_module("transformers.models.llama.modeling_llama")


def own_mapping(**values: Any) -> Mapping:
    """A mapping for this job."""
    shape = context.environment().contract.parallelism
    return replace(
        Mapping(tensor=shape.tensor, pipeline=shape.pipeline, replicas=popdist.num_replicas()), **values
    )


def samples(step: int) -> Tensor:
    """Those of all replicas, and one token more than inputs have."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (popdist.num_replicas() * NUM_SAMPLES, LENGTH + 1), generator=generator)


def own_samples(step: int) -> Tensor:
    """Those of this replica."""
    return samples(step).chunk(popdist.num_replicas())[popdist.replica_index()]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def logits_of(output: Any) -> Tensor:
    """The logits, also of a Llama that is whole."""
    return getattr(output, "logits", output)  # type: ignore[no-any-return] # a tensor


def train(model: nn.Module, num_steps: int = 2) -> None:
    """Steps of SGD on the samples of all replicas."""
    wrapped = popdist.ReplicatedModel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    step_of = schedule_of(wrapped) if own_mapping().pipeline > 1 else None
    for step in range(num_steps):
        rows = own_samples(step)
        batch = rows[:, :-1], rows[:, 1:]
        if step_of is not None:
            step_of(batch)
        else:
            for ids, targets in wrapped.micro_batches(batch, NUM_MICRO_BATCHES):
                loss_of(logits_of(wrapped(ids)), targets).backward()
        optimizer.step()


def schedule_of(model: popdist.ReplicatedModel) -> Callable[[tuple[Tensor, Tensor]], object]:
    """A step of a pipeline."""
    group, pieces = device_mesh()["pipeline"].get_group(), [model.module]
    if isinstance(model.module, nn.ModuleList):
        pieces = [*model.module]
    number, first = group.size() * len(pieces), device_mesh().get_local_rank("pipeline")
    stages = [
        PipelineStage(piece, first + row * group.size(), number, torch.device("cpu"), group=group)
        for row, piece in enumerate(pieces)
    ]
    if len(stages) > 1:
        schedule: Any = ScheduleInterleaved1F1B(stages, NUM_MICRO_BATCHES, loss_fn=loss_of)  # type: ignore[arg-type] # of its base class
    else:
        schedule = Schedule1F1B(stages[0], NUM_MICRO_BATCHES, loss_fn=loss_of)
    return lambda batch: model.pipeline_step(schedule, batch)


def trained_alone(model: nn.Module, num_steps: int = 2) -> dict[str, Tensor]:
    """The weights that a loop without popdist trains."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(num_steps):
        optimizer.zero_grad()
        rows = samples(step)
        loss_of(logits_of(model(rows[:, :-1])), rows[:, 1:]).backward()
        optimizer.step()
    return dict(model.named_parameters(remove_duplicate=False))


def check_weights(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Compare what this instance and its tensor group have, under the names of the whole model."""
    pieces = [*model] if isinstance(model, nn.ModuleList) else [model]
    found = {name: it for piece in pieces for name, it in piece.named_parameters(remove_duplicate=False)}
    number = own_mapping().pipeline
    assert set(found) <= set(expected)
    assert number > 1 or set(found) == set(expected)
    everywhere: list[Any] = [None] * popdist.num_instances()
    dist.all_gather_object(everywhere, set(found))
    assert set.union(*everywhere) == set(expected)
    for name, parameter in found.items():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(whole, expected[name], rtol=1e-5, atol=1e-6)


def ways() -> Iterable[Mapping]:
    """Mappings for this job."""
    yield own_mapping(recompute="attention")
    if own_mapping().tensor > 1:
        yield own_mapping(sequence_parallel=True, recompute="layer")
    if own_mapping().pipeline > 1:
        yield own_mapping(schedule="interleaved", interleave=2)


def law_a_divided_model_learns_what_a_whole_one_does() -> None:
    """A GPT by its roles, whatever the mapping; tied weights where one stage has both."""
    for mapping in ways():
        tied = mapping.pipeline == 1 and not mapping.sequence_parallel
        torch.manual_seed(
            device_mesh().get_local_rank("tensor")
        )  # the weights of the group's first instance count
        model = Gpt(tied=tied)
        torch.manual_seed(0)
        whole = Gpt(tied=tied)
        divided = parallelize(model, mapping, roles=ROLES)
        train(divided)
        check_weights(divided, trained_alone(whole))


def law_a_llama_is_known_by_name() -> None:
    """Its mapping may be in a file."""
    mapping = [*ways()][0 if own_mapping().tensor < own_mapping().pipeline else -1]
    torch.manual_seed(0)
    whole = llama()
    model = deepcopy(whole)
    with TemporaryDirectory() as name:
        path = Path(name, "mapping.json")
        training = {"global_batch": 8}
        path.write_text(json.dumps({"schema": 1, "mapping": asdict(mapping), "training": training}))
        divided = parallelize(model, path)
    train(divided)
    check_weights(divided, trained_alone(whole))


def law_an_instance_has_memory_for_its_part_only() -> None:
    """And no parameter is a part of a larger memory; a model without memory is divided, too."""
    torch.manual_seed(0)
    whole = sum(it.numel() for it in Gpt().parameters())
    divided = parallelize(Gpt(), roles=ROLES)
    parts = [local_part(it) for it in divided.parameters()]
    shape = context.environment().contract.parallelism
    # torch gives parts of one length to all: one word more where the words do not divide
    assert all(it.untyped_storage().nbytes() <= 4 * (it.numel() + WIDTH) for it in parts)
    assert sum(it.numel() for it in parts) < 1.3 * whole / shape.instances_per_replica
    with torch.device("meta"):
        divided = parallelize(Gpt(), roles=ROLES)
    assert all(it.is_meta for it in divided.parameters())
    assert [local_part(it).shape for it in divided.parameters()] == [it.shape for it in parts]


def law_recomputation_leaves_the_bits_alone() -> None:
    """With dropout on divided heads, of which each instance draws its own."""
    found = []
    for recompute in ("none", "layer", "attention"):
        torch.manual_seed(0)
        divided = parallelize(Gpt(p=0.25), own_mapping(recompute=recompute), roles=ROLES)
        train(divided, num_steps=1)
        found.append([local_part(it).clone() for it in divided.parameters()])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


class Words(nn.Module):
    """A GPT without positions, with activations that are larger than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(0.0) for _ in range(2 * LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits; hidden states of a stage that has no head."""
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def law_a_step_needs_the_memory_that_was_predicted() -> None:
    """Of the fullest instance; in these narrow layers a little less with tensor groups."""
    mapping, number = own_mapping(micro_batch=128), 2
    if (mapping.tensor > 1) == (mapping.pipeline > 1):
        return  # neither is as test_recompute.py has it, and both together cost what each costs alone
    ids = torch.randint(WORDS, (number * mapping.micro_batch, LENGTH))
    workload = Workload(
        model=describe(Words(), ids[: mapping.micro_batch]),
        machine=named_machine(f"{mapping.num_devices}xA100-80GB", {}),
        training=Training(global_batch=len(ids) * mapping.replicas, precision="fp32"),
    )
    wide = mapping.tensor > 1
    for way in (
        mapping,
        replace(mapping, recompute="attention"),
        replace(mapping, recompute="layer", sequence_parallel=wide),
    ):
        predicted = memory_of(workload, way)[0].total - workload.constants.context_bytes
        peaks: list[Any] = [None] * popdist.num_instances()
        dist.all_gather_object(peaks, peak(way, ids, number))
        assert max(peaks) / predicted == approx(1, abs=0.09 if wide else 0.05), way.text


def peak(mapping: Mapping, ids: Tensor, number: int) -> int:
    """The most bytes alive in a step after the first."""
    stages, live = device_mesh()["pipeline"], LiveBytes()
    place, is_last = stages.get_local_rank(), stages.get_local_rank() == stages.size() - 1
    with live:
        model = parallelize(Words(), mapping, roles=replace(ROLES, positions=None))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        if stages.size() > 1:
            stage = PipelineStage(model, place, stages.size(), torch.device("cpu"), group=stages.get_group())
            schedule = Schedule1F1B(stage, number, loss_fn=loss_of)
        for _ in range(2):
            live.peak = 0
            if stages.size() > 1:
                schedule.step(
                    *([ids] if place == 0 else []), target=ids if is_last else None, return_outputs=False
                )
            else:
                for rows in ids.split(mapping.micro_batch):
                    loss_of(model(rows), rows).backward()
            popdist.execute_on_instances({popdist.replica_index()}, optimizer.step)  # the same in each replica
            optimizer.zero_grad(set_to_none=False)
    return live.peak


def law_shards_draw_their_own_numbers() -> None:
    """Values that are equal on all instances, after dropout between columns and rows; and the replica's go on."""
    torch.manual_seed(0)
    model = parallelize(Gpt(p=0.5), roles=ROLES)
    layer = model.get_submodule("blocks.0") if device_mesh().get_local_rank("pipeline") == 0 else None
    drawn: list[Tensor] = []
    if layer is not None:
        for name in ("query", "key", "value"):
            linear: Any = layer.get_submodule(f"attention.{name}")
            with torch.no_grad():
                linear.weight.zero_()
                linear.bias.fill_(1.0)
        layer.get_submodule("attention.out").register_forward_pre_hook(
            lambda _, args: drawn.append(local_part(args[0]).clone()), prepend=True
        )
        torch.manual_seed(3)
        layer(torch.ones(1, LENGTH, WIDTH))
        drawn.append(torch.rand(2))
    everyone: list[Any] = [None] * popdist.num_instances()
    dist.all_gather_object(everyone, drawn)
    first, *others = [it for it in everyone if it][: own_mapping().tensor]
    assert all(not torch.equal(first[0], it[0]) and torch.equal(first[1], it[1]) for it in others)


def law_replicas_may_shard_the_weights() -> None:
    """As fully_shard does it, which adds the gradients of replicas itself."""
    number = popdist.num_replicas()
    if number == 1 or own_mapping().pipeline > 1:
        return
    for sharding in ("gradients", "weights"):
        shards = {"optimizer_shards": number, "weight_shards": number if sharding == "weights" else 1}
        torch.manual_seed(0)
        whole = Gpt()
        divided = parallelize(deepcopy(whole), own_mapping(sharding=sharding, **shards), roles=ROLES)
        optimizer = torch.optim.SGD(divided.parameters(), lr=0.5)
        for step in range(2):
            rows = own_samples(step)
            loss_of(divided(rows[:, :-1]), rows[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        check_weights(divided, trained_alone(whole))


def law_what_does_not_fit_is_named() -> None:
    """What was asked, what was found, and what to do."""
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (
            popdist.WeightsError,
            "roles name blocks.0.attention.outer, and there is no such module: it has attention.out",
            lambda: parallelize(Gpt(), roles=replace(ROLES, rows=("attention.outer", "down"))),
        ),
        (
            popdist.WeightsError,
            "roles name blocks.0.norms.0, a LayerNorm: it must be a Linear",
            lambda: parallelize(Gpt(), roles=replace(ROLES, columns=("norms.0",))),
        ),
        (
            popdist.WeightsError,
            "roles divide blocks.0.attention.p, which is 0.0: it must be a whole number",
            lambda: parallelize(Gpt(), roles=replace(ROLES, divided=("attention.p",))),
        ),
        (
            popdist.WeightsError,
            r"does not know what the modules of Gpt are for: give roles=popdist.parallel.Roles\(",
            lambda: parallelize(Gpt()),
        ),
        (
            popdist.ContractError,
            r"mapping has tensor=8,pipeline=\d, and the job tensor=\d,pipeline=\d: start it with poprun --para",
            lambda: parallelize(Gpt(), own_mapping(tensor=8), roles=ROLES),
        ),
        (
            popdist.ContractError,
            "cannot apply offload_optimizer and phases=2 of the mapping",
            lambda: parallelize(Gpt(), own_mapping(offload_optimizer=True, phases=2), roles=ROLES),
        ),
        (
            popdist.ContractError,
            "cannot read the mapping no/such.json: ",
            lambda: parallelize(Gpt(), "no/such.json", roles=ROLES),
        ),
        (
            popdist.ContractError,
            "parallelize_laws.py is no mapping that poprun-size --save wrote",
            lambda: parallelize(Gpt(), __file__, roles=ROLES),
        ),
        (
            popdist.ContractError,
            "mesh has the dimensions .*: parallelize.. needs replica, pipeline, tensor",
            lambda: parallelize(Gpt(), roles=ROLES, mesh=device_mesh()["tensor"]),
        ),
    ]
    if own_mapping().tensor > 1:
        cases += _cases_of_tensor_groups()
    if own_mapping().pipeline > 1:
        cases += _cases_of_pipelines()
    for kind, words, call in cases:
        with refused(kind, words):
            call()


def _cases_of_tensor_groups() -> list[tuple[type[Exception], str, Callable[[], object]]]:
    divided = parallelize(Gpt(), own_mapping(pipeline=own_mapping().pipeline, sequence_parallel=True), roles=ROLES)
    place = device_mesh().get_local_rank("pipeline")
    given = torch.zeros(1, 3, WIDTH) if place else torch.zeros(1, 3, dtype=torch.int64)
    return [
        (
            popdist.WeightsError,
            "tensor=2 does not divide heads=3 of Gpt: nearest are 1",
            lambda: parallelize(Gpt(), roles=replace(ROLES, divisors=(("heads", 3),))),
        ),
        (popdist.WeightsError, "Gpt has DTensors: parallelize.. divides a whole model", lambda: _again(divided)),
        (
            popdist.WeightsError,
            "sequence_parallel=yes divides norms, too, and roles name none",
            lambda: parallelize(Gpt(), own_mapping(sequence_parallel=True), roles=replace(ROLES, norms=())),
        ),
        (
            popdist.BatchError,
            r"sequence over tensor=2, and Block got hidden states of shape \(1, 3, 16\): pad",
            lambda: divided(given),
        ),
    ]


def _again(divided: nn.Module) -> None:
    """Divide a model, parts of whose layers are here, once more."""
    here = [layer for layer in divided.get_submodule("blocks").children() if isinstance(layer, Block)]
    whole = Gpt()
    whole.blocks = nn.ModuleList(here)
    parallelize(whole, roles=replace(ROLES, divided=()))


def _cases_of_pipelines() -> list[tuple[type[Exception], str, Callable[[], object]]]:
    short = Gpt()
    short.blocks = short.blocks[:1]
    return [
        (
            popdist.WeightsError,
            "pipeline=2 with interleave=1 needs 2 layers, and Gpt has 1: at most pipeline=1",
            lambda: parallelize(short, roles=ROLES),
        ),
        (
            popdist.WeightsError,
            "words.weight of stage 0 is also head.weight of stage 1: weights tied over stages",
            lambda: parallelize(Gpt(tied=True), roles=ROLES),
        ),
        (
            popdist.WeightsError,
            "positions.weight has no stage: roles name neither",
            lambda: parallelize(Gpt(), roles=replace(ROLES, positions=None)),
        ),
    ]
