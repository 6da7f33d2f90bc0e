"""Bugs that an engineer could write: each changes what one function does, and names the tests that should notice.

A bug says nothing of the text of a function: its ``change`` takes the right function and returns the wrong one. So
it lasts as long as the function has its name.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug.

    Attributes:
        name: What goes wrong.
        target: Module and function, such as ``policy.decide``, or module, class and method.
        change: Python that makes the wrong function of the right one; it sees the names of the module.
        tests: The tests below ``tests`` that should notice, as pytest names them.
    """

    name: str
    target: str
    change: str
    tests: tuple[str, ...]


BUGS = (
    # planning
    Bug(
        "instances of a host leave its last NUMA node unused",
        "placement._owned_nodes",
        "lambda right: lambda nodes, demand: [owned - {len(nodes) - 1} for owned in right(nodes, demand)]",
        ("unit/test_placement.py",),
    ),
    Bug(
        "a square number has one divisor twice",
        "request._divisors",
        "lambda right: lambda number: (it for it in right(number) for _ in range(1 + (it * it == number)))",
        ("unit/test_request.py",),
    ),
    Bug(
        "a pod's hosts get overlapping shares",
        "pods.share_of",
        "lambda right: lambda pod, host: pod.ipus[pod.hosts.index(host) :][: len(right(pod, host))]",
        ("unit/test_pods.py", "unit/test_ranges.py"),
    ),
    Bug(
        "an instance's replicas are those of the one before",
        "layout.ReplicaLayout.replicas_of",
        "lambda right: lambda self, index: right(self, max(index - 1, 0))",
        ("unit/test_layout.py",),
    ),
    # the job
    Bug(
        "a second Ctrl-C does not kill",
        "policy.decide",
        "lambda right: lambda job, limits: right(__import__('dataclasses').replace("
        "job, num_interrupts=min(job.num_interrupts, 1)), limits)",
        ("unit/test_policy.py",),
    ),
    Bug(
        "the pause before a restart has no bound",
        "attempts.restart_pause_seconds",
        "lambda right: lambda count: 2.0**count",
        ("unit/test_attempts.py",),
    ),
    Bug(
        "a program killed by a signal gives poprun the signal's number as exit code",
        "record.exit_code",
        "lambda right: lambda end: right(end) % 128",
        ("unit/test_printed_report.py", "unit/test_attempts.py"),
    ),
    Bug(
        "line endings are changed",
        "lines.LineSplitter.feed",
        r"lambda right: lambda self, data: right(self, data).replace(b'\r\n', b'\n')",
        ("unit/test_lines.py",),
    ),
    Bug(
        "an unsealed message is accepted",
        "proofs.Seal.open",
        "lambda right: lambda self, line: right(self, line) if line.partition(_SEPARATOR)[0]"
        " else line.partition(_SEPARATOR)[2]",
        ("unit/test_control.py",),
    ),
    Bug(
        "a process that got a dead one's id is signalled",
        "process_tree.send",
        "lambda right: lambda keys, signum: [os.kill(key.pid, signum) for key in keys]",
        ("process/test_process_tree.py",),
    ),
    # the pool and leases
    Bug(
        "a lease outlasts a reboot",
        "holders.is_alive",
        "lambda right: lambda holder, is_locked: right(__import__('dataclasses').replace("
        "holder, boot_id=boot_id()), is_locked)",
        ("unit/test_pool.py",),
    ),
    Bug(
        "the server lets in who shows no token",
        "token_proofs.Challenges.is_answered_by",
        "lambda right: lambda self, header, *said: not header or right(self, header, *said)",
        ("process/test_served_pool.py::test_what_is_not_allowed_is_refused_in_one_line",),
    ),
    # the order of addition
    Bug(
        "an instance's block is cut into more partial sums than need be",
        "tree.aligned_nodes",
        "lambda right: lambda start, stop, n: [it for first in range(start, stop)"
        " for it in right(first, first + 1, n)]",
        ("unit/test_tree.py",),
    ),
    Bug(
        "floats are added one after the other, and not as a tree",
        "addition.additions",
        "lambda right: lambda num_rows: tuple((0, it) for it in range(1, num_rows))",
        ("unit/test_addition.py",),
    ),
    # a step of training
    Bug(
        "long descriptions that differ at the end agree",
        "groups._fit",
        "lambda right: lambda text: text[:TEXT_BYTES]",
        ("unit/test_groups.py",),
    ),
    Bug(
        "a micro batch's weight is forgotten",
        "replicated_model.ReplicatedModel.micro_batch",
        "lambda right: lambda self, index, *, weight=1.0, **more: right(self, index, **more)",
        ("contract/test_training.py::test_laws[1-3]", "contract/test_training.py::test_laws[2-6]"),
    ),
    Bug(
        "all replicas draw the same random numbers",
        "randomness._number",
        "lambda right: lambda seed, replica, generator: right(seed, 0, generator)",
        ("contract/test_training.py::test_laws[1-3]", "contract/test_training.py::test_laws[2-6]"),
    ),
    # data and checkpoints
    Bug(
        "a permutation gives some samples twice",
        "epoch.Permutation.indices",
        "lambda right: lambda self, positions: right(self, positions) // 2 * 2",
        ("unit/test_epoch.py",),
    ),
    Bug(
        "a resumed epoch begins at its start",
        "position.EpochPosition.load_state_dict",
        "lambda right: lambda self, state: right(self, {**state, 'position': 0})",
        ("unit/test_sampler.py",),
    ),
    Bug(
        "one checkpoint more than asked for is kept",
        "checkpoint_folder.keep_last",
        "lambda right: lambda folder, count: right(folder, count + 1)",
        ("unit/test_checkpoint_folder.py",),
    ),
)
