"""How programs end whose gradients go early, and what the others are told when an instance is killed."""

import gc
import itertools
import json
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import popdist
from popdist.exchange.transport.channel import Channel
from popdist.gradients.overlap import Overlap, OverlappedSum
from popdist.ground.contract import Contract, Endpoint
from popdist.job import context
from tests.contract import overlap_laws, training_laws
from tests.contract.laws import TIMEOUT_SECONDS

VICTIM = 1

_LOST = "the connection to instance 1 was closed: it ended or was lost"

WAYS = {"as all agree to send": _LOST, "in its backward pass": _LOST, "with gradients on their way": _LOST}
"""When it dies, and what the others hear."""


@overlap_laws.tiny_sizes()
def lose(way: str) -> str:
    """Train some steps, in the last of which the victim dies; the end of the error."""
    model = _begin()
    model.zero_grad()
    if popdist.instance_index() == VICTIM:
        _prepare_to_die(model, way)
    try:
        for x, _ in model.micro_batches(overlap_laws.full_batch()):
            loss = model(x).square().mean()
            overlap_laws.meet()
            loss.backward()
    except popdist.BackendError as error:
        message = str(error)
    assert all(it.grad is None for it in model.parameters())
    _wait_for_survivors()
    popdist.finalize()
    assert threading.active_count() == 1
    return message.rpartition("): ")[2]


def _wait_for_survivors() -> None:
    """Who leaves is lost to the others, too."""
    store = context._state.store
    assert store is not None
    store.set(f"told {popdist.instance_index()}", "")
    others = [f"told {instance}" for instance in range(popdist.num_instances()) if instance != VICTIM]
    store.wait(others, timedelta(seconds=TIMEOUT_SECONDS))


def _begin() -> popdist.ReplicatedModel:
    """A model whose next step goes early."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    torch.manual_seed(0)
    model = popdist.ReplicatedModel(overlap_laws.chain(4))
    for _ in range(overlap_laws.NUM_STEPS):
        training_laws.train(model, overlap_laws.full_batch())
    return model


@overlap_laws.tiny_sizes()
def interrupt(method: str) -> None:
    """Instance 1 is interrupted as it sends a piece, or says where to put one: all hear of it, and go on."""
    model = _begin()
    before = overlap_laws.gradients(model)
    if popdist.instance_index() == VICTIM:
        send, numbers = getattr(Channel, method), itertools.count()

        def send_some(*arguments: Any) -> Any:
            if next(numbers) == 2:
                raise KeyboardInterrupt
            return send(*arguments)

        with mock.patch.object(Channel, method, send_some), pytest.raises(KeyboardInterrupt):
            _send_early(model)
    else:
        with pytest.raises(popdist.MicroBatchError):
            _send_early(model)
    for _ in range(overlap_laws.NUM_STEPS):
        training_laws.train(model, overlap_laws.full_batch())
        assert overlap_laws.same_bits(before, overlap_laws.gradients(model))
    popdist.finalize()


def _send_early(model: popdist.ReplicatedModel) -> None:
    model.zero_grad()
    for x, _ in model.micro_batches(overlap_laws.full_batch()):
        overlap_laws.meet()
        model(x).square().mean().backward()


ENDS = ("end", "hold", "raise")
"""Of programs: without finalize(), with a loop that the interpreter's end closes, with an exception in one."""


def main(folder: Path) -> None:
    """Fork the two instances of a job for each end; a fork returns, so that its interpreter ends as a program's.

    What it writes to its standard error is in ``folder``; the exit codes are printed.
    """
    torch.optim.SGD([torch.zeros(1)])  # has torch import the rest of itself once, and not in each instance
    gc.freeze()
    codes = []
    for end in ENDS:
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            master = Endpoint(host="127.0.0.1", port=held.getsockname()[1])
            contract = Contract(num_instances=2, num_replicas=2, num_threads=1, job_id="overlap", master=master)
            children = []
            for index in range(2):
                children.append(os.fork())
                if not children[-1]:
                    os.environ.update(replace(contract, instance_index=index, host_index=index).to_env())
                    os.dup2(os.open(folder / f"{end}-{index}", os.O_WRONLY | os.O_CREAT), 2)
                    live(end)
                    return
            codes.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    sys.stdout.write(json.dumps(codes))


def live(end: str) -> None:
    """A program that just ends, or holds a loop, or whose instance 1 raises when its gradients have gone."""
    model = _begin()
    model.zero_grad()
    if end == "hold":
        gc.disable()
        cycle: list[object] = [model.micro_batches(overlap_laws.full_batch())]
        next(cycle[0])  # type: ignore[call-overload] # it is an iterator
        cycle.append(cycle)
        overlap_laws.meet()
        return
    for x, _ in model.micro_batches(overlap_laws.full_batch()):
        overlap_laws.meet()
        model(x).square().mean().backward()
        if end == "raise" and popdist.instance_index() == 1:
            raise ValueError("no more")


def _prepare_to_die(model: nn.Module, way: str) -> None:
    if way == "as all agree to send":
        mock.patch.object(Overlap, "post_receives", side_effect=_die).start()
    elif way == "in its backward pass":
        next(iter(model.parameters())).register_hook(lambda _: _die())
    else:  # all have come to the end of the step, and the thread has sent no results
        mock.patch.object(Channel, "_run", side_effect=lambda _: threading.Event().wait()).start()
        mock.patch.object(OverlappedSum, "wait", side_effect=lambda *_, **__: _die()).start()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
