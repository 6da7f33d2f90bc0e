"""What people do with a model and its gradients, each as a small training run; every instance runs all of them.

Each returns the digest of what it has trained. The same replicas give the same digests, however they are dealt to
instances: so whatever a recipe does, it does it alike on all of them.
"""

import copy
import io
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import popdist
from popdist.ground.layout import parts
from popdist.parallel import recompute
from tests.contract.collective_laws import refused
from tests.contract.training_laws import samples, share

NUM_STEPS = 3


def run_all() -> dict[str, str]:
    """Every recipe of this file, by its name."""
    popdist.init(timeout_seconds=300)
    digests = {}
    for name, recipe in globals().items():
        if name.startswith("recipe_"):
            torch.manual_seed(0)
            digests[name] = popdist.checksum(recipe())
    return digests


def prepare() -> None:
    """Have torch import its compiler, in the process that forks the worlds."""
    import_module("torch._inductor.compile_fx")
    import_module("torch._inductor.codegen.cpp")


def run_inductor(cache: Path) -> str:
    """What the kernels that torch compiles for this CPU have trained, on micro batches of several sizes."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    config: Any = import_module("torch._inductor.config")
    config.compile_threads = 1
    config.cpp.vec_isa_ok = True  # torch would compile a program for each kind that the CPU has
    popdist.init(timeout_seconds=300)
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(300), nn.GELU())
    model = popdist.ReplicatedModel(torch.compile(module, dynamic=False))  # type: ignore[arg-type] # it is one
    samples = torch.randn(37 * popdist.num_replicas() - 1, 300)
    x = share((samples, samples))[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(NUM_STEPS):
        for rows in model.micro_batches(x):
            model(rows).exp().mean().backward()
        optimizer.step()
    return popdist.checksum(module)


def run_four_replicas(*, is_said: bool) -> tuple[str, list[str]]:
    """Four replicas, said by the program where poprun has not; the weights, and whose random states are here."""
    if is_said:
        for name in [name for name in os.environ if name.startswith("POPDIST_")]:
            del os.environ[name]
    popdist.init(timeout_seconds=300)
    num_local = 4 // popdist.num_instances()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4))
    model = popdist.ReplicatedModel(module, num_local_replicas=num_local)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = num_local * popdist.instance_index()
    rows = parts(range(22), range(first, first + num_local), 4)
    own = tuple(whole[rows.start : rows.stop] for whole in samples(22))
    for _ in range(NUM_STEPS):
        for x, y in model.micro_batches(own, accumulation=2):
            cross_entropy(model(x), y).backward()
        optimizer.step()
    if is_said:
        assert list(popdist.ReplicatedModel(module).randomness.state_dict()) == [str(popdist.instance_index())]
        for wrong in (0, 1.5):
            with refused(popdist.BatchError, "num_local_replicas"):
                popdist.ReplicatedModel(module, num_local_replicas=wrong)  # type: ignore[arg-type] # the subject
    if popdist.num_instances() > 1:
        error = popdist.CollectiveError if is_said else popdist.ContractError
        with refused(
            error, "num_local_replicas=2.*num_local_replicas=1" if is_said else "num_local_replicas=5, and"
        ):
            popdist.ReplicatedModel(module, num_local_replicas=2 - popdist.instance_index() if is_said else 5)
    return popdist.checksum(model), list(model.randomness.state_dict())


def batch() -> tuple[Tensor, Tensor]:
    """This instance's samples of a step, 3 for each replica."""
    return share(samples(3 * popdist.num_replicas()))


def layers() -> nn.Sequential:
    """A small network."""
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 4))


