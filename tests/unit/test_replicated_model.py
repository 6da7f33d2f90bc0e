"""The wrapper is the module it wraps, in every way a program looks at it; here in a job of one.

Holds popdist.step.training.ddp_answers and popdist.step.training.wrapping_model.
"""

import copy
import io
import pickle
from typing import Any, NoReturn

import pytest
import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore

import popdist
from popdist.gradients.memory import GradientPool
from popdist.ground import torch_private


@pytest.fixture(autouse=True)
def _job_of_one() -> None:
    popdist.init()


class Named(nn.Module):
    """A module with what programs reach for: attributes, methods, buffers, tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.decoder = nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight
        self.temperature = 0.5

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Use everything."""
        return torch.as_tensor(self.decoder(self.norm(self.encoder(x))) * scale)

    def generate(self) -> str:
        """A method of the module's own."""
        return f"at {self.temperature}"


def test_state_dicts_have_the_module_s_own_keys() -> None:
    """Saved wrapped, loaded bare, and the other way round; metadata included."""
    bare, wrapped = Named(), popdist.ReplicatedModel(Named())
    assert list(wrapped.state_dict()) == list(bare.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in bare.named_parameters()]
    assert [name for name, _ in wrapped.named_buffers()] == [name for name, _ in bare.named_buffers()]

    file = io.BytesIO()
    torch.save(wrapped.state_dict(), file)
    file.seek(0)
    bare.load_state_dict(torch.load(file, weights_only=True))

    assert popdist.checksum(bare) == popdist.checksum(wrapped)
    other = popdist.ReplicatedModel(Named())
    other.load_state_dict(bare.state_dict())
    assert popdist.checksum(other) == popdist.checksum(bare)
    with pytest.raises(RuntimeError, match=r"encoder\.bias"):
        other.load_state_dict({})


def test_a_module_may_hold_the_model() -> None:
    """Its state dict has no trace of the wrapper, and loads again, into a copy too."""
    outer = nn.ModuleDict({"net": popdist.ReplicatedModel(Named())})
    plain = nn.ModuleDict({"net": Named()})
    assert list(outer.state_dict()) == list(plain.state_dict())

    for target in (outer, copy.deepcopy(outer)):
        target.load_state_dict(plain.state_dict())
        assert [tensor.tolist() for tensor in target.state_dict().values()] == [
            tensor.tolist() for tensor in plain.state_dict().values()
        ]


def test_attributes_are_the_module_s() -> None:
    """Methods, values and submodules are found; what is nowhere is an AttributeError of the module."""
    model: Any = popdist.ReplicatedModel(Named())

    assert model.generate() == "at 0.5"
    assert model.encoder is model.module.encoder
    assert not hasattr(model, "nothing")
    with pytest.raises(AttributeError, match="'Named' object has no attribute 'nothing'"):
        _ = model.nothing


def test_it_computes_as_the_module_does() -> None:
    """Arguments go through, and train, eval, to and zero_grad reach the module."""
    model = popdist.ReplicatedModel(Named())
    model.eval().to(torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64)

    assert not model.module.training
    assert torch.equal(model(x, scale=2.0), model.module(x, scale=2.0))


def pickle_and_back(model: nn.Module) -> Any:
    """What a spawned worker gets."""
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - our own bytes


@pytest.mark.parametrize("again", [copy.deepcopy, pickle_and_back])
def test_copies_are_whole(again: Any) -> None:
    """For moving averages and spawned workers; a half-made object has no attributes to recurse into."""
    model = popdist.ReplicatedModel(Named())

    other = again(model)

    assert popdist.checksum(other) == popdist.checksum(model)
    assert other.decoder.weight is other.encoder.weight
    assert other.encoder is not model.encoder
    empty = popdist.ReplicatedModel.__new__(popdist.ReplicatedModel)
    with pytest.raises(AttributeError):
        _ = empty.module


class Branches(nn.Module):
    """One layer for negative samples, and another for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(3, 1)
        self.above = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use one of the layers."""
        return torch.as_tensor(self.below(x) if x.sum() < 0 else self.above(x))


