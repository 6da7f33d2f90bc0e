"""The agent of an instance: it starts the program, reports its end to poprun, and leaves no process behind.

An agent has its own session, which Ctrl-C and the MPI runtime do not reach, and is a subreaper. It ends the
program's tree when poprun orders this, when poprun or the shim is gone, and when the program has ended. The agent
imports little of the standard library and nothing else, because each shim of an MPI job loads it in a bare
interpreter.
"""

from __future__ import annotations

import errno
import os
import select
import time

from poprun.launch.messages import ProtocolError
from poprun.launch.messages.control import RECEIVE_BYTES, Link, Message, connect, is_remote, notice_death
from poprun.launch.mpi_leftovers import remove_abandoned
from poprun.launch.process.process_tree import (
    ancestors,
    catchers,
    descendants,
    has_ended,
    key_of,
    reap,
    send,
)
from poprun.launch.process.spawn import (
    ProcessStart,
    become_subreaper,
    die_with_parent,
    start_process,
    take_memory_from,
)
from poprun.launch.program_watch import ProgramWatch
from poprun.launch.tree_ending import TreeEnding

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Callable, Collection, Mapping
    from typing import Any, NamedTuple
else:
    import _signal as signal  # the modules signal and socket would load enum and more
    import _socket as socket

    from poprun.launch.process import NamedTuple

_BACKLOG = 2048
NUM_STREAMS = 3
_CONNECT_SECONDS = 30.0
_SHORT_MILLISECONDS = 20
_LONG_MILLISECONDS = 200
_REPORT_SECONDS = 2.0


class Parentage(NamedTuple):
    """The parents of an agent: the shim, poprun's process that forked the agent, and the shim's own parent."""

    shim: int  # the process id of its shim
    runtime: int  # the process id of the process that started the shim
    ends: Collection[int]  # descriptors that become readable when the shim or the runtime ends
    # the environment of the shim; the program gets it with poprun's additions
    environment: Mapping[str, str]


class HeldKey(NamedTuple):
    """The job's secret key, with which an agent connects to poprun over a network; empty without a network."""

    text: str
    file: str  # the file that contained the key


def forget_key(key: HeldKey) -> None:
    """Remove the file with the job's secret key; do nothing if another agent has already removed the file."""
    try:
        os.unlink(key.file)
    except OSError:
        return


def bind(cores: Collection[int], memory_nodes: Collection[int]) -> dict[str, str]:
    """Bind this process to cores and NUMA nodes; return {}, or {"memory_not_bound": reason} if only cores work."""
    # child processes inherit both settings: sched_setaffinity(2); set_mempolicy(2), which containers may forbid
    if cores:
        os.sched_setaffinity(0, cores)
        if os.sched_getaffinity(0) != set(cores):  # the kernel silently leaves out cores that it cannot give
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if memory_nodes:
        try:
            take_memory_from(memory_nodes)
        except OSError as error:
            return {"memory_not_bound": error.strerror or str(error)}
    return {}


class HeldPorts:
    """The ports for libraries of an instance's program, reserved by sockets until the libraries listen there."""

    # Every instance must know the ports before the program listens. The kernel gives a port that is bound with
    # SO_REUSEADDR to no process that asks for any free port, but the library's listener can still bind the port.

    def __init__(self, address: str, index: int) -> None:
        anywhere = "::" if ":" in address else "0.0.0.0"  # noqa: S104 - the socket does not listen
        # TensorFlow's worker listens on all addresses; on instance 0 also torch's store and JAX's coordinator
        self.sockets = [_bound(it, is_shared=True) for it in (anywhere, *([address] * 2 if index == 0 else []))]
        # of popdist's own store, which instance 0's program inherits and finds listening
        self.store = _bound(address, is_shared=False) if index == 0 else None
        if self.store is not None:
            self.store.listen(_BACKLOG)
            self.sockets.append(self.store)

    @property
    def numbers(self) -> list[int]:
        """The reserved port numbers: of TensorFlow, and in instance 0 of torch's store, JAX, popdist's store."""
        return [bound.getsockname()[1] for bound in self.sockets]

    def has_worker(self) -> bool:
        """Whether TensorFlow listens at its port; if not, this process listens at the port from now on."""
        try:
            self.sockets[0].listen()
        except OSError:
            return True
        return False


def _bound(address: str, *, is_shared: bool) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((address, 0))
    return bound