def train(model: popdist.ReplicatedModel, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> nn.Module:
    """A few steps with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(NUM_STEPS):
        for x, y in model.micro_batches(batch()):
            (cross_entropy(model(x), y) if loss is None else loss(x, y)).backward()
        optimizer.step()
    return model.module


def recipe_rows_that_begin_anywhere() -> nn.Module:
    """Micro batches that begin within the memory of a batch, where products have other bits than at its start."""
    sizes = [(19, 10, 9), (7, 26, 5), (9, 25, 10), (29, 29, 10)]
    models = [popdist.ReplicatedModel(nn.Linear(width, out)) for _, width, out in sizes]
    optimizer = torch.optim.SGD([weight for model in models for weight in model.parameters()], lr=0.1)
    for (num_rows, width, _), model in zip(sizes, models, strict=True):
        samples_of_all = torch.randn(num_rows * popdist.num_replicas(), width)
        for rows in model.micro_batches(share((samples_of_all, samples_of_all))[0].clone()):
            model(rows).exp().mean().backward()
    optimizer.step()
    return nn.ModuleList(models)


def recipe_autocast_and_a_scaler_that_skips() -> nn.Module:
    """Half precision inside; one replica's infinity makes all skip the step, and the scales stay equal."""
    model = popdist.ReplicatedModel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(NUM_STEPS):
        replicas = iter(popdist.local_replicas())
        for x, y in model.micro_batches(batch()):
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(x), y)
            if (step, next(replicas)) == (1, 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    return model.module


def recipe_schedule_and_groups() -> nn.Module:
    """A parameter group with a rate of its own, another that is frozen at first, a schedule, clipping."""
    model = popdist.ReplicatedModel(layers())
    first, last = model.module.get_submodule("0"), model.module.get_submodule("3")
    groups: list[dict[str, Any]] = [{"params": first.parameters(), "lr": 1e-3}, {"params": last.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=NUM_STEPS + 1)
    for step in range(NUM_STEPS):
        last.requires_grad_(step > 0)
        for x, y in model.micro_batches(batch()):
            cross_entropy(model(x), y).backward()
        assert (last.get_parameter("weight").grad is None) == (step == 0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    return model.module


def recipe_two_tasks_and_rare_steps() -> nn.Module:
    """Gradients of several loops are added; the optimizer steps after every fourth one."""
    model = popdist.ReplicatedModel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(NUM_STEPS):
        for add in (False, True):
            for x, y in model.micro_batches(batch(), add=add):
                cross_entropy(model(x), y).backward()
            for x, _ in model.micro_batches(batch(), add=True):
                mse_loss(model(x), x).backward()
        optimizer.step()
    return model.module


def recipe_compiled() -> nn.Module:
    """torch.compile of the module inside; its random numbers are the replica's, and layers are recomputed."""
    module = recompute(layers(), layers=["0", "3"])
    model = popdist.ReplicatedModel(torch.compile(module, backend="aot_eager"))  # type: ignore[arg-type] # it is one
    train(model)
    return module


def recipe_activation_checkpointing() -> nn.Module:
    """Dropout is recomputed with the same mask."""
    model = popdist.ReplicatedModel(layers())

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(checkpoint(model.module, x, use_reentrant=False), y)

    return train(model, loss)


def recipe_bfloat16_parameters() -> nn.Module:
    """Gradients are added wide and rounded once."""
    model = popdist.ReplicatedModel(layers().to(torch.bfloat16))
    return train(model, lambda x, y: cross_entropy(model(x.to(torch.bfloat16)), y))


def recipe_gradients_rounded_to_bfloat16() -> nn.Module:
    """Half the bytes on a network; the last batch's replicas have other numbers of samples."""
    model = popdist.ReplicatedModel(layers(), gradient_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for count in (12, 12, 7):
        for x, y in model.micro_batches(share(samples(count)), accumulation=2):
            cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.module


def recipe_gradients_rounded_to_float16() -> nn.Module:
    """A gradient that is too large for it becomes infinite, and the scaler's scale shrinks."""
    model = popdist.ReplicatedModel(layers(), gradient_dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for _ in range(NUM_STEPS):
        for x, y in model.micro_batches(batch()):
            scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**18
    return model.module


def recipe_channels_last() -> nn.Module:
    """Gradients keep the strides of their parameters."""
    net = nn.Sequential(nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4))
    model = popdist.ReplicatedModel(net.to(memory_format=torch.channels_last))  # type: ignore[call-overload] # torch's stubs lack this form
    return train(model, lambda x, y: cross_entropy(model(x.view(-1, 1, 2, 2)), y))


class Generator(nn.Module):
    """A module that programs call by other names than forward; its two ends share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.zeros(2))

    def generate(self, x: Tensor) -> Tensor:
        """As models of language do."""
        return torch.as_tensor(self.last(torch.tanh(self.first(x))))


def recipe_forwarded_methods_and_a_moving_average() -> nn.Module:
    """Gradients of a method of the module's own; a deepcopy follows; saved wrapped, loaded bare."""
    model = popdist.ReplicatedModel(Generator())
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        for x, y in model.micro_batches(batch()):
            cross_entropy(model.generate(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
    assert model.unused.grad is None
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    file.seek(0)
    bare = Generator()
    bare.load_state_dict(torch.load(file, weights_only=True))
    return bare


def recipe_adversaries() -> nn.Module:
    """Two models, each with steps of its own; within the generator's the other one's gradients play no part."""
    generator, critic = popdist.ReplicatedModel(layers()), popdist.ReplicatedModel(layers())
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (generator, critic)]
    for _ in range(NUM_STEPS):
        for x, y in critic.micro_batches(batch()):
            cross_entropy(critic(x), y).backward()
            mse_loss(critic(generator(x).detach()), torch.zeros(len(x), 4)).backward()
        optimizers[1].step()
        for x, y in generator.micro_batches(batch()):
            with critic.no_sync():
                cross_entropy(critic(generator(x)), y).backward()
        optimizers[0].step()
    return nn.ModuleList([generator.module, critic.module])


def recipe_closure() -> nn.Module:
    """LBFGS calls for gradients as often as it likes, and decides by a loss that is the same everywhere."""
    model = popdist.ReplicatedModel(nn.Linear(4, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> float:
        mean = popdist.Mean()
        for x, y in model.micro_batches(batch()):
            loss = cross_entropy(model(x), y)
            loss.backward()
            mean.add(loss.detach() * len(x), len(x))
        return mean.compute()

    for _ in range(NUM_STEPS):
        optimizer.step(closure)
    return model.module


def normed() -> nn.Sequential:
    """A small network with batch norm layers, one of them converted."""
    first = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(16))
    return nn.Sequential(nn.Linear(4, 16), first, nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 4), nn.BatchNorm1d(4))


def train_groups(model: popdist.ReplicatedModel, loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """A few steps with statistics of all replicas; with accumulation, and fewer samples in the last one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for count in (12, 12, 7):
        model.run_micro_batches(share(samples(count)), lambda x, y: loss(x, y).backward(), 1 + count % 2)
        optimizer.step()
    return model.module


def recipe_batch_norm_groups() -> nn.Module:
    """Replicas of one instance take turns, those of several meet."""
    model = popdist.ReplicatedModel(normed(), batch_norm_group_size=popdist.num_replicas())
    return train_groups(model, lambda x, y: cross_entropy(model(x), y))


def recipe_batch_norm_groups_compiled() -> nn.Module:
    """torch.compile leaves the layers of groups out of its graphs."""
    module = normed()
    compiled: Any = torch.compile(module, backend="aot_eager")
    model = popdist.ReplicatedModel(compiled, batch_norm_group_size=popdist.num_replicas())
    train_groups(model, lambda x, y: cross_entropy(model(x), y))
    return module


def recipe_batch_norm_groups_checkpointed() -> nn.Module:
    """What is computed again in the backward pass meets again."""
    model = popdist.ReplicatedModel(normed(), batch_norm_group_size=popdist.num_replicas())
    return train_groups(model, lambda x, y: cross_entropy(checkpoint(model.module, x, use_reentrant=False), y))


def recipe_batch_norm_groups_scaled_and_clipped() -> nn.Module:
    """A scaler that skips a step in which one replica has found infinity, half precision inside, and clipping."""
    model = popdist.ReplicatedModel(normed(), batch_norm_group_size=popdist.num_replicas())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(NUM_STEPS):
        replicas = iter(popdist.local_replicas())

        def body(x: Tensor, y: Tensor) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(x), y)
            factor = float("inf") if (step, next(replicas)) == (1, 1) else 1.0  # noqa: B023 - called at once
            scaler.scale(loss * factor).backward()

        model.run_micro_batches(batch(), body)
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(0.5)
        assert bool(norm.isfinite()) == (step != 1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    return model.module