@pytest.mark.parametrize("signs", [[-1, 1, 1], [1, 1, -1], [-1, 1, 0]])
def test_a_parameter_of_one_micro_batch_has_its_gradient(signs: list[int]) -> None:
    """Whichever of the step's micro batches used it, and though the others did not."""
    model = popdist.ReplicatedModel(Branches())
    plain = copy.deepcopy(model.module)
    parts = [sign * torch.ones(2, 3) for sign in signs]
    for x in model.micro_batches(parts, 3, split=list):
        model(x).mean().backward()
    for x in parts:
        (plain(x).mean() / 3).backward()

    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_without_a_seed_it_draws_as_the_program_does() -> None:
    """A dropout mask is the one of a loop without popdist; several replicas need states of their own."""
    model = popdist.ReplicatedModel(nn.Dropout(), None)
    torch.manual_seed(3)
    expected = nn.Dropout()(torch.ones(8)), nn.Dropout()(torch.ones(8))
    torch.manual_seed(3)
    for mask in expected:
        for (x,) in model.micro_batches((torch.ones(8),)):
            assert torch.equal(model(x), mask)
    assert model.randomness.state_dict() == {}
    with pytest.raises(popdist.BatchError, match="seed=None, and the model has 2 replicas"):
        popdist.ReplicatedModel(nn.Dropout(), None, num_local_replicas=2)


def test_two_models_may_take_their_steps_together() -> None:
    """As a generator and its critic do."""
    one, two = (popdist.ReplicatedModel(nn.Linear(3, 1)) for _ in range(2))
    for x, y in zip(one.micro_batches(torch.ones(4, 3), 2), two.micro_batches(torch.ones(4, 3), 2), strict=True):
        (one(x).sum() + two(y).sum()).backward()

    assert all(parameter.grad is not None for model in (one, two) for parameter in model.parameters())


def test_attributes_that_are_set_are_the_module_s() -> None:
    """Plain values and buffers; a method of the wrapper may be replaced, too."""
    model: Any = popdist.ReplicatedModel(Named())
    model.temperature, model.scale = 0.25, 0.0
    model.register_buffer("seen", torch.ones(2))
    model.eval()

    assert model.generate() == "at 0.25"
    assert (model.module.temperature, model.module.scale, model.module.training) == (0.25, 0.0, False)
    assert "seen" in model.state_dict()
    assert "seen" in dict(model.named_buffers())
    assert "scale" not in vars(copy.deepcopy(model))
    del model.scale
    assert not hasattr(model.module, "scale")


def test_weights_are_changed_before_the_module_is_wrapped() -> None:
    """Nothing is lost silently; the error says what to do, and doing it works."""
    model: Any = popdist.ReplicatedModel(Named())
    wanted = r"change the module before ReplicatedModel\(module\); or change model\.module on all instances"
    with pytest.raises(popdist.WeightsError, match=wanted):
        model.decoder = nn.Linear(3, 2)
    with pytest.raises(popdist.WeightsError, match=wanted):
        model.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(popdist.WeightsError, match=wanted):
        model.register_parameter("extra", nn.Parameter(torch.ones(1)))
    with pytest.raises(popdist.WeightsError, match=wanted):
        model.add_module("extra", nn.Linear(1, 1))
    model.module.decoder = nn.Linear(3, 2)
    popdist.broadcast_weights(model)
    for x in model.micro_batches(torch.randn(4, 3)):
        model(x).sum().backward()
    assert model.decoder.weight.grad is not None


