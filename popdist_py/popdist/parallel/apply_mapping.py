"""Division of a transformer by a ``poprun-size`` mapping: each instance keeps its part of the model."""

import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from popdist.data.shard_randomness import sharded_randomness
from popdist.errors import BatchError, ContractError, WeightsError, name_first
from popdist.ground.local_tensors import is_distributed, local_part
from popdist.job import context
from popdist.parallel.mesh import DIMENSIONS, device_mesh
from popdist.phases.recompute import recompute
from popsize.errors import MappingError
from popsize.mapping import Mapping, check_model, loaded
from popsize.model import Layer, Model, Split
from popsize.stages import stages_of

_WHOLE: Final = (Replicate(),)
_CUT: Final = (Shard(1),)
"""The placement of divided hidden states: the second dimension, which is the sequence, is divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The names of a transformer's modules by role, such as layers or head, by which popdist divides the model.

    Attributes:
        layers: The ``ModuleList`` of the layers. Each layer takes the hidden states first, and returns them.
        columns: In a layer, the ``Linear`` modules whose outputs are divided: queries, keys and values (three
            modules, not one), and the first modules of an MLP.
        rows: In a layer, the ``Linear`` modules whose inputs are divided: they read the outputs of ``columns``.
        norms: In a layer, the modules whose output only ``columns`` read.
        dropouts: In a layer, the modules whose random numbers are all for divided tensors.
        divided: In a layer, the attributes that count heads or widths and are divided, such as
            ``attention.heads``.
        divisors: The numbers that the size of a tensor group must divide, such as ``(("heads", 8),)``.
        embedding: The ``Embedding`` of the words, which reads the input of the model.
        positions: A module whose output is added to the output of the embedding.
        first: Other modules before the layers that make hidden states of hidden states, such as a dropout.
        last: Modules behind the layers that make hidden states of hidden states, such as the last norm.
        head: The ``Linear`` module that computes the logits.
    """

    layers: str
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()
    divisors: tuple[tuple[str, int], ...] = ()
    embedding: str | None = None
    positions: str | None = None
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    head: str | None = None

    @property
    def before(self) -> tuple[str, ...]:
        """The names of the modules that only the first pipeline stage has."""
        return tuple(name for name in (self.embedding, self.positions, *self.first) if name)

    @property
    def behind(self) -> tuple[str, ...]:
        """The names of the modules that only the last pipeline stage has."""
        return tuple(name for name in (*self.last, self.head) if name)


