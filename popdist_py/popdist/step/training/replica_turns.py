"""Replicas of one instance that take turns: threads of which exactly one runs at a time.

The turn passes from replica to replica, in replica order, when the running replica waits at a batch norm layer or
ends. Before its turn, a replica gets its random states, buffers and gradients. Each thread begins with the grad
mode, the autocast and the context variables of the caller.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from popdist.data.randomness import ReplicaRandomness
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.memory import ModelGradients
from popdist.ground.accelerators import accelerator
from popdist.step.training.norm_sync import GroupSync, NormGroups, NormTurn

if TYPE_CHECKING:
    from popdist.step.training.step import Step

R = TypeVar("R")


class Turns:
    """Threads that run one at a time: ``enter`` is called when a thread's turn begins, ``exit_`` when it ends."""

    def __init__(self, enter: Callable[[int], None], exit_: Callable[[int], None]) -> None:
        self._enter = enter
        self._exit = exit_
        self._living: list[int] = []
        self._gates: list[threading.Semaphore] = []
        self._is_cancelled = False
        self._is_entered = False
        self._errors: list[BaseException] = []

    def run(self, bodies: Sequence[Callable[[], None]], interrupt: Callable[[], None]) -> None:
        """Run each of ``bodies`` in its own thread, wait until all have ended, and raise the first error."""
        self._living = list(range(len(bodies)))
        self._gates = [threading.Semaphore(0) for _ in bodies]
        threads: list[threading.Thread] = []
        try:
            for number, body in enumerate(bodies):
                name = f"popdist-replica-{number}"
                thread = threading.Thread(target=self._run, args=(number, body), name=name, daemon=True)
                thread.start()
                threads.append(thread)
        except BaseException:
            self._is_cancelled = True
            for gate in self._gates:
                gate.release()
            raise
        self._gates[0].release()
        while any(thread.is_alive() for thread in threads):
            try:
                for thread in threads:
                    thread.join()
            except BaseException as error:  # noqa: BLE001 - an error of a signal handler, raised below
                self._errors.insert(0, error)
                interrupt()
        if self._errors:
            raise self._errors[0]

    def _run(self, number: int, body: Callable[[], None]) -> None:
        self._gates[number].acquire()
        if self._is_cancelled:
            return
        try:
            self._begin_turn(number)
            try:
                body()
            finally:
                self._end_turn(number)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._errors.append(error)
        after = self._after(number)
        self._living.remove(number)
        self._gates[after].release()

    def pass_on(self, number: int) -> None:
        """Let the other threads run; return when it is the turn of thread ``number`` again."""
        after = self._after(number)
        if after != number:
            self._end_turn(number)
            self._gates[after].release()
            self._gates[number].acquire()
            self._begin_turn(number)

    def _begin_turn(self, number: int) -> None:
        self._enter(number)
        self._is_entered = True

    def _end_turn(self, number: int) -> None:
        if self._is_entered:  # otherwise entering has failed, or the turn has already ended
            self._is_entered = False
            self._exit(number)

    def _after(self, number: int) -> int:
        """Return the number of the thread that runs after thread ``number``; skip threads that have ended."""
        place = self._living.index(number) + 1
        return self._living[place % len(self._living)]


class ThreadModes:
    """Torch's modes (such as autocast and no_grad) of the thread that makes this object, for other threads."""

    def __init__(self) -> None:
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._casts = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", accelerator.found_type())
            if device is not None and torch.is_autocast_enabled(device)
        ]
        self._has_cast_cache = torch.is_autocast_cache_enabled()
        found = accelerator.type_in_use()
        self._stream = None if found is None else torch.accelerator.current_stream()
        self._device = torch.get_default_device()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which this thread has the recorded modes, and its backward passes use no other thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._is_grad_enabled))
            for device, dtype in self._casts:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self._has_cast_cache))
            if self._stream is not None:
                stack.enter_context(accelerator.in_stream(self._stream))
            if self._device.type != "cpu":
                stack.enter_context(self._device)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield


class ReplicaTurns(Generic[R]):
    """The replicas of this instance in one step; the replicas of a batch norm group run one at a time."""

    def __init__(
        self,
        step: "Step",
        randomness: ReplicaRandomness,
        buffers: ReplicaBuffers,
        gradients: ModelGradients,
    ) -> None:
        self._step = step
        self._randomness = randomness
        self._buffers = buffers
        self._gradients = gradients
        self._modes = ThreadModes()
        self._stored_buffers: dict[int, dict[str, Tensor]] = {}
        self._stored_gradients: dict[int, list[Tensor | None]] = {}

    def run_all(
        self, groups: NormGroups, bodies: Sequence[Callable[[], R] | None], weights: Sequence[float]
    ) -> list[R]:
        """Call the function of each micro batch (None if it has no samples); return all results in order."""
        found: dict[int, R] = {}
        first, accumulation = groups.plan[0].replicas.start, self._step.accumulation
        for part in groups.plan:
            index_of = {it: (it - first) * accumulation + part.step for it in part.replicas}
            own = {it: body for it, index in index_of.items() if (body := bodies[index]) is not None}
            for replica, result in self._run(groups.size, part.sync, own).items():
                found[index_of[replica]] = result
            for replica, index in index_of.items():
                self._load_replica(replica)
                self._step.add_in_turn(index, weights[index] if replica in own else None)
                self._store_replica(replica)
        return [found[index] for index in sorted(found)]

    def _run(self, size: int, sync: GroupSync, bodies: Mapping[int, Callable[[], R]]) -> dict[int, R]:
        """Call ``bodies``, one function per local replica of a group, in turns; return the results by replica."""
        if not bodies:
            return {}
        results: dict[int, R] = {}
        errors: dict[int, BaseException] = {}
        replicas = sorted(bodies)
        scopes = [self._randomness.of(replica, self._gradients.device) for replica in replicas]

        def enter(number: int) -> None:
            scopes[number].__enter__()
            self._load_replica(replicas[number])
            NormTurn.current = norm_turns[number]

        def exit_(number: int) -> None:
            NormTurn.current = None
            try:
                self._store_replica(replicas[number])
            finally:
                scopes[number].__exit__(None, None, None)

        def compute(number: int) -> None:
            replica = replicas[number]
            try:
                with self._modes.in_place(), norm_turns[number]:
                    results[replica] = bodies[replica]()
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                errors[replica] = error

        turns = Turns(enter, exit_)
        norm_turns = [
            NormTurn(size=size, replica=replica, sync=sync, pass_on=partial(turns.pass_on, number))
            for number, replica in enumerate(replicas)
        ]
        numbers = range(len(replicas))
        contexts = [contextvars.copy_context() for _ in numbers]
        turns.run([partial(contexts[i].run, compute, i) for i in numbers], sync.cancel)
        for error in sorted(errors.values(), key=sync.has_ended_by):
            raise error
        return results

    def _load_replica(self, replica: int) -> None:
        """Put the saved buffers and gradients of ``replica`` back into the model."""
        self._buffers.load(self._stored_buffers.pop(replica, {}))
        gradients = self._stored_gradients.pop(replica, None)
        if gradients is not None:
            for parameter, gradient in zip(self._gradients.parameters(), gradients, strict=True):
                parameter.grad = gradient

    def _store_replica(self, replica: int) -> None:
        """Store buffers and gradients of ``replica``; reset buffers to the step's start, and remove gradients."""
        self._stored_buffers[replica] = self._buffers.store()
        parameters = self._gradients.parameters()
        gradients = [parameter.grad for parameter in parameters]
        if any(it is not None for it in gradients):
            self._stored_gradients[replica] = gradients
            for parameter in parameters:
                parameter.grad = None
