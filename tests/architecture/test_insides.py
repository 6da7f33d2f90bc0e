"""Where the packages use private parts of torch, of Python and of other libraries, and why."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from sysconfig import get_path
from typing import Final, NamedTuple

from tests.architecture.source_tree import Module, graph, modules, names_read, words

TORCH_PRIVATE = words("popdist.ground.torch_private popdist.ground.torch_private_groups")
"""The modules of all private names of torch, except those in ``INSIDES``."""

MOST_PRIVATE_NAMES = 33


class Use(NamedTuple):
    """Private parts of others, the modules or folders that use these parts, and the reason."""

    parts: str
    places: str
    reason: str


INSIDES: Final = (
    Use(
        "_foreach_",
        "popdist.gradients popdist.optim.trust_ratio poptorch.optim.group_stepper",
        "operators on lists of tensors, of torch.optim's documented argument `foreach`: one call for all tensors",
    ),
    Use(
        "_get_backend _register_backend _set_default_backend _set_sequence_number_for_group _allgather_base_"
        " _reduce_scatter_base_",
        "popdist.exchange.process_group.torch_process_group",
        "methods and operators that torch calls by these names for every backend that a library brings",
    ),
    Use(
        "ctypes.pythonapi",
        "popdist.exchange.host_memory.forks popdist.startup.recorder_server",
        "an object that must never be deleted: in a forked child, its end would end the parent's connections",
    ),
    Use(
        "forward=",
        "popdist.phases popdist.step.training.batch_norm popdist.parallel.apply_mapping",
        "the method of one layer, as torch.nn allows for every module; a hook cannot replace a call",
    ),
    Use(
        "forward_one_chunk=",
        "popdist.step.training.pipeline",
        "a method of one stage of a pipeline; a stage has no hooks around a micro batch",
    ),
    Use(
        "GradScaler.*=",
        "popdist.step.training.step",
        "public methods, in which all instances must agree on the scale; a GradScaler has no hooks",
    ),
    Use("torch.backends.cudnn.benchmark=", "popdist.ground.accelerators.accelerator", "a documented setting"),
    Use("sys.excepthook=", "popdist.launching.__main__", "a documented hook"),
    Use(
        "_collective_ops_server_def _context _default_pg_init_method _server_def _src",
        "popdist.startup.lone_training popdist.startup.sitecustomize",
        "only these names show after the end of a program whether a library has connected processes",
    ),
    Use(
        "/torch/*.py",
        "popdist.startup.phase_sampler",
        "files of functions in a stack, which tell phases of a step apart; a phase of a moved file is OUTSIDE",
    ),
    Use(
        "_current_frames",
        "popdist.startup.phase_sampler popdist.startup.recording",
        "documented by Python for such diagnoses: the stack of another thread",
    ),
    Use(
        "gc.callbacks gc.get_threshold gc.set_threshold",
        "popdist.startup.phase_sampler",
        "documented: the time of collections, and a pause of collections in which Python 3.11 would crash",
    ),
    Use(
        "/handler/ __wrapped__",
        "popdist.startup.recorder_server",
        "torch's worker server has no public start without faulthandler, and no public client",
    ),
    Use("kind.*=", "popdist.startup.recording", "public methods of torch's profilers, which have no hooks"),
    Use(
        "_clear_internal_caches _clear_type_cache _getframe gc.get_referents sys.exit=",
        "popdist.startup.sitecustomize",
        "the exit code of a program whose interpreter fails later; Python has no hook for the code",
    ),
    Use(
        "_frozen_importlib_external",
        "popdist.startup.sitecustomize",
        "the loader, without the time that importing importlib takes at each start of Python",
    ),
    Use(
        "_dataloaders _schedulers __class__=",
        "popdist.accelerate",
        "accelerate gives no other way into its lists of saved objects; a Trainer makes its own accelerator",
    ),
    Use(
        "_total_train_tokens",
        "popdist.transformers",
        "a count of TRL's Trainers, about which no program is warned",
    ),
    Use("_metrics", "popdist.transformers", "the only place of the metrics that TRL's Trainers average and log"),
    Use("self.lightning_module.*=", "popdist.lightning", "hooks of the user's module; none comes after them"),
    Use("_layer_sync", "popdist.lightning", "Lightning says nowhere else that sync_batchnorm=True"),
    Use("__class__=", "poptorch.blocks.annotations", "PopTorch's way to annotate a layer of a model"),
    Use("nn.Parameter.replicaGrouping=", "poptorch.executor.module_tensors", "PopTorch's method of parameters"),
    Use(
        "_dynamo",
        "poptorch.executor.traced_forward",
        "asks whether torch's compiler is imported, without importing it",
    ),
    Use("obj.*=", "poptorch.profiling", "methods of an object that a program names, as in PopTorch"),
)
"""All uses of private parts outside ``TORCH_PRIVATE``. A part is a private name, or:

``name=`` (the name is replaced), ``gc.name``, ``ctypes.pythonapi``, ``__wrapped__``, a path in torch's worker
server, and the path of a file of torch.
"""

PRIVATE = re.compile(r"_(?!_)\w*[a-z]\w*|__\w+(?<!__)")

PUBLIC_ALL_THE_SAME = words("_make _replace _fields _exit")
"""Private by their form only: Python documents them."""

OURS_ALL_THE_SAME = words("_extension _popdist_absent _write _accessor _defaults _values")
"""Names of popdist's and poptorch's own, read where their giver is not imported, and parts of texts."""

TORCH = Path(get_path("platlib"), "torch")

EXTENDED = {
    **dict.fromkeys(words("DataLoader ReplicaLoader"), "utils/data/dataloader.py"),
    **dict.fromkeys(words("Module BlockModule"), "nn/modules/module.py"),
    **dict.fromkeys(words("Optimizer PieceOptimizer"), "optim/optimizer.py"),
}
"""The classes of torch that ours extend, directly or not, and the files of torch that define them."""

_OWN_ATTRIBUTE = re.compile(r"\bself\.(_[a-z]\w*)")
_FILE_OF_TORCH = re.compile(r"/torch/.+\.py|/torch/.+/")


def test_every_use_of_insides_has_a_reason() -> None:
    """Private parts are used in the two modules of torch's private names, or as ``INSIDES`` says."""
    found = {
        (module.name, part)
        for module in modules("popdist", "poptorch")
        if module.name not in TORCH_PRIVATE
        for part in _parts(module)
    }
    used = {(place, part) for use in INSIDES for place in use.places.split() for part in use.parts.split()}
    lacking = {(name, part) for name, part in found if not any((it, part) in used for it in _around(name))}
    needless = {
        it
        for use in INSIDES
        for it in (*use.places.split(), *use.parts.split())
        if not any(it in (part, *_around(name)) for name, part in found)
    }

    assert lacking == set()
    assert needless == set()
    assert {it for module in modules("popdist", "poptorch") for it in _inherited_names(module)} == set()


def test_few_parts_of_torch_are_private() -> None:
    """At most 33 names, so that a new version of torch can be looked through in an hour."""
    both = [module for module in modules("popdist") if module.name in TORCH_PRIVATE]
    inside = {it for module in both for it in names_read(module) if PRIVATE.fullmatch(it)}
    inside -= words("_C _dynamo _distributed_c10d _utils") | PUBLIC_ALL_THE_SAME

    assert MOST_PRIVATE_NAMES // 2 < len(inside | {"set_code_exec_strategy"}) <= MOST_PRIVATE_NAMES


def _around(name: str) -> Iterator[str]:
    """Yield the module ``name`` and each folder around the module."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _parts(module: Module) -> set[str]:
    """Return the private parts of others that ``module`` uses, as text."""
    near = _imported_by(module.name) | {module.name}
    ours = {name for it in modules() if it.name in near for name in _names_by_module()[it.name]}
    names = {part for name in names_read(module) if re.fullmatch(r"[\w.]+", name) for part in name.split(".")}
    private = {it for it in names if PRIVATE.fullmatch(it)} - ours - PUBLIC_ALL_THE_SAME - OURS_ALL_THE_SAME
    return {"_foreach_" if it.startswith("_foreach_") else it for it in private}.union(
        *map(_reach, module.nodes)
    ) | {f"{text}=" for text in _replaced(module)}


@cache
def _imported_by(name: str) -> frozenset[str]:
    """Return our modules that the module ``name`` imports, directly or not."""
    found, waiting = set[str](), {*graph()[name]}
    while waiting:
        found.add(current := waiting.pop())
        waiting |= graph()[current] - found
    return frozenset(found)


def _reach(node: ast.AST) -> set[str]:
    """Return the part of Python or of a library that ``node`` uses in another way than by a private name."""
    match node:
        case ast.Attribute(attr="__wrapped__" as name):
            return {name}
        case ast.Constant(value=str(text)) if text.startswith("/handler/"):
            return {"/handler/"}
        case ast.Constant(value=str(text)) if _FILE_OF_TORCH.match(text):
            return {"/torch/*.py"}
        case ast.Attribute(value=ast.Name(id="gc"), attr=name):
            return {f"gc.{name}"}
        case ast.Attribute(value=ast.Name(id="ctypes"), attr="pythonapi"):
            return {"ctypes.pythonapi"}
    return set()


def _replaced(module: Module) -> Iterator[str]:
    """Yield the attributes of others' modules, classes and functions that ``module`` replaces."""
    foreign = set(_foreign_names(module))
    for node in module.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="self")):
                continue
            case ast.Attribute(ctx=ast.Store(), attr="forward" | "forward_one_chunk" | "__code__" as attribute):
                yield attribute
            case ast.Attribute(ctx=ast.Store()) if ast.unparse(node).partition(".")[0] in foreign and re.fullmatch(
                r"[\w.]+", ast.unparse(node)
            ):
                yield ast.unparse(node)
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, _, value]) if "getattr" in ast.unparse(value):
                yield f"{ast.unparse(owner)}.*"
            case ast.Call(func=ast.Attribute(attr="__setattr__"), args=[_, ast.Constant(value="__class__"), _]):
                yield "__class__"


def _foreign_names(module: Module) -> Iterator[str]:
    """Yield the names under which ``module`` imports others' modules and classes."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("pop",)):
            yield from (alias.asname or alias.name for alias in node.names)


@cache
def _names_by_module() -> dict[str, frozenset[str]]:
    return {module.name: frozenset(_given_names(module)) for module in modules()}


def _given_names(module: Module) -> Iterator[str]:
    """Its own name, those of its functions, classes and variables, and of the attributes that it gives objects."""
    yield module.name.rpartition(".")[2]
    for node in module.nodes:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.Subscript(value=ast.Attribute(attr="__dict__"), slice=ast.Constant(value=str(name)))
            ):
                yield name


def _inherited_names(module: Module) -> Iterator[str]:
    """The private attributes of torch's classes that classes of the module, which extend them, read or replace."""
    for node in module.classes:
        bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
        for file in {EXTENDED[base] for base in bases & EXTENDED.keys()}:
            theirs = _OWN_ATTRIBUTE.findall((TORCH / file).read_text(encoding="utf-8"))
            ours = _OWN_ATTRIBUTE.findall(ast.unparse(node))
            yield from (f"{module.name}.{node.name}: {name}" for name in {*theirs} & {*ours})