def test_functional_call_takes_the_model() -> None:
    """With its own names of parameters, and within a micro batch."""
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    zeros = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for x in model.micro_batches(torch.ones(4, 3)):
        assert not torch.func.functional_call(model, zeros, (x,)).any()
        model(x).sum().backward()
    assert all(parameter.grad is not None and parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ({"device_ids": [0]}, r"move the module first: ReplicatedModel\(net\.to\(popdist\.device\(\)\)\)"),
        ({"find_unused_parameters": True}, "leave it out: a replica that does not use a parameter"),
        ({"broadcast_buffers": False}, "leave it out: buffers become the mean"),
        ({"gradient_as_bucket_view": True}, "leave it out: gradients are added where they lie"),
    ],
)
def test_options_of_ddp_have_an_answer(option: dict[str, Any], answer: str) -> None:
    """What no class has is Python's own error."""
    with pytest.raises(popdist.WeightsError, match=answer):
        popdist.ReplicatedModel(nn.Linear(1, 1), **option)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sede'"):
        popdist.ReplicatedModel(nn.Linear(1, 1), sede=1)


def test_attributes_of_ddp_have_an_answer() -> None:
    """Setting one is no silent no-op; a module's own attribute of that name stays its own."""
    model: Any = popdist.ReplicatedModel(nn.Linear(1, 1))
    with pytest.raises(popdist.WeightsError, match=r"require_backward_grad_sync = False: .*accumulation=4"):
        model.require_backward_grad_sync = False
    with pytest.raises(AttributeError, match="no 'join': leave it out: a replica that"):
        model.join()
    assert not hasattr(model, "join")
    model.module.join = 3
    assert model.join == 3


def test_modules_that_reduce_already_and_lazy_ones_are_refused() -> None:
    """By name, and with what to do."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        inside = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        with pytest.raises(popdist.WeightsError, match=r"the module is a DistributedDataParallel.*ddp\.module"):
            popdist.ReplicatedModel(inside)
        with pytest.raises(popdist.WeightsError, match="0 in the module is a DistributedDataParallel already"):
            popdist.ReplicatedModel(nn.Sequential(inside))
        with pytest.raises(
            popdist.WeightsError, match="around a ReplicatedModel would reduce its gradients twice"
        ):
            nn.parallel.DistributedDataParallel(popdist.ReplicatedModel(nn.Linear(1, 1)))
    finally:
        distributed.destroy_process_group()
    with pytest.raises(popdist.WeightsError, match=r"is a ReplicatedModel already.*wrap the module once"):
        popdist.ReplicatedModel(popdist.ReplicatedModel(nn.Linear(1, 1)))
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(
        popdist.WeightsError, match=r"0\.weight has no shape yet.*run one batch through the module"
    ):
        popdist.ReplicatedModel(lazy)
    lazy(torch.ones(1, 3))
    popdist.ReplicatedModel(lazy)


def test_a_loop_that_zip_leaves_open_is_named_so() -> None:
    """Whichever of the two loops it is."""
    one, two = (popdist.ReplicatedModel(nn.Linear(3, 1)) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters()) for model in (one, two)]
    pairs: Any
    for pairs in (((one, 2), (two, 2)), ((one, 2), (two, 1))):
        loops = [model.micro_batches(torch.ones(4, 3), accumulation) for model, accumulation in pairs]
        for x, y in zip(*loops, strict=False):
            (one(x).sum() + two(y).sum()).backward()
        del loops
        lost = pairs[0][1] <= pairs[1][1]
        optimizers[not lost].step()
        with pytest.raises(popdist.MicroBatchError, match=r"beside another one in zip\(\).*strict=True"):
            optimizers[lost].step()


def test_a_step_without_memory_for_its_gradients_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the program's to catch, and the next loop works."""
    model = popdist.ReplicatedModel(nn.Linear(2, 1), num_local_replicas=2)

    def find_no_memory(_pool: GradientPool) -> NoReturn:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(GradientPool, "get", find_no_memory)
        with pytest.raises(MemoryError):
            list(model.micro_batches(torch.ones(4, 2)))
    for x in model.micro_batches(torch.ones(4, 2)):
        model(x).mean().backward()
    assert model.module.weight.grad is not None


