"""A GPT in fp32 that several processes train, shared as a mapping of `popsize` says.

Tensor groups split matrices, heads and words as Megatron-LM does; stages send activations on in the order of 1F1B;
replicas add a flat buffer of gradients, which stays allocated. All collectives are those of torch on gloo.
"""

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, distributed, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from popsize.mapping import Mapping
from popsize.model import Transformer


class _Shared(torch.autograd.Function):
    """What each process of a tensor group reads whole: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    """The sum over a tensor group of what each computed from its part of a matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _DividedLoss(torch.autograd.Function):
    """The mean cross entropy of logits of which each process of a tensor group has those of its words."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        largest = logits.amax(-1)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        total = shifted.exp().sum(-1)
        index, outside = _own_words(targets, logits.shape[-1], group)
        picked = shifted.gather(-1, index[:, None])[:, 0].masked_fill(outside, 0.0)
        sums = torch.stack([total, picked])
        distributed.all_reduce(sums, group=group)
        normal = sums[0].log()
        ctx.save_for_backward(shifted.sub_(normal[:, None]), index, outside)
        return (normal - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        log_probabilities, index, outside = ctx.saved_tensors
        own = torch.zeros_like(log_probabilities).scatter_(-1, index[:, None], ~outside[:, None] * 1.0)
        return log_probabilities.exp().sub_(own).mul_(gradients[0] / len(index)), None, None


def _applied(function: type[torch.autograd.Function], *inputs: object) -> Tensor:
    """What ``function`` computes."""
    found: Tensor = function.apply(*inputs)
    return found


def _own_words(words: Tensor, count: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Where ``words`` stand in this process's ``count`` words, and which are words of others."""
    index = words - distributed.get_rank(group) * count
    outside = (index < 0) | (index >= count)
    return index.masked_fill(outside, 0), outside


