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
from poprun.launch.program_watch import ProgramQuestion, ProgramWatch
from poprun.launch.tree_ending import TreeEnding

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Collection, Mapping
    from typing import Any, NamedTuple

    from poprun.launch.clock_answers import ClockAnswers
else:
    import _signal as signal  # the modules signal and socket would load enum and more
    import _socket as socket

    from poprun.launch.process import NamedTuple

_BACKLOG = 2048
NUM_STREAMS = 3
_CONNECT_SECONDS = 30.0
_WALK_MILLISECONDS = 20
_LOOK_MILLISECONDS = 200
_WORD_SECONDS = 2.0


class Parentage(NamedTuple):
    """The processes from which an agent comes: its shim, and the process that started the shim."""

    shim: int  # the process id of its shim
    runtime: int  # the process id of the process that started the shim
    ends: Collection[int]  # descriptors that become readable when the shim or the runtime ends
    # the environment of the shim; the program gets it with poprun's additions
    environment: Mapping[str, str]


class HeldKey(NamedTuple):
    """The key of the agent's job; both fields are empty if the kernel identifies the agents."""

    text: str
    file: str  # the file that contained the key


def forget_key(key: HeldKey) -> None:
    """Remove the file of the key, which every shim has read; another agent may already have removed the file."""
    try:
        os.unlink(key.file)
    except OSError:
        return


def bind(cores: Collection[int], memory_nodes: Collection[int]) -> dict[str, str]:
    """Bind this process to cores and memory nodes; return the reason if the memory cannot be bound, else {}."""
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


