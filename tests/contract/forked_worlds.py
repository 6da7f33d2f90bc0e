"""Worlds whose instances are forked from one process, which has imported torch once for all of them.

The process behind `tests.contract.forking`: it reads calls from its standard input and answers on its standard
output. An instance is what `run_world` makes, but for two things: the hashes of all instances have one seed, and
nobody but this process watches over them. So a law that runs here at some sizes runs in a world of `run_world` at
another.
"""

import math
import os
import pickle
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from popdist.contract import Contract, Endpoint
from poprun.linux import become_subreaper
from tests import leftovers
from tests.contract.forking import Answer, Call


def main() -> None:
    """Answer calls until there are no more."""
    become_subreaper()
    torch.optim.SGD([torch.zeros(1)])  # has torch import the rest of itself once, and not in each instance
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    with suppress(EOFError):
        while True:
            pickle.dump(_answer(pickle.load(calls)), answers)  # noqa: S301 - from the tests
            answers.flush()


def _answer(call: Call) -> Answer:
    folder = Path(tempfile.mkdtemp(prefix="popdist-forked-"))  # no context: instances leave this frame, too
    master, store = _hold_port(), socket.create_server(("127.0.0.1", 0), backlog=call.num_instances)
    children = {_fork(call, index, folder, master, store): index for index in range(call.num_instances)}
    master.close()
    store.close()
    problem = _end_of(children, folder, time.monotonic() + call.timeout_seconds) or _what_is_left()
    if problem:
        answer = Answer(values=[], problem=problem + (folder / "output").read_text(errors="replace"))
    else:
        values = [pickle.loads(_outcome(folder, index).read_bytes()) for index in range(call.num_instances)]  # noqa: S301 - of ours
        answer = Answer(values=values)
    shutil.rmtree(folder)
    return answer


def _hold_port() -> socket.socket:
    """A port that nobody else gets, and on which a store of torch's can still listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _fork(call: Call, index: int, folder: Path, master: socket.socket, store: socket.socket) -> int:
    """The process id of an instance. The instance itself does not return, and ends as every program does."""
    if child := os.fork():
        return child
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    contract = Contract(
        num_instances=call.num_instances,
        instance_index=index,
        num_local_instances=call.num_instances,
        local_instance_index=index,
        num_replicas=call.num_replicas,
        num_threads=1,
        job_id=folder.name,
        master=Endpoint(host="127.0.0.1", port=master.getsockname()[1]),
        store=Endpoint(host="127.0.0.1", port=store.getsockname()[1]),
        store_descriptor=os.dup(store.fileno()) if index == 0 else None,
    )
    store.close()
    os.environ.update(contract.to_env())
    random.seed()
    np.random.seed()  # noqa: NPY002 - what programs draw from
    value = pickle.dumps(call.fn(*call.arguments))
    _outcome(folder, index).write_bytes(value)
    sys.exit()


def _outcome(folder: Path, index: int) -> Path:
    return folder / f"outcome-{index}"


def _end_of(children: dict[int, int], folder: Path, deadline: float) -> str:
    """Wait until all children have ended, or kill them; what went wrong with the first of them, in words."""
    running = {os.pidfd_open(child): child for child in children}
    problem = ""
    while running:
        ended, _, _ = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))
        if not ended and not problem:
            problem = f"instances {sorted(children[child] for child in running.values())}: the time was up\n"
        for descriptor in ended:
            child = running.pop(descriptor)
            os.close(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if not problem and not _outcome(folder, children[child]).exists():
                problem = f"instance {children[child]} brought no result and ended with code {code}\n"
        if problem:
            for descriptor in running:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            deadline = math.inf
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
