"""Worlds whose instances are forked from one process, which has imported torch once for all of them.

The process behind `tests.contract.forked_calls`: it reads calls from its standard input and answers on its
standard output. An instance is as in `popdist.launch`, but for three things: the hashes of all instances have one
seed, nobody but this process watches over them, and an error of which another instance has the cause does not wait
for that one to report first. So a law that runs here at some sizes runs in a job of `popdist.launch` at another.
"""

import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from popdist.exchange import groups
from popdist.ground.contract import Contract, Endpoint
from poprun.launch.process.spawn import become_subreaper
from tests import leftovers
from tests.contract.forked_calls import Answer, Call

_FORK = multiprocessing.get_context("fork")


def main() -> None:
    """Answer calls until there are no more."""
    become_subreaper()
    groups.FIRST_ERROR_SECONDS = 0.0  # type: ignore[misc] # nobody reports
    torch.optim.SGD([torch.zeros(1)])  # has torch import the rest of itself once, and not in each instance
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    with suppress(EOFError):
        while True:
            call: Call = pickle.load(calls)  # noqa: S301 - from the tests
            _prepare(call.fn.__module__)
            pickle.dump(_answer(call), answers)
            answers.flush()
    os._exit(0)  # Python would take torch apart, object by object


def _prepare(name: str) -> None:
    """Import what the module of a call says that all its calls need, by a function ``prepare``."""
    module: Any = sys.modules[name]
    if hasattr(module, "prepare"):
        module.prepare()
    gc.freeze()  # a collection of an instance's garbage would write to every page that it shares with us


def _answer(call: Call) -> Answer:
    with tempfile.TemporaryDirectory(prefix="popdist-forked-") as name, _hold_port() as master:
        folder = Path(name)
        with socket.create_server(("127.0.0.1", 0), backlog=call.num_instances) as store:
            instances = [
                _FORK.Process(target=_be, args=(call, contract, folder, store))
                for contract in _contracts(call, master.getsockname()[1], store.getsockname()[1])
            ]
            for instance in instances:
                instance.start()
        problem = _end_of(instances, call.victim, time.monotonic() + call.timeout_seconds) + _what_is_left()
        outcomes = {index: _outcome(folder, index) for index in range(call.num_instances) if index != call.victim}
        if problem or not all(outcome.exists() for outcome in outcomes.values()):
            return Answer(values=[], problem=problem + (folder / "output").read_text(errors="replace"))
        values = {index: pickle.loads(outcome.read_bytes()) for index, outcome in outcomes.items()}  # noqa: S301 - of ours
        return Answer(values=[values.get(index) for index in range(call.num_instances)])


def _hold_port() -> socket.socket:
    """A port that nobody else gets, and on which a store of torch's can still listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _contracts(call: Call, master_port: int, store_port: int) -> list[Contract]:
    """What each instance is told; on several hosts there is no store of popdist's own, as without poprun."""
    num_local = call.num_instances // call.num_hosts
    store = Endpoint(host="127.0.0.1", port=store_port) if call.num_hosts == 1 else None
    return [
        Contract(
            num_instances=call.num_instances,
            instance_index=index,
            num_local_instances=num_local,
            local_instance_index=index % num_local,
            host_index=index // num_local,
            num_replicas=call.num_replicas,
            parallelism=call.parallelism,
            num_threads=1,
            job_id="forked",
            master=Endpoint(host="127.0.0.1", port=master_port),
            store=store,
        )
        for index in range(call.num_instances)
    ]


def _be(call: Call, contract: Contract, folder: Path, store: socket.socket) -> None:
    """Be an instance: this runs in a process of its own."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    if contract.store is not None and contract.instance_index == 0:
        contract = replace(contract, store_descriptor=os.dup(store.fileno()))
    store.close()
    told = contract.to_env() if call.environments is None else call.environments[contract.instance_index]
    os.environ.update(told)
    random.seed()
    np.random.seed()
    value = pickle.dumps(call.fn(*call.arguments))
    _outcome(folder, contract.instance_index).write_bytes(value)


def _outcome(folder: Path, index: int) -> Path:
    return folder / f"outcome-{index}"


def _end_of(instances: list[ForkProcess], victim: int | None, deadline: float) -> str:
    """Wait until all have ended, and kill the others when one fails or the time is up; what happened, in words."""
    running = dict(enumerate(instances))
    problem = ""
    while running:
        ended = wait([it.sentinel for it in running.values()], None if problem else deadline - time.monotonic())
        if not ended:
            problem = f"the time was up for instances {sorted(running)}\n"
        for index in [index for index, instance in running.items() if instance.sentinel in ended]:
            instance = running.pop(index)
            instance.join()
            if instance.exitcode != (-signal.SIGKILL if index == victim else 0) and not problem:
                problem = f"instance {index} ended with code {instance.exitcode}\n"
        if problem:
            for instance in running.values():
                instance.kill()
    return problem


def _what_is_left() -> str:
    """Kill what the instances have left behind, which has become ours; in words."""
    left = leftovers.wait_until_none(leftovers.living_children)
    told = [f"left behind: {leftovers.describe(process)}\n" for process in left]
    leftovers.kill(left)
    with suppress(ChildProcessError):
        while os.waitpid(-1, 0 if left else os.WNOHANG)[0]:
            pass
    return "".join(told)


if __name__ == "__main__":
    main()