def hold_port(address: str) -> socket.socket:
    """Return a socket that keeps a free port of ``address`` for a library of the program, without listening."""
    # Every instance must know the port before the program listens. The kernel gives a port that is bound with
    # SO_REUSEADDR to no process that asks for any free port, but the library's listener can still bind the port.
    holder = socket.socket(_family(address), socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def is_in_use(holder: socket.socket) -> bool:
    """Whether a library listens at the port of ``holder``; if not, ``holder`` takes the port from now on."""
    try:
        holder.listen()
    except OSError:
        return True
    return False


def open_store_listener(address: str) -> socket.socket:
    """Return a listening socket at ``address`` for popdist's own store, which instance 0's program inherits."""
    listener = socket.socket(_family(address), socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(_BACKLOG)
    return listener


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def connect_streams(address: str, key: str, index: int, timeout_seconds: float) -> list[int]:
    """Return the program's streams if poprun is on another host: sockets; only instance 0 can read input."""
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
    """Run the agent of instance ``index`` to its end and return its exit code; report an OSError to poprun."""
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
    """The state of an agent, and its reaction to each event; :meth:`run` is the loop."""

    def __init__(self, control: Link, index: int, parentage: Parentage, streams: list[int], key: HeldKey) -> None:
        self._control = control
        self._index = index
        self._parentage = parentage
        self._streams = streams
        self._key = key
        self._is_remote = bool(key.text)
        self._address = control.own_address()
        # one port for TensorFlow's worker, on all addresses; two more for torch's store and JAX's coordinator
        self._held = [hold_port("::" if ":" in self._address else "0.0.0.0")]  # noqa: S104 - the socket does not listen
        self._held += [hold_port(self._address) for _ in range(2 if index == 0 else 0)]
        self._store = open_store_listener(self._address) if index == 0 else None
        self._program: int | None = None
        self._ending = TreeEnding()
        self._was_terminated = False
        self._is_over = False
        self._is_orphan = False
        self._began_at_seconds = time.monotonic()
        self._watch = ProgramWatch()
        self._question: ProgramQuestion | None = None
        self._poll = select.poll()
        self._clock: ClockAnswers | None = None
        self._lease_address = ""
        self._numbers: int | None = None
        self._surroundings: tuple[dict[str, str], str] = ({}, "/")
        self._unsent: list[Message] = []

    def run(self) -> None:
        """Obey poprun's orders until the whole tree of the program has ended, or the program cannot be started."""
        detach_streams()
        wakeup = self._catch_signals()
        self._report_ready()
        become_subreaper()
        die_with_parent(signal.SIGCONT)  # a stopped agent must wake up to end the program
        poll = self._poll
        ends = set(self._parentage.ends)
        for descriptor in (self._control.fileno(), wakeup, *ends):
            poll.register(descriptor, select.POLLIN)
        while not self._is_over:
            self._send()
            for descriptor, _ in poll.poll(self._patience_milliseconds()):
                if descriptor == wakeup:
                    os.read(wakeup, RECEIVE_BYTES)
                elif descriptor in self._parentage.ends:
                    self._lose_shim(poll, ends)
                elif not self._listen_to(descriptor):
                    poll.unregister(descriptor)
            if self._was_terminated and not self._ending.was_stopped:
                self._ending.stop(self._program)
            self._reap()
            self._is_over |= self._ending.is_over(self._program)
            self._report_program()
        self._await_word_of_shim(ends)
        self._queue({"event": "ended"})
        self._send()
        if self._is_orphan or self._is_remote:  # otherwise poprun does this once for all instances
            remove_abandoned(time.monotonic() - self._began_at_seconds)
        self._leave_lease()
        if self._is_orphan and self._is_remote:
            self._end_runtime()
        self._continue_parents()

    def _lose_shim(self, poll: select.poll, ends: set[int]) -> None:
        """Stop the program because the shim or its parent has ended; only the first of the two events counts."""
        if ends:
            self._queue({"event": "shim_lost"})
            self._ending.stop(self._program)
        while ends:
            poll.unregister(ends.pop())

    def _await_word_of_shim(self, ends: set[int]) -> None:
        """Wait until the shim has reported to poprun that its parent ended: this report must arrive first."""
        if ends and has_ended(self._parentage.runtime):
            select.select(ends, (), (), _WORD_SECONDS)

    def _report_ready(self) -> None:
        sockets = [*self._held, *([self._store] if self._store else [])]
        ports = [one.getsockname()[1] for one in sockets]
        known = {"shim": self._parentage.shim, "runtime": self._parentage.runtime, "address": self._address}
        self._queue({"event": "hello", "instance": self._index, "pid": os.getpid(), **known, "ports": ports})

    def _end_runtime(self) -> None:
        """End the MPI daemon that started the shim, because it would wait forever for the unreachable mpiexec."""
        runtime = key_of(self._parentage.runtime)
        if runtime is not None and any(key.pid == self._parentage.shim for key in descendants(runtime.pid)):
            send([runtime], signal.SIGTERM)

    def _continue_parents(self) -> None:
        """Continue the shim and its parent if somebody has stopped them, because both have to end now."""
        # a living poprun continues its own children; its user may have stopped poprun itself on purpose
        shim, runtime = self._parentage.shim, self._parentage.runtime
        pids = [shim, *([runtime] if self._is_orphan or self._is_remote else [])]
        pids += list(ancestors(runtime))[:1] if self._is_orphan else []
        send([key for key in map(key_of, pids) if key is not None], signal.SIGCONT)

    def _report_program(self) -> None:
        """Report the program's use of resources from time to time, and the answers to poprun's questions."""
        if self._program is not None and self._watch.is_due():
            self._queue(self._watch.measure())
        if left := self._ending.news():
            self._queue(left)
        if self._question is not None and (answer := self._question.answer()):
            self._queue(answer)
            self._question = None

    def _patience_milliseconds(self) -> float | None:
        if self._ending.has_begun or self._question is not None:
            return _WALK_MILLISECONDS if self._program or not self._ending.is_patient else _LOOK_MILLISECONDS
        return None if self._program is None else self._watch.patience_seconds() * 1000

    def _catch_signals(self) -> int:
        """Let the end of a child wake the loop, and SIGTERM stop the program; return the descriptor to poll."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return reader

    def _on_terminate(self, *_: object) -> None:
        self._was_terminated = True

    def _queue(self, message: Message) -> None:
        self._unsent.append(message)

    def _send(self) -> None:
        """Send all queued events at once, so that poprun wakes up once."""
        messages, self._unsent = self._unsent, []
        try:
            self._control.send(*messages)
        except OSError:  # poprun is gone; the loop learns this from the closed socket
            return

    def _listen_to(self, descriptor: int) -> bool:
        """Answer the program or obey poprun; return False if the sender is gone.

        If poprun is gone, the agent stops the program.
        """
        if self._clock is not None and descriptor == self._clock.fileno():
            return self._clock.answer()
        if self._receive():
            return True
        self._is_orphan = True
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
            self._question = self._watch.ask_for_stacks(order["most_helpers"])
        elif order["order"] == "clock":
            self._queue({"event": "clock", "sent_ns": order["sent_ns"], "answered_ns": time.time_ns()})
        elif order["order"] == "calls" and self._program is not None and self._question is None:
            # two questions at once would mix up the processes' answers; poprun repeats a question about calls
            self._question = self._watch.ask_for_calls(order["most_helpers"])
        elif order["order"] == "stop":
            is_kept = self._program is not None and (self._watch.uses_jax() or is_in_use(self._held[0]))
            self._ending.grace_seconds = order["grace_seconds_in_vain" if is_kept else "grace_seconds"]
            self._ending.stop(self._program)
        elif order["order"] == "kill":
            self._ending.kill()

    def _start(self, order: dict[str, Any]) -> None:
        """Start the program of the ``start`` order, in the shim's environment with the variables of the order."""
        forget_key(self._key)  # every agent has connected to poprun
        self._ending.grace_seconds = order["grace_seconds"]
        given = self._parentage.environment
        environment = {name: value for name, value in given.items() if not name.startswith("POPRUN_")}
        environment |= order["environment"]
        if self._store is not None:
            environment[order["store_variable"]] = str(self._store.fileno())
        page = self._watch.open_page(order)
        if order["progress_variable"]:
            environment[order["progress_variable"]] = str(page)
        if order["numbers_variable"]:
            self._numbers = self._watch.open_numbers()
            environment[order["numbers_variable"]] = f"{self._numbers}:{os.fstat(self._numbers).st_ino}"
        if order["clock_variable"]:
            environment[order["clock_variable"]] = str(self._open_clock())
        self._lease_address = order["lease_address"]
        try:
            self._streams += self._fetch_lease()
        except OSError as error:
            self._fail({"event": "failed_to_hold", "errno": error.errno or 0})
            return
        try:
            to_tell = bind(order["cores"], order["memory_nodes"])
        except OSError as error:
            self._fail({"event": "failed_to_bind", "errno": error.errno, "cores": order["cores"]})
        else:
            self._run(order, environment, to_tell)
        self._let_go()

    def _open_clock(self) -> int:
        """Begin to answer a traced program's questions for the time; return the descriptor for the program."""
        from poprun.launch.clock_answers import ClockAnswers

        self._clock = ClockAnswers()
        self._poll.register(self._clock.fileno(), select.POLLIN)
        return self._clock.for_program.fileno()

    def _fetch_lease(self) -> list[int]:
        """Return the descriptors of the job's lease; [] if no process of this host keeps a lease of the job."""
        if not self._lease_address:
            return []
        from poprun.launch.fetched_lease import fetch_lease

        return fetch_lease(self._lease_address)

    def _leave_lease(self) -> None:
        """Tell the lease's keeper to end if poprun is out of reach; otherwise wake the keeper."""
        if self._lease_address:
            from poprun.launch.fetched_lease import give_up_lease, wake_holder

            (give_up_lease if self._is_orphan else wake_holder)(self._lease_address)

    def _fail(self, event: Message) -> None:
        """Queue the event that says why the program cannot be started, and end the agent's loop."""
        self._queue(event)
        self._is_over = True

    def _run(self, order: dict[str, Any], environment: dict[str, str], to_tell: dict[str, str]) -> None:
        kept = [int(environment[name]) for name in order["descriptor_variables"] if name in environment]
        kept += [] if self._numbers is None else [self._numbers]
        streams = self._streams[:NUM_STREAMS]
        start = ProcessStart(
            order["words"],
            order["working_directory"],
            environment,
            streams,
            signal.SIGKILL,
            kept,
            order["open_files"],
        )
        try:
            self._program = start_process(start)
        except OSError as error:
            self._fail({"event": "failed_to_start", "errno": error.errno, "place": error.filename})
        else:
            self._watch.begin()
            self._surroundings = (environment, order["working_directory"])
            self._queue({"event": "started", "pid": self._program, **to_tell})

    def _let_go(self) -> None:
        """Close the descriptors that the program has inherited, because pipes close only if all copies close."""
        # the other descriptors are leases on the job's virtual IPUs and cores; they last as long as this agent
        for descriptor in self._streams[:NUM_STREAMS]:
            os.close(descriptor)
        if self._store is not None:
            self._store.close()
        if self._numbers is not None:
            os.close(self._numbers)
        if self._clock is not None:
            self._clock.for_program.close()

    def _pass_signal(self, signum: int) -> None:
        """Send the signal to the processes that handle it; report to poprun if no process handles it."""
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
                remains = {} if ended.code == 0 else self._watch.remains(*self._surroundings)
                self._queue({**event, **end, **remains})
                if ended.code and self._is_remote:
                    self._send()
                    self._queue(self._watch.machine_event())
                self._ending.end_leftovers(after_good_end=ended.code == 0)
