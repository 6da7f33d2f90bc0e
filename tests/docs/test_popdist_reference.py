"""The library's reference tells the truth: every public name stands there, and its blocks run as one program."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import popdist
from popdist import checkpoint, optim, parallel
from popdist.data.batch import Batch, MicroBatch
from popdist.data.replica_loader import ReplicaLoader
from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT, blocks

REFERENCE = ROOT / "docs" / "popdist.md"

OBJECTS: dict[str, type] = {
    "model": popdist.ReplicatedModel,
    "optimizer": popdist.ShardedOptimizer,
    "loader": ReplicaLoader,
    "sampler": popdist.ReplicaSampler,
    "batch": Batch,
    "micro": MicroBatch,
    "last": checkpoint.Loaded,
}
"""What the page calls an object of each class that a program gets from popdist."""

NOT_FOR_PROGRAMS = {"batch.of"}


def public_names() -> set[str]:
    """All that a program may use, as the page writes it."""
    names = set(vars(popdist)["__all__"])
    names |= {f"checkpoint.{name}" for name in checkpoint.__all__}
    names |= {f"optim.{name}" for name in optim.__all__}
    names |= {f"parallel.{name}" for name in parallel.__all__}
    for word, kind in OBJECTS.items():
        ours = [base for base in kind.__mro__ if base.__module__.startswith("popdist.")]
        members = {name for base in ours for name in (*vars(base), *inspect.get_annotations(base))}
        names |= {f"{word}.{name}" for name in members if not name.startswith("_")}
    return names - NOT_FOR_PROGRAMS


def missing(page: str) -> set[str]:
    """The public names that no code of the page's text begins with; those of popdist with or without its name."""
    codes = re.findall(r"`(?:popdist\.)?([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    said = {match[0] for code in codes if (match := re.match(r"[\w.]+", code))}
    return {name for name in public_names() if name.removeprefix("popdist.") not in said}


def test_every_public_name_is_there() -> None:
    """Functions, classes, errors, and what the objects have that a program gets."""
    assert missing(REFERENCE.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("name", ["checksum", "getDeviceId", "LaunchError", "model.no_sync", "last.values"])
def test_a_name_that_is_not_there_is_missed(name: str) -> None:
    """The test above sees functions, PopDist's names, errors, methods and attributes."""
    page = REFERENCE.read_text(encoding="utf-8")

    assert name in public_names()
    assert missing(re.sub(rf"`(popdist\.)?{re.escape(name)}\b", "`other", page)) == {name}


def signatures() -> Iterator[Any]:
    """Each call in the first column of a table: the function, and the arguments as the page writes them."""
    places = {**OBJECTS, "": popdist, "checkpoint": checkpoint, "optim": optim}
    for line in REFERENCE.read_text(encoding="utf-8").splitlines():
        for path, arguments in re.findall(r"`([A-Za-z_.]+)\(([^`]+)\)`", line.split(" | ")[0]):
            owner, _, name = path.removeprefix("popdist.").rpartition(".")
            if line.startswith("|") and owner in places:
                yield pytest.param(getattr(places[owner], name), arguments, id=path)


@pytest.mark.parametrize(("function", "arguments"), list(signatures()))
def test_a_call_is_written_as_it_is(function: Callable[..., object], arguments: str) -> None:
    """With the names of its arguments, in their order."""
    (written,) = ast.parse(f"def f({arguments}): ...").body
    assert isinstance(written, ast.FunctionDef)
    lists = (written.args.posonlyargs, written.args.args, [written.args.vararg], written.args.kwonlyargs)
    names = [argument.arg for row in (*lists, [written.args.kwarg]) for argument in row if argument is not None]

    assert names == [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """All blocks as one script."""
    texts = [block.text for block in blocks(REFERENCE) if block.language == "python"]
    path = tmp_path / "reference.py"
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_no_block_escapes_the_test() -> None:
    """Each block is Python."""
    assert {block.language for block in blocks(REFERENCE)} == {"python"}


def test_the_blocks_run_alone(program: Path, forked_world: ForkedWorlds) -> None:
    """Without a launcher they train one replica."""
    forked_world.script(program)


def test_the_blocks_run_as_a_job(program: Path, forked_world: ForkedWorlds) -> None:
    """And in a job two instances with two replicas each."""
    forked_world.script(program, num_instances=2, num_replicas=4)
