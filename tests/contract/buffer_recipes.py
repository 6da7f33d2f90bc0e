"""Programs whose state lies beside the one model's own parameters: the same bits for every split, or an error.

Each recipe trains on this job's replicas and gives the modules whose bits must not depend on the split.
"""

import copy
import sys
import warnings

import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parametrizations, spectral_norm
from torch.optim.swa_utils import AveragedModel

import popdist
from tests.contract.training_laws import share

NUM_STEPS = 4

TIMEOUT_SECONDS = 300.0


def run_all() -> dict[str, str]:
    """The checksum of what each recipe trains, by its name."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    found = {}
    for name, recipe in tuple(vars(sys.modules[__name__]).items()):
        if name.startswith("recipe_"):
            torch.manual_seed(1)
            popdist.barrier()
            found[name] = popdist.checksum(recipe())
    return found


def batch(step: int = 0, count: int = 0) -> tuple[Tensor, Tensor]:
    """This instance's samples of a step: five for each replica, but for the last, which has four."""
    count = count or 5 * popdist.num_replicas() - 1
    generator = torch.Generator().manual_seed(step)
    return share((torch.randn(count, 4, generator=generator), torch.randint(0, 4, (count,), generator=generator)))


def layers() -> nn.Module:
    """With statistics and random numbers."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 4))


def critic_layers() -> nn.Module:
    """With statistics, and with vectors that move in each forward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = spectral_norm(nn.Linear(4, 6))
    new = parametrizations.spectral_norm(nn.Linear(6, 1))
    return nn.Sequential(old, nn.BatchNorm1d(6), nn.LeakyReLU(0.2), new)


def recipe_adversaries_with_statistics() -> nn.Module:
    """In each one's loop the other one runs in training mode, and so its buffers move, too."""
    generator, critic = popdist.ReplicatedModel(layers()), popdist.ReplicatedModel(critic_layers())
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (generator, critic)]
    for step in range(NUM_STEPS):
        for x, _ in critic.micro_batches(batch(step)):
            with generator.no_sync():
                fake = generator(torch.randn(len(x), 4)).detach()
            (critic(fake).relu().mean() + (1 - critic(x)).relu().mean()).backward()
        optimizers[1].step()
        for x, _ in generator.micro_batches(batch(step), 2):
            with critic.no_sync():
                (-critic(generator(x)).mean()).backward()
        optimizers[0].step()
    return nn.ModuleList([generator.module, critic.module])


class Centre(nn.Module):
    """A criterion with the mean of what it has seen."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The distance from the centred output of the teacher."""
        loss = cross_entropy(student, (teacher - self.centre).softmax(1))
        self.centre.mul_(0.9).add_(teacher.detach().mean(0), alpha=0.1)
        return loss


def recipe_a_teacher_and_a_criterion_of_their_own() -> nn.Module:
    """Both have buffers that move in the student's loop, and are wrapped for their sake."""
    student = popdist.ReplicatedModel(layers())
    teacher, criterion = copy.deepcopy(student), popdist.ReplicatedModel(Centre())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        for x, _ in student.micro_batches(batch(step)):
            with torch.no_grad():
                wanted = teacher(x)
            criterion(student(x), wanted).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return nn.ModuleList([student.module, teacher.module, criterion.module])


class Uncertainty(nn.Module):
    """Learned weights of two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, *losses: Tensor) -> Tensor:
        """Their sum."""
        return torch.as_tensor((torch.stack(losses) * (-self.log_variances).exp() + self.log_variances).sum())


def recipe_one_module_of_all_that_is_trained() -> nn.Module:
    """A network, a criterion with a buffer, and learned weights of losses, in a ModuleDict."""
    parts = nn.ModuleDict({"net": layers(), "centre": Centre(), "weights": Uncertainty()})
    model = popdist.ReplicatedModel(parts)
    net, centre, weights = parts["net"], parts["centre"], parts["weights"]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        for x, y in model.micro_batches(batch(step)):
            out = net(x)
            weights(cross_entropy(out, y), centre(out, x)).backward()
        optimizer.step()
    return model.module


class Codebook(nn.Module):
    """Codes that move to what was seen, written so that torch counts no write."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(4, 20_000))

    def forward(self, x: Tensor) -> Tensor:
        """The codes of ``x``."""
        out = self.layer(x)
        self.codes.data.mul_(0.9).add_(out.detach().mean(0).unsqueeze(1), alpha=0.1)
        return torch.as_tensor(out @ self.codes.clone())