def _part(name: str, shape: tuple[int, ...], dim: int, group: ProcessGroup) -> Tensor:
    """This process's part, along ``dim``, of random weights that depend on ``name`` only."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.02
    return whole.chunk(group.size(), dim)[distributed.get_rank(group)]


class _Column(nn.Linear):
    """A matrix whose columns (the outputs) are divided over a tensor group; ``parts`` of them are divided each."""

    def __init__(
        self, name: str, inputs: int, outputs: int, group: ProcessGroup, *, parts: int = 1, bias: bool = True
    ) -> None:
        super().__init__(inputs, outputs // group.size(), bias=bias)
        self.group = group
        with torch.no_grad():
            self.weight.copy_(_part(name, (parts, outputs // parts, inputs), 1, group).flatten(0, 1))
            if bias:
                self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_applied(_Shared, x, self.group) if self.group.size() > 1 else x)


class _Row(nn.Linear):
    """A matrix whose rows (the inputs) are divided over a tensor group."""

    def __init__(self, name: str, inputs: int, outputs: int, group: ProcessGroup) -> None:
        super().__init__(inputs // group.size(), outputs)
        self.group = group
        with torch.no_grad():
            self.weight.copy_(_part(name, (outputs, inputs), 1, group))
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size() == 1:
            return super().forward(x)
        return _applied(_Summed, F.linear(x, self.weight), self.group) + self.bias


class _Block(nn.Module):
    """Attention and MLP, with a norm before each."""

    def __init__(self, name: str, n: Transformer, group: ProcessGroup) -> None:
        super().__init__()
        self.heads = n.heads // group.size()
        self.before_attention, self.before_mlp = nn.LayerNorm(n.hidden), nn.LayerNorm(n.hidden)
        self.queries_keys_values = _Column(f"{name}.attention", n.hidden, 3 * n.hidden, group, parts=3)
        self.projection = _Row(f"{name}.projection", n.hidden, n.hidden, group)
        self.inner = _Column(f"{name}.inner", n.hidden, n.ffn_width, group)
        self.outer = _Row(f"{name}.outer", n.ffn_width, n.hidden, group)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.before_attention(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(y)
        found: Tensor = x + self.outer(F.gelu(self.inner(self.before_mlp(x)), approximate="tanh"))
        return found


class _Embedding(nn.Module):
    """The words, divided over a tensor group, and the positions."""

    def __init__(self, n: Transformer, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.words = nn.Parameter(_part("words", (n.vocab, n.hidden), 0, group).clone())
        self.positions = nn.Parameter(torch.zeros(n.positions, n.hidden))

    def forward(self, words: Tensor) -> Tensor:
        if self.group.size() == 1:
            return F.embedding(words, self.words) + self.positions
        index, outside = _own_words(words, len(self.words), self.group)
        x = F.embedding(index, self.words).masked_fill(outside[..., None], 0.0)
        return _applied(_Summed, x, self.group) + self.positions


class _Head(nn.Module):
    """The last norm, the logits and the loss."""

    def __init__(self, n: Transformer, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(n.hidden)
        self.logits = _Column("logits", n.hidden, n.vocab, group, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        if self.group.size() == 1:
            return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), targets.flatten())
        return _applied(_DividedLoss, self.logits(self.norm(x)).flatten(0, 1), targets.flatten(), self.group)


class Trainer:
    """What one process does of a training: its stage, its part of each layer, its share of the samples."""

    def __init__(self, n: Transformer, mapping: Mapping, global_batch: int) -> None:
        shape = (mapping.pipeline, mapping.replicas, mapping.tensor)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "replicas", "tensor"))
        self.stages, self.replicas = mesh.get_group("pipeline"), mesh.get_group("replicas")
        self.stage, self.mapping, self.hidden = mesh.get_local_rank("pipeline"), mapping, n.hidden
        tensor = mesh.get_group("tensor")
        each = n.layers // mapping.pipeline
        first = self.stage * each
        self.embedding = _Embedding(n, tensor) if self.stage == 0 else None
        self.blocks = nn.ModuleList([_Block(f"block {i}", n, tensor) for i in range(first, first + each)])
        self.head = _Head(n, tensor) if self.stage == mapping.pipeline - 1 else None
        parameters = [p for part in (self.embedding, self.blocks, self.head) if part for p in part.parameters()]
        self.gradients = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, gradient in zip(
            parameters, self.gradients.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        samples = torch.randint(
            n.vocab, (global_batch, n.sequence + 1), generator=torch.Generator().manual_seed(1)
        )
        own = samples.chunk(mapping.replicas)[mesh.get_local_rank("replicas")]
        self.micro_batches = own.split(mapping.micro_batch)
        self.sending: dict[int, tuple[distributed.Work, Tensor]] = {}

    def step(self) -> float:
        """Train on the global batch; its loss on the last stage, 0 on others."""
        self.gradients.zero_()
        number = len(self.micro_batches)
        waiting: deque[tuple[Tensor | None, Any]] = deque()
        ahead = min(self.mapping.pipeline - 1 - self.stage, number)
        loss = 0.0
        for index in range(number + ahead):
            if index < number:
                waiting.append(self._forward(self.micro_batches[index]))
            if index >= ahead:
                loss += self._backward(*waiting.popleft())
        for work, _ in self.sending.values():
            work.wait()
        self.sending.clear()
        if self.mapping.replicas > 1:
            distributed.all_reduce(self.gradients, group=self.replicas)
        self.optimizer.step()
        return loss

    def _forward(self, samples: Tensor) -> tuple[Tensor | None, Tensor | GradientEdge]:
        """A forward pass: what the stage got, and the loss or where its output's gradient goes in."""
        got = None
        if self.embedding:
            x = self.embedding(samples[:, :-1])
        else:
            got = x = self._received(self.stage - 1, samples).requires_grad_()
        for block in self.blocks:
            x = self._recomputed(block, x) if self.mapping.recompute == "layer" else block(x)
        if self.head:
            return got, self.head(x, samples[:, 1:]) / (len(self.micro_batches) * self.mapping.replicas)
        self._send(x.detach(), self.stage + 1)
        return got, get_gradient_edge(x)

    def _recomputed(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The output of ``block``, all of which the backward pass computes again."""
        with set_checkpoint_early_stop(False):
            return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    def _backward(self, got: Tensor | None, output: Tensor | GradientEdge) -> float:
        """A backward pass; the loss on the last stage."""
        loss = 0.0
        if isinstance(output, Tensor):
            loss = float(output.detach())
            output.backward()
        else:
            torch.autograd.backward([output], [self._received(self.stage + 1, self.micro_batches[0])])
        if got is not None and got.grad is not None:
            self._send(got.grad, self.stage - 1)
        return loss

    def _send(self, x: Tensor, stage: int) -> None:
        """Start sending ``x``, once what was sent before has arrived."""
        if stage in self.sending:
            self.sending[stage][0].wait()
        work = distributed.isend(x, group=self.stages, group_dst=stage)
        if work:  # None is for processes outside the group
            self.sending[stage] = work, x

    def _received(self, stage: int, samples: Tensor) -> Tensor:
        """What ``stage`` sends: activations of a micro batch, or their gradient."""
        x = torch.empty(len(samples), samples.shape[1] - 1, self.hidden)
        distributed.recv(x, group=self.stages, group_src=stage)
        return x