def parallelize(
    model: nn.Module,
    mapping: Mapping | str | os.PathLike[str] | None = None,
    *,
    roles: Roles | None = None,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Keep only the part of ``model`` that ``mapping`` gives to this instance, and return this part.

    In a tensor group each instance has a part of every layer, by torch's styles for tensor parallelism. In a
    pipeline an instance has the layers of its stage; the first stage also has the embedding, and the last stage
    the head. Names of parameters stay. All other modules are left out, and return their input, so that the model's
    own ``forward`` computes the stage. Layers are recomputed as the mapping says. With ``sharding=weights`` or
    ``gradients`` the part is passed to torch's ``fully_shard`` over the replicas, which then adds the gradients:
    train it without ``ReplicatedModel``.

    All instances must call this function with equal models, before an optimizer is made. The program itself must
    shard the optimizer's state (``sharding=optimizer``) and run the schedule of a pipeline.

    Args:
        model: The whole model, on this instance's device or on ``meta``. The model is changed in place.
        mapping: A mapping, or the file that ``poprun-size --save`` wrote; None for the mapping of the job, which
            is the file or the sizes of ``poprun --parallelism``.
        roles: The roles of the modules; None for a Llama of transformers (``LlamaForCausalLM``).
        mesh: A mesh with the dimensions of ``popdist.device_mesh()``; None for ``popdist.device_mesh()`` itself.

    Returns:
        The model; a ``ModuleList`` if an instance has several pieces of the pipeline (``interleave``).

    Raises:
        WeightsError: If a role names no module, the mapping does not divide the model, or weights are tied over
            stages or belong to no stage.
        ContractError: If the mapping cannot be read, is for another job, or has a setting that cannot be applied.
        BackendError, CollectiveError: For the same reasons as ``popdist.device_mesh()``.
    """
    roles = _roles_of_llama(model) if roles is None else roles
    mesh = device_mesh() if mesh is None else mesh
    found = _mapping(mapping, mesh)
    _check_roles(model, roles)
    if found.sequence_parallel and not roles.norms:
        raise WeightsError("sequence_parallel=yes divides norms, too, and roles name none: norms=(...)")
    stages = _dealt_layers(model, roles, found)
    if len(stages) > 1:
        _check_places(model, roles, stages)
    own_stages = range(mesh.get_local_rank("pipeline"), len(stages), found.pipeline)
    pieces = nn.ModuleList([model] if len(own_stages) == 1 else [_copy(model) for _ in own_stages])
    for piece, stage in zip(pieces, own_stages, strict=True):
        layers = _keep_stage(piece, roles, stages, stage)
        if found.tensor > 1:
            _divide(piece, roles, layers, mesh["tensor"], found)
        if found.recompute != "none":
            recompute(piece, layers, what=found.recompute)
        if found.sharding in ("gradients", "weights"):
            for part in (*layers, piece):
                fully_shard(part, mesh=mesh["replica"], reshard_after_forward=found.sharding == "weights")
    return model if len(own_stages) == 1 else pieces


def _mapping(given: Mapping | str | os.PathLike[str] | None, mesh: DeviceMesh) -> Mapping:
    """Return the mapping, which says how instances divide a model; raise ContractError if it does not fit."""
    names = mesh.mesh_dim_names or ()
    if not set(DIMENSIONS) <= set(names):
        raise ContractError(f"mesh has the dimensions {names}: parallelize() needs {', '.join(DIMENSIONS)}")
    sizes = {name: mesh[name].size() for name in DIMENSIONS}
    tensor, pipeline, replicas = sizes["tensor"], sizes["pipeline"], sizes["replica"]
    path = context.environment().contract.mapping_path if given is None else given
    found = Mapping(tensor=tensor, pipeline=pipeline, replicas=replicas)
    if isinstance(path, Mapping):
        found = path
    elif path is not None:
        found = _read(path)
    if (found.tensor, found.pipeline) != (tensor, pipeline):
        raise ContractError(
            f"the mapping has tensor={found.tensor},pipeline={found.pipeline}, and the job tensor={tensor},"
            f"pipeline={pipeline}: start it with poprun --parallelism tensor={found.tensor},"
            f"pipeline={found.pipeline}, or with the mapping's file"
        )
    refused = [name for name in ("offload_activations", "offload_optimizer") if getattr(found, name)]
    refused += [f"phases={found.phases}"] * (found.phases > 1)
    if found.sharding in ("gradients", "weights") and found.gradient_shards != replicas:
        refused.append(f"sharding={found.sharding} over {found.gradient_shards} of {replicas} replicas")
    if refused:
        raise ContractError(
            f"parallelize() cannot apply {' and '.join(refused)} of the mapping: search one without (poprun-size "
            "--fix offload_activations=no,offload_optimizer=no,phases=1), with shards over all replicas; phases "
            "of whole layers are those of popdist.parallel.phased(model, phases=...)"
        )
    return found


def _read(path: str | os.PathLike[str]) -> Mapping:
    """Read the mapping (how instances divide a model) in the file ``path``; raise ContractError if that fails."""
    try:
        return loaded(Path(path).read_text(encoding="utf-8"), os.fspath(path)).mapping
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"cannot read the mapping {os.fspath(path)}: {error}") from None
    except MappingError as error:
        raise ContractError(str(error)) from None


def _roles_of_llama(model: nn.Module) -> Roles:
    """Return the roles (layers, head ...) of a ``LlamaForCausalLM``; raise WeightsError for other models."""
    config: Any = getattr(model, "config", None)
    if type(model).__name__ != "LlamaForCausalLM" or config is None:
        raise WeightsError(
            f"parallelize() does not know what the modules of {type(model).__name__} are for: give "
            "roles=popdist.parallel.Roles(layers=..., columns=..., rows=...)"
        )
    attention = tuple(f"self_attn.{name}_proj" for name in "qkv")
    return Roles(
        layers="model.layers",
        columns=(*attention, "mlp.gate_proj", "mlp.up_proj"),
        rows=("self_attn.o_proj", "mlp.down_proj"),
        norms=("input_layernorm", "post_attention_layernorm"),
        dropouts=("self_attn",) if config.attention_dropout else (),
        divisors=(
            ("num_attention_heads", config.num_attention_heads),
            ("num_key_value_heads", config.num_key_value_heads),
        ),
        embedding="model.embed_tokens",
        last=("model.norm",),
        head="lm_head",
    )


def _check_roles(model: nn.Module, roles: Roles) -> None:
    """Check that all modules named in ``roles`` exist, and have classes that torch can divide."""
    layers = _module(model, roles.layers, nn.ModuleList)
    for name in (*roles.before, *roles.behind):
        _module(model, name, {roles.embedding: nn.Embedding, roles.head: nn.Linear}.get(name, nn.Module))
    for number, layer in enumerate(layers):
        for name in (*roles.columns, *roles.rows):
            _module(layer, name, nn.Linear, f"{roles.layers}.{number}")
        for name in (*roles.norms, *roles.dropouts):
            _module(layer, name, nn.Module, f"{roles.layers}.{number}")
        for name in roles.divided:
            _count(layer, name, f"{roles.layers}.{number}")
    if any(map(is_distributed, model.parameters())):
        raise WeightsError(f"{type(model).__name__} has DTensors: parallelize() divides a whole model, once")


def _module(model: nn.Module, name: str, kind: type[nn.Module], place: str = "") -> Any:
    """Return the module ``name`` of ``model``. Raise WeightsError if there is no such module of class ``kind``."""
    modules = dict(model.named_modules())
    title = f"{place}.{name}" if place else name
    if name not in modules:
        near = get_close_matches(name, modules, 3, 0.4) or [it for it in modules if it]
        raise WeightsError(f"roles name {title}, and there is no such module: it has {name_first(near) or 'none'}")
    if not isinstance(modules[name], kind):
        raise WeightsError(f"roles name {title}, a {type(modules[name]).__name__}: it must be a {kind.__name__}")
    return modules[name]


def _count(layer: nn.Module, name: str, place: str) -> tuple[nn.Module, str, int]:
    """Find the integer ``name``, such as ``attention.heads``, in a layer; return its owner, key and value."""
    path, _, key = name.rpartition(".")
    owner = _module(layer, path, nn.Module, place)
    value = getattr(owner, key, None)
    if not isinstance(value, int) or isinstance(value, bool):
        raise WeightsError(f"roles divide {place}.{name}, which is {value!r}: it must be a whole number")
    return owner, key, value


def _dealt_layers(model: nn.Module, roles: Roles, mapping: Mapping) -> list[range]:
    """Return each pipeline stage's range of layers. Raise WeightsError if ``mapping`` cannot divide the layers."""
    layers = _module(model, roles.layers, nn.ModuleList)
    widths = dict.fromkeys(
        [
            *((name, layer.get_submodule(name).out_features) for layer in layers for name in roles.columns),
            *((name, layer.get_submodule(name).in_features) for layer in layers for name in roles.rows),
            *((name, _count(layer, name, roles.layers)[2]) for layer in layers for name in roles.divided),
        ]
    )
    as_planned = Model(
        name=type(model).__name__,
        sequence=mapping.tensor,  # the length of the samples is not known yet
        layers=(Layer(name="layer", count=len(layers), parameters=Split()),),
        divisors=(*roles.divisors, *widths),
    )
    try:
        check_model(mapping, as_planned)
    except MappingError as error:
        raise WeightsError(str(error)) from None
    counts = [stage.layers[0][1] for stage in stages_of(as_planned, mapping.pipeline * mapping.interleave)]
    return [range(sum(counts[:index]), sum(counts[: index + 1])) for index in range(len(counts))]


def _check_places(model: nn.Module, roles: Roles, stages: Sequence[range]) -> None:
    """Raise WeightsError unless each parameter of ``model`` belongs to exactly one pipeline stage."""
    last = len(stages) - 1
    starts = {f"{name}.": 0 for name in roles.before} | {f"{name}.": last for name in roles.behind}
    starts |= {f"{roles.layers}.{layer}.": stage for stage, layers in enumerate(stages) for layer in layers}
    names: dict[Tensor, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = next((stage for start, stage in starts.items() if name.startswith(start)), None)
        if stage is None:
            raise WeightsError(f"{name} has no stage: roles name neither its module nor one around it")
        other, place = names.setdefault(parameter, (name, stage))
        if place != stage:
            raise WeightsError(
                f"{other} of stage {place} is also {name} of stage {stage}: weights tied over stages would get "
                "the gradient of one of them only. Give each weights of its own (tie_word_embeddings=False), or "
                "take pipeline=1"
            )


class _Absent(nn.Module):
    """A module without parameters that replaces a module of another pipeline stage."""

    def __init__(self, *, is_added: bool = False) -> None:
        super().__init__()
        self._is_added = is_added

    def forward(self, given: Any, *_args: Any, **_kwargs: Any) -> Any:
        """Return the hidden states ``given``, or 0 if the output of this module is added to hidden states."""
        return 0.0 if self._is_added else given


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with new modules that share the parameters and buffers of ``model``."""
    return deepcopy(model, {id(it): it for it in (*model.parameters(), *model.buffers())})


def _keep_stage(model: nn.Module, roles: Roles, stages: Sequence[range], stage: int) -> list[nn.Module]:
    """Replace the modules of other pipeline stages by empty modules, and return the layers of this stage."""
    absent = [
        f"{roles.layers}.{layer}" for index, layers in enumerate(stages) if index != stage for layer in layers
    ]
    absent += roles.before if stage else ()
    absent += roles.behind if stage < len(stages) - 1 else ()
    for name in absent:
        model.set_submodule(name, _Absent(is_added=name == roles.positions))
    if len(stages) > 1 and type(model).__name__ == "LlamaForCausalLM":
        model.config.use_cache = False  # type: ignore[union-attr] # a Llama has a config
        model.register_forward_hook(_logits_of)
    return [model.get_submodule(f"{roles.layers}.{layer}") for layer in stages[stage]]


def _logits_of(_model: nn.Module, _args: object, output: Any) -> Tensor:
    """Return the logits from the output object of a model of the library transformers."""
    logits: Tensor = output.logits
    return logits


def _divide(
    model: nn.Module, roles: Roles, layers: Sequence[nn.Module], mesh: DeviceMesh, mapping: Mapping
) -> None:
    """Divide the layers, and the stage's embedding and head if any, over the instances of a tensor group."""
    tied = _tied_names(model)
    is_sequence_divided = mapping.sequence_parallel
    output = Shard(1) if is_sequence_divided else Replicate()
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in roles.columns}
    plan |= {name: RowwiseParallel(output_layouts=output) for name in roles.rows}
    plan |= {name: SequenceParallel() for name in roles.norms if is_sequence_divided}
    drawing_names = ("",) if is_sequence_divided else roles.dropouts  # "" means the whole layer
    for layer in layers:
        parallelize_module(layer, mesh, plan)
        for name in roles.norms:
            layer.get_submodule(name).register_forward_hook(partial(_give_whole, mesh))
        for name in drawing_names:
            drawing = layer.get_submodule(name)
            drawing.forward = _OwnNumbers(drawing)
        for name in roles.divided:
            owner, key, value = _count(layer, name, roles.layers)
            setattr(owner, key, value // mapping.tensor)
    outer = {
        roles.embedding: RowwiseParallel(input_layouts=Replicate()),
        roles.head: ColwiseParallel(output_layouts=Replicate()),
    }
    for outer_name, style in outer.items():
        if outer_name is not None and not isinstance(model.get_submodule(outer_name), _Absent):
            parallelize_module(model.get_submodule(outer_name), mesh, style)
    for names in tied:
        source = next((name for name in names if is_distributed(model.get_parameter(name))), names[0])
        for name in names:
            owner_name, _, key = name.rpartition(".")
            model.get_submodule(owner_name).register_parameter(key, model.get_parameter(source))
    if is_sequence_divided:
        layers[0].register_forward_pre_hook(partial(_cut_input, mesh))
        layers[-1].register_forward_hook(partial(_join_output, mesh))
    _make_alike(model, mesh)


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter of ``model`` that has several names, as one list per parameter."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [found for found in names.values() if len(found) > 1]


def _give_whole(mesh: DeviceMesh, _norm: nn.Module, _args: object, output: Tensor) -> Tensor:
    """Return the output of a norm as an undivided DTensor, so that the norm's gradient is added only once."""
    whole: Tensor = (
        output.redistribute(placements=_WHOLE)
        if isinstance(output, DTensor)
        else DTensor.from_local(output, mesh, _WHOLE, run_check=False)
    )
    return whole


def _cut_input(mesh: DeviceMesh, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of the first layer with only this instance's part of the sequence."""
    if args[0].shape[1] % mesh.size():
        raise BatchError(
            f"sequence_parallel=yes divides the sequence over tensor={mesh.size()}, and {type(layer).__name__} "
            f"got hidden states of shape {tuple(args[0].shape)}: pad the samples, or take sequence_parallel=no"
        )
    whole = DTensor.from_local(args[0], mesh, _WHOLE, run_check=False)
    return whole.redistribute(placements=_CUT).to_local(), *args[1:]


def _join_output(mesh: DeviceMesh, _layer: nn.Module, _args: object, output: Tensor) -> Tensor:
    """Return the output of the last layer with all parts of the sequence joined."""
    return DTensor.from_local(output, mesh, _CUT, run_check=False).redistribute(placements=_WHOLE).to_local()


def _make_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Copy each undivided parameter from the first instance of the tensor group to all other instances."""
    for parameter in model.parameters():
        is_whole = not isinstance(parameter, DTensor) or parameter.placements == _WHOLE
        if is_whole and not parameter.is_meta:
            dist.broadcast(local_part(parameter.detach()), group=mesh.get_group(), group_src=0)


class _OwnNumbers:
    """A substitute for a module's ``forward``, whose random numbers in training differ between instances."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass, in training with random numbers of this instance only."""
        if not self._module.training:
            return self._forward(*args, **kwargs)
        with sharded_randomness():
            return self._forward(*args, **kwargs)