def recipe_a_large_buffer_written_through_data() -> nn.Module:
    """It is combined from the first step on, also in steps that are not checked."""
    model = popdist.ReplicatedModel(Codebook())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(NUM_STEPS + 1):
        for x, _ in model.micro_batches(batch(step)):
            model(x).square().mean().backward()
        optimizer.step()
    return model.module


class Positions(nn.Module):
    """A table that grows with the longest sequence, made by the first one."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Add positions to a sequence."""
        length = 2 + int(x[0, 0] > 0) + len(x)
        if not hasattr(self, "table") or len(self.table) < length:
            self.register_buffer("table", torch.arange(4.0 * length).view(-1, 4), persistent=False)
        return torch.as_tensor(self.layer(x) + self.table[: len(x)])


def recipe_a_table_that_grows() -> nn.Module:
    """Instances may have more of it or less, and what is computed is the same."""
    model = popdist.ReplicatedModel(Positions())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(NUM_STEPS):
        for x, _ in model.micro_batches(batch(step, 0 if step else 2)):
            model(x).square().mean().backward()
        optimizer.step()
    model.module._buffers.clear()
    return model.module


def recipe_quantization_aware_training() -> nn.Module:
    """Observers resize their buffers in the first forward pass."""
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model.train(), inplace=True)
    assert popdist.checksum(model)
    replicated = popdist.ReplicatedModel(model)
    optimizer = torch.optim.SGD(replicated.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        for x, y in replicated.micro_batches(batch(step)):
            cross_entropy(replicated(x), y).backward()
        optimizer.step()
    return model


class Gated(nn.Module):
    """Enough operations for torch.jit to make others of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """A gate, and what it lets through."""
        gate = torch.sigmoid(self.layer(x)) / (1 + x.sum(1, keepdim=True).abs())
        return (gate * torch.tanh(self.layer(x))).pow(3)


def recipe_scripted_and_traced() -> nn.Module:
    """What torch.jit has compiled has the same bits in the first call of a process as in later ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are old
        parts = torch.jit.script(Gated()), torch.jit.trace(Gated(), torch.randn(2, 4))
        penalty = torch.jit.trace(lambda x: (x.pow(3).sigmoid() * x.tanh()).mean(), torch.randn(2, 4))
    model = popdist.ReplicatedModel(nn.Sequential(*parts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        for x, y in model.micro_batches(batch(step)):
            out = model(x)
            (cross_entropy(out, y) + penalty(out)).backward()
        optimizer.step()
    return model.module


class Weighted(nn.Module):
    """With buffers whose elements share memory."""

    weights: Tensor
    windows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("weights", torch.rand(1).expand(4))
        self.register_buffer("windows", torch.rand(6).unfold(0, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Weighted scores."""
        return torch.as_tensor(self.layer(x) * self.weights + self.windows.sum(0))


def recipe_buffers_whose_elements_share_memory() -> nn.Module:
    """They are broadcast although torch does not write what ``expand()`` has made."""
    torch.manual_seed(popdist.instance_index())
    model = popdist.ReplicatedModel(Weighted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        for x, y in model.micro_batches(batch(step)):
            cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.module


def recipe_statistics_of_averaged_weights() -> nn.Module:
    """Made anew by update_bn, with random numbers in between."""
    model = popdist.ReplicatedModel(layers())
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        for x, y in model.micro_batches(batch(step)):
            cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    popdist.update_bn([batch(step) for step in range(3)], average)
    for x, _ in model.micro_batches(batch()):
        mse_loss(model(x), x).backward()
    optimizer.step()
    return nn.ModuleList([average.get_submodule("module.module"), model.module])