def connect_streams(address: str, key: str, index: int, timeout_seconds: float) -> list[int]:
    """Connect the program's standard streams to poprun on another host; return the sockets' descriptors."""
    streams = [] if index == 0 else [os.open(os.devnull, os.O_RDONLY)]
    for number in range(len(streams), NUM_STREAMS):
        link = connect(address, key, timeout_seconds)
        link.send({"event": "stream", "instance": index, "stream": number})
        streams.append(link.connection.detach())
    return streams


def detach_streams() -> None:
    """Replace this process's standard streams by /dev/null, because an MPI runtime may wait until they close."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(NUM_STREAMS):
        os.dup2(null, descriptor)
    os.close(null)


def run_agent(address: str, key: HeldKey, index: int, parentage: Parentage) -> int:
    """Run the agent, which starts and ends the program of instance ``index``; return the agent's exit code."""
    os.setsid()
    try:
        streams = connect_streams(address, key.text, index, _CONNECT_SECONDS) if is_remote(address) else []
        control = connect(address, key.text, _CONNECT_SECONDS)
        if is_remote(address):
            notice_death(control.connection)
    except (ConnectionError, TimeoutError, ProtocolError):
        return 1  # poprun is gone, so the agent cannot report the error
    try:
        Agent(control, index, parentage, streams, key).run()
    except OSError as error:
        control.send({"event": "agent_lost", "instance": index, "errno": error.errno or 0})
        raise
    forget_key(key)
    control.close()
    return 0