def test_a_module_that_is_wrapped_again_is_reduced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper before leaves the micro batches of the new one alone."""
    module, reduced = nn.Linear(2, 1), list[str]()
    before = popdist.ReplicatedModel(module, check_finite=True)
    monkeypatch.setattr(before._model_steps.automatic, "_reduce", lambda: reduced.append("before"))
    after = popdist.ReplicatedModel(module, check_finite=True)
    for x in after.micro_batches(torch.ones(4, 2)):
        after(x).mean().backward()
    assert not reduced
    assert module.weight.grad is not None


def test_a_loop_that_a_traceback_keeps_open_leaves_later_steps_alone() -> None:
    """As notebooks keep them: it is closed in the middle of another step."""
    model = popdist.ReplicatedModel(nn.Linear(2, 1))
    kept = model.micro_batches(torch.ones(4, 2))
    next(kept)
    with pytest.raises(popdist.MicroBatchError, match="began before"):
        next(model.micro_batches(torch.ones(4, 2)))
    for x in model.micro_batches(torch.ones(4, 2)):
        kept.close()  # type: ignore[attr-defined]  # it is a generator
        model(x).mean().backward()
    assert model.module.weight.grad is not None


def test_the_first_model_connects_the_instances() -> None:
    """So a program needs no ``popdist.init()``; one that has called it keeps its own arguments."""
    popdist.finalize()
    popdist.ReplicatedModel(nn.Linear(1, 1))
    assert popdist.is_initialized()

    popdist.finalize()
    popdist.init(timeout_seconds=5)
    popdist.ReplicatedModel(nn.Linear(1, 1))
    popdist.init(timeout_seconds=5)


def test_a_checksum_is_of_names_shapes_dtypes_and_bits() -> None:
    """Each of them counts, -0.0 and buffers too; strides, mode and the order of a state dict do not."""
    weights = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    expected = popdist.checksum(weights)
    negative = weights["a"].clone()
    negative[0, 0] = -0.0
    others: list[dict[str, torch.Tensor]] = [
        {"a": weights["a"], "c": weights["b"]},
        weights | {"a": torch.zeros(3, 2)},
        weights | {"a": torch.zeros(2, 3, dtype=torch.int32)},
        weights | {"a": negative},
        {"a": weights["a"]},
    ]

    assert expected == "ffaeb76c012262e6d73e82f10cecf5fe"
    assert popdist.checksum(dict(reversed(weights.items()))) == expected
    assert popdist.checksum(weights | {"a": torch.zeros(3, 2).t(), "extra": 3}) == expected
    assert len({expected, *map(popdist.checksum, others)}) == 6


def test_a_checksum_takes_any_dtype_and_ties() -> None:
    """A tied parameter counts once, under its first name."""
    kinds = (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2, torch.int64, torch.float64)
    assert len({popdist.checksum({"x": torch.ones(3).to(dtype)}) for dtype in kinds}) == len(kinds)
    assert popdist.checksum({"x": torch.zeros(())}) != popdist.checksum({"x": torch.zeros(0)})
    tied = Named()
    assert popdist.checksum(tied) == popdist.checksum(dict([*tied.named_parameters(), *tied.named_buffers()]))


def test_a_body_is_a_function() -> None:
    """Before a step is begun; the next one works."""
    body: Any = None
    model = popdist.ReplicatedModel(nn.Linear(2, 1))
    with pytest.raises(popdist.BatchError, match=r"run_micro_batches\(batch, None\): body is called with each"):
        model.run_micro_batches(torch.ones(2, 2), body)
    model.run_micro_batches(torch.ones(2, 2), lambda x: model(x).sum().backward())


def test_compile_compiles_the_module() -> None:
    """And not the wrapper, whose checks count steps: torch would compile it anew for each step."""
    compiled = []

    def backend(graph: Any, _inputs: object) -> Any:
        compiled.append(graph)
        return graph.forward

    model = popdist.ReplicatedModel(Named())
    model.compile(backend=backend)
    for batch in torch.ones(6, 2, 3):
        for x in model.micro_batches([batch]):
            model(x[0]).sum().backward()
        model.zero_grad()

    assert len(compiled) == 1
    assert [torch_private.is_compiled(it) for it in (model, model.module)] == [False, True]