class Agent:
    """An agent, poprun's process on a host that starts, watches and ends one program; :meth:`run` is its loop."""

    def __init__(self, control: Link, index: int, parentage: Parentage, streams: list[int], key: HeldKey) -> None:
        self._control = control
        self._parentage = parentage
        self._streams = streams
        self._key = key
        self._ports = HeldPorts(control.own_address(), index)
        self._program: int | None = None
        self._ending = TreeEnding()
        self._watch = ProgramWatch()
        self._poll = select.poll()
        # by descriptor; a listener returns False if its sender is gone
        self._listeners: dict[int, Callable[[], bool]] = {}
        self._lease_address = ""
        parents = {"shim": parentage.shim, "runtime": parentage.runtime}
        place = {"address": control.own_address(), "ports": self._ports.numbers}
        hello = {"event": "hello", "instance": index, "pid": os.getpid(), **parents, **place}
        self._unsent: list[Message] = [hello]

    @property
    def _is_orphan(self) -> bool:
        """Whether the connection to poprun is lost, so that no more orders can arrive."""
        return self._control.fileno() not in self._listeners

    def run(self) -> None:
        """Obey poprun's orders until all processes of the program have ended, or the program cannot start."""
        detach_streams()
        began_at_seconds = time.monotonic()
        wakeup = self._catch_signals()
        become_subreaper()
        die_with_parent(signal.SIGCONT)  # a stopped agent must wake up to end the program
        ends = set(self._parentage.ends)
        self._listen_to(self._control.fileno(), self._obey_poprun)
        self._listen_to(wakeup, lambda: bool(os.read(wakeup, RECEIVE_BYTES)))
        for end in ends:
            self._listen_to(end, lambda: self._lose_shim(ends))
        while not self._ending.is_over(self._program):
            self._report_program()
            self._send()
            for descriptor, _ in self._poll.poll(self._poll_milliseconds()):
                listener = self._listeners.get(descriptor)  # an earlier listener may have removed it
                if listener is not None and not listener():
                    self._forget(descriptor)
            self._ending.obey_signal(self._program)
            self._reap()
        self._report_program()
        self._await_report_of_shim(ends)
        self._queue({"event": "ended"})
        self._send()
        if self._is_orphan or self._control.is_sealed:  # otherwise poprun does this once for all instances
            remove_abandoned(time.monotonic() - began_at_seconds)
        self._leave_lease()
        if self._is_orphan and self._control.is_sealed:
            self._end_runtime()
        self._continue_parents()

    def _listen_to(self, descriptor: int, listener: Callable[[], bool]) -> None:
        self._listeners[descriptor] = listener
        self._poll.register(descriptor, select.POLLIN)

    def _forget(self, descriptor: int) -> None:
        if self._listeners.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _lose_shim(self, ends: set[int]) -> bool:
        """Stop the program, only once, because the agent's parent (the shim) or grandparent process has ended."""
        if ends:
            self._queue({"event": "shim_lost"})
            self._ending.stop(self._program)
        while ends:
            self._forget(ends.pop())
        return True

    def _await_report_of_shim(self, ends: set[int]) -> None:
        """Wait briefly until the shim, the agent's parent, has reported to poprun that the shim's parent ended."""
        if ends and has_ended(self._parentage.runtime):
            select.select(ends, (), (), _REPORT_SECONDS)

    def _end_runtime(self) -> None:
        """End the MPI daemon that started the agent's parent: it would wait for the lost mpiexec for ever."""
        runtime = key_of(self._parentage.runtime)
        if runtime is not None and any(key.pid == self._parentage.shim for key in descendants(runtime.pid)):
            send([runtime], signal.SIGTERM)

    def _continue_parents(self) -> None:
        """Send SIGCONT to the agent's parent and grandparent, which must end now: a stopped process cannot end."""
        # a living poprun continues its own children; its user may have stopped poprun itself on purpose
        shim, runtime = self._parentage.shim, self._parentage.runtime
        pids = [shim, *([runtime] if self._is_orphan or self._control.is_sealed else [])]
        pids += list(ancestors(runtime))[:1] if self._is_orphan else []
        send([key for key in map(key_of, pids) if key is not None], signal.SIGCONT)

    def _report_program(self) -> None:
        """Queue events for poprun: the program's use of resources, its leftover processes, requested stacks."""
        if self._program is not None and self._watch.is_due():
            self._queue(self._watch.measure())
        if leftovers := self._ending.news():
            self._queue(leftovers)
        if answer := self._watch.answer():
            self._queue(answer)

    def _poll_milliseconds(self) -> float | None:
        if self._ending.has_begun or self._watch.is_asked:
            return _SHORT_MILLISECONDS if self._program or not self._ending.is_patient else _LONG_MILLISECONDS
        return None if self._program is None else self._watch.patience_seconds() * 1000

    def _catch_signals(self) -> int:
        """Let a child's end wake the loop, and SIGTERM stop the program; return the descriptor that wakes it."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._ending.note_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return reader

    def _queue(self, message: Message) -> None:
        self._unsent.append(message)

    def _send(self) -> None:
        """Send all queued events to poprun at once, so that poprun wakes up only once."""
        messages, self._unsent = self._unsent, []
        try:
            self._control.send(*messages)
        except OSError:  # poprun is gone; the loop learns this from the closed socket
            return

    def _obey_poprun(self) -> bool:
        """Obey the orders that have arrived from poprun; if poprun is gone, stop the program and return False."""
        if self._receive():
            return True
        self._ending.stop(self._program)
        return False

    def _receive(self) -> bool:
        """Read poprun's orders and obey; return False if poprun is gone or sends something that is no message."""
        received = self._control.receive()
        if received is None or received.refusals:
            return False
        self._streams += received.descriptors
        for message in received.messages:
            self._execute(message)
        return True

    def _execute(self, order: dict[str, Any]) -> None:
        if order["order"] == "start" and not self._ending.was_stopped:
            self._start(order)
        elif order["order"] == "signal" and self._program is not None:
            os.killpg(self._program, order["signal"])
            self._watch.pause_or_resume(order["signal"])
        elif order["order"] == "offer_signal" and self._program is not None:
            self._pass_signal(order["signal"])
        elif order["order"] == "stacks" and self._program is not None:
            self._watch.ask_for_stacks(order["most_helpers"])
        elif order["order"] == "clock":
            self._queue({"event": "clock", "sent_ns": order["sent_ns"], "answered_ns": time.time_ns()})
        elif order["order"] == "calls" and self._program is not None and not self._watch.is_asked:
            # two questions at once would mix up the processes' answers; poprun repeats a question about calls
            self._watch.ask_for_calls(order["most_helpers"])
        elif order["order"] == "stop":
            is_kept = self._program is not None and (self._watch.uses_jax() or self._ports.has_worker())
            self._ending.grace_seconds = order["grace_seconds_in_vain" if is_kept else "grace_seconds"]
            self._ending.stop(self._program)
        elif order["order"] == "kill":
            self._ending.kill()

    def _start(self, order: dict[str, Any]) -> None:
        """Start the program in ``order``, in the environment of the agent's parent, changed by ``order``."""
        forget_key(self._key)  # every agent has connected to poprun
        self._ending.grace_seconds = order["grace_seconds"]
        self._lease_address = order["lease_address"]
        try:
            self._streams += self._fetch_lease()
        except OSError as error:
            self._fail({"event": "failed_to_hold", "errno": error.errno or 0})
            return
        inherited = self._parentage.environment
        environment = {name: value for name, value in inherited.items() if not name.startswith("POPRUN_")}
        environment |= order["environment"]
        for_program = self._open_descriptors(order, environment)
        try:
            binding_problem = bind(order["cores"], order["memory_nodes"])
        except OSError as error:
            self._fail({"event": "failed_to_bind", "errno": error.errno, "cores": order["cores"]})
        else:
            self._run(order, environment, binding_problem, kept=for_program)
        # pipes close only if all copies close; the other streams are leases, which last as long as this agent
        for descriptor in (*self._streams[:NUM_STREAMS], *for_program):
            os.close(descriptor)

    def _open_descriptors(self, order: dict[str, Any], environment: dict[str, str]) -> list[int]:
        """Open the program's descriptors and put their numbers in ``environment``; return those to close here."""
        for_program = []
        if self._ports.store is not None:
            for_program.append(self._ports.store.detach())
            environment[order["store_variable"]] = str(for_program[-1])
        page = self._watch.open_page(order)
        if order["progress_variable"]:
            environment[order["progress_variable"]] = str(page)
        if order["numbers_variable"]:
            for_program.append(self._watch.open_numbers())
            pipe = for_program[-1]
            environment[order["numbers_variable"]] = f"{pipe}:{os.fstat(pipe).st_ino}"
        if order["clock_variable"]:
            for_program.append(self._open_clock())
            environment[order["clock_variable"]] = str(for_program[-1])
        return for_program

    def _open_clock(self) -> int:
        """Begin to answer a traced program's questions for the time; return the descriptor for the program."""
        from poprun.launch.clock_answers import ClockAnswers

        clock = ClockAnswers()
        self._listen_to(clock.fileno(), clock.answer)
        return clock.for_program.detach()

    def _fetch_lease(self) -> list[int]:
        """Fetch the locked files that are the job's lease (right to use devices); return [] without a lease."""
        if not self._lease_address:
            return []
        from poprun.launch.fetched_lease import fetch_lease

        return fetch_lease(self._lease_address)

    def _leave_lease(self) -> None:
        """Let the process that keeps the job's lease (right to use devices) end: order its end if poprun is lost.
        Otherwise send SIGCONT, because a stopped process cannot end.
        """
        if self._lease_address:
            from poprun.launch.fetched_lease import give_up_lease, wake_holder

            (give_up_lease if self._is_orphan else wake_holder)(self._lease_address)

    def _fail(self, event: Message) -> None:
        """Queue the event that says why the program cannot be started, and end the agent's loop."""
        self._queue(event)
        self._ending.give_up()

    def _run(
        self, order: dict[str, Any], environment: dict[str, str], binding_problem: dict[str, str], kept: list[int]
    ) -> None:
        named = [int(environment[name]) for name in order["descriptor_variables"] if name in environment]
        streams = self._streams[:NUM_STREAMS]
        start = ProcessStart(
            order["words"],
            order["working_directory"],
            environment,
            streams,
            signal.SIGKILL,
            {*named, *kept},
            order["open_files"],
        )
        try:
            self._program = start_process(start)
        except OSError as error:
            self._fail({"event": "failed_to_start", "errno": error.errno, "place": error.filename})
        else:
            self._watch.begin(environment.get("TMPDIR", "/tmp"))
            self._queue({"event": "started", "pid": self._program, **binding_problem})

    def _pass_signal(self, signum: int) -> None:
        """Send ``signum`` to the program's processes that handle it; if no process does, report this to poprun."""
        catching = catchers(signum)
        send(catching, signum)
        if not catching:
            self._queue({"event": "signal_unhandled", "signal": signum})

    def _reap(self) -> None:
        for ended in reap():
            if ended.pid == self._program:
                self._program = None
                self._queue(self._watch.last_event())
                event = {"event": "exited", "code": ended.code, "at_seconds": time.monotonic()}
                end = {"peak_bytes": ended.peak_bytes, "was_stopped": self._ending.was_stopped}
                remains = {} if ended.code == 0 else self._watch.remains()
                self._queue({**event, **end, **remains})
                if ended.code and self._control.is_sealed:
                    self._send()
                    self._queue(self._watch.machine_event())
                self._ending.end_leftovers(after_good_end=ended.code == 0)
